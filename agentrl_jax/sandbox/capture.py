"""The output of one command, read from a pipe by the event loop: the head and the tail are kept, the middle is counted."""

import asyncio
import os

CHUNK = 1 << 16
QUIET = 0.2  # seconds without output after which a background process that holds the pipe is not waited for


class Capture:
    """Reads a pipe until its end.

    keep:     bytes kept: the first half and the last half of the output
    most:     bytes after which `flooded` is set
    write_fd: the end to hand to the command; `hand_over` closes it here
    """

    def __init__(self, keep: int, most: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._half, self._most = max(keep // 2, 1), most
        self._head, self._tail, self.total = bytearray(), bytearray(), 0
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.flooded: asyncio.Future[None] = self._loop.create_future()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._loop.add_reader(self._read_fd, self._read)

    def _read(self) -> None:
        chunk = os.read(self._read_fd, CHUNK)
        self.total += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:] if room > 0 else chunk
        if len(self._tail) > self._half + CHUNK:
            del self._tail[: -self._half]
        if not chunk:
            self._stop(self.ended)
        elif self.total > self._most:
            self._stop(self.flooded)

    def _stop(self, cause: asyncio.Future[None]) -> None:
        self._loop.remove_reader(self._read_fd)
        cause.set_result(None)

    def hand_over(self) -> None:
        """The command has its copy of the write end; the pipe ends when the command's copies are closed."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    async def drain(self, seconds: float) -> None:
        """Wait, after the command's end, for the rest of its output: to the end of the pipe, or until nothing came for a while."""
        deadline = self._loop.time() + max(seconds, QUIET)
        while not (self.ended.done() or self.flooded.done()) and (left := deadline - self._loop.time()) > 0:
            before = self.total
            await asyncio.wait((self.ended, self.flooded), timeout=min(QUIET, left), return_when=asyncio.FIRST_COMPLETED)
            if self.total == before:
                break

    @property
    def dropped(self) -> int:
        return self.total - len(self._head) - min(len(self._tail), self._half)

    @property
    def output(self) -> bytes:
        return bytes(self._head + self._tail[-self._half :])

    def close(self) -> None:
        self.hand_over()
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
