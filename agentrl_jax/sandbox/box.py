"""One bubblewrap box: size-limited memory files in a keeper's namespace, and the processes that use them.

A box has no process until its first command starts one (guest.py, process 1 of the box), and that process may be killed at any time: there
is one way to end what went over a limit, which is to kill everything in the box. The files stay, and the next command starts the guest
again (some 20 ms). Output comes through a pipe of its own, so a kill loses none of it.
"""

import asyncio
import fcntl
import io
import itertools
import os
import socket
import tarfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import PurePosixPath
from typing import Protocol, TypeVar

from agentrl_jax.sandbox.capture import CHUNK, Capture
from agentrl_jax.sandbox.namespace import ISOLATED, START, Namespace, Request, encode, explain, read_all
from agentrl_jax.sandbox.protocol import Limits, Result, SandboxError
from agentrl_jax.sandbox.rootfs import DEVICES

B = TypeVar("B", bound="Unpacks")

FLOOD = 16 << 20  # bytes of output that end a command
FILE_SECONDS = 60.0  # for copying or packing the files of a box
ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # of numerical libraries: each thread takes address space, and they would start as many as the host has cores
    "PYTHONHASHSEED": "0",  # the same program prints its sets in the same order
    "PYTHONDONTWRITEBYTECODE": "1",  # no __pycache__ among the task's files, and no stale one after two edits within a second
}
BWRAP = (
    *("/usr/bin/bwrap", *ISOLATED, "--disable-userns", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "box"),
    *("--ro-bind", "/image", "/", "--proc", "/proc"),
    *(word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
    *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
)
GUEST = ("/usr/bin/python3", "-s", "-S", "-P", "/usr/lib/agentrl/guest.pyc")
READ = ("/usr/bin/sh", "-c", '[ -f "$1" ] && exec head -c "$2" -- "$1"', "sh")
UNPACK = ("/usr/bin/tar", "--extract", "--preserve-permissions", "--directory", "/")
PATH_MAX = 4096
LONGEST = 1000  # bytes of a path that is packed: paths can grow without limit, and an archive with them
PACK_SCRIPT = f"""
    exec 2> /dev/null
    cd "$1" && find workspace tmp -path '{"?" * LONGEST}*' -prune -o -print0 | sort -z |
    tar --create --sparse --numeric-owner --null --no-recursion --files-from=-
"""
PACK = ("/usr/bin/sh", "-c", PACK_SCRIPT, "sh")
COPY = ("/usr/bin/cp", "--archive", "--")
CLOSED = "the box is closed"
NUMBERS = itertools.count()
MTIME = 946_684_800  # of files put: a constant, so that a listing is the same in every run


class Guest:
    """The host's side of guest.py: the first process of a box and the socket to it. Answers are integers, None once it is gone."""

    def __init__(self, process: Request, link: socket.socket) -> None:
        self.process, self._link = process, link
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[int | None] = self._loop.create_future()  # the first one says that it is ready
        self._link.setblocking(False)
        self._loop.add_reader(link, self._read)

    @property
    def gone(self) -> bool:
        return self.answer.done() and self.answer.result() is None

    def ask(self, message: bytes, *descriptors: int) -> asyncio.Future[int | None]:
        self.answer = self._loop.create_future()
        try:
            socket.send_fds(self._link, [message], list(descriptors))
        except OSError:  # it is gone
            self.answer.set_result(None)
        return self.answer

    def _read(self) -> None:
        try:
            message = self._link.recv(64)
        except ConnectionError:
            message = b""
        if not message:
            self._loop.remove_reader(self._link)
        if not self.answer.done():
            self.answer.set_result(int(message) if message else None)

    def close(self) -> None:
        self._loop.remove_reader(self._link)
        self._link.close()
        if not self.answer.done():
            self.answer.set_result(None)


class Box:
    """A `Sandbox`. Whatever uses its files waits for its turn. Made by `Bubblewrap.start` and `fork`."""

    def __init__(self, namespace: Namespace, limits: Limits) -> None:
        self._namespace, self._limits = namespace, limits
        self._number = next(NUMBERS)
        self._lock = asyncio.Lock()
        self._guest: Guest | None = None
        self._live: set[Request] = set()
        self._paused = self._closed = False
        namespace.boxes.add(self)

    @classmethod
    async def make(cls, namespace: Namespace, limits: Limits) -> "Box":
        """A box without files."""
        box = cls(namespace, limits)
        try:
            await namespace.request("make", box._number, limits.disk, limits.inodes).done()
        except BaseException:
            await box.close()
            raise
        return box

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] | None = None
    ) -> Result:
        if isinstance(request := self._request(argv, env), Result):
            return request
        async with self._turn(running=True):
            self._guest = self._guest or await self._start_guest("serve")
            return await self._run(self._guest, request, stdin, seconds)

    async def exec_fresh(
        self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] | None = None
    ) -> Result:
        if isinstance(request := self._request(argv, env), Result):
            return request
        async with self._turn(running=True):
            guest = await self._start_guest("once")
            try:
                return await self._run(guest, request, stdin, seconds, guest.process.answer)
            finally:
                guest.close()

    async def put(self, files: Mapping[str, bytes]) -> Result:
        return await self.unpack(pack(files))

    async def unpack(self, archive: bytes) -> Result:
        """Extract a tar whose members are below `workspace/` and `tmp/`, as the box's user and inside the box."""
        return await self._helper(UNPACK, stdin=archive, keep=self._limits.output)

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        try:
            if len(encode([path])) > PATH_MAX:
                return None
        except ValueError:
            return None
        result = await self._helper((*READ, path, str(limit + 1)), keep=limit + 2)
        return result.output if result.exit_code == 0 and len(result.output) <= limit else None

    async def fork(self) -> "Box":
        async with self._turn(), self._still():
            box = await Box.make(self._namespace, self._limits)
            try:
                code = await self._spawn((*COPY, f"/boxes/{self._number}/.", f"/boxes/{box._number}")).done(FILE_SECONDS)
                if code not in (0, 1):  # 1: something could not be copied, such as a path too long for any program; the policy's loss
                    raise SandboxError(CLOSED if self._closed else f"the files of a box cannot be copied: exit code {code}")
            except BaseException:
                await box.close()
                raise
            return box

    async def snapshot(self) -> bytes:
        most = 2 * self._limits.disk + 4 * LONGEST * self._limits.inodes + (1 << 20)
        async with self._turn(), self._still():
            capture = Capture(most, most)
            try:
                process = self._spawn((*PACK, f"/boxes/{self._number}"), output=capture.write_fd)
                capture.hand_over()
                result = await self._outcome(process, process.answer, capture, FILE_SECONDS)
            finally:
                capture.close()
        if result.exit_code != 0:
            raise SandboxError(f"the files of a box cannot be packed: exit code {result.exit_code}")
        return result.output

    async def pause(self) -> None:
        async with self._turn():
            await self._signal(b"stop")
            self._paused = True

    async def resume(self) -> None:
        async with self._turn():
            await self._signal(b"cont")
            self._paused = False

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for process in self._live:
                process.kill()
            with suppress(SandboxError):  # no keeper, no files
                self._namespace.request("drop", self._number)
            self._namespace.boxes.discard(self)
        try:
            for process in tuple(self._live):
                with suppress(SandboxError):  # no keeper, no process
                    await process.done()
        finally:
            if self._guest:
                self._guest.close()
                self._guest = None

    @asynccontextmanager
    async def _turn(self, running: bool = False) -> AsyncIterator[None]:
        """One user of the box at a time, after what the last one had killed is really gone."""
        async with self._lock:
            if self._guest and (self._guest.process.killed or self._guest.gone):
                self._guest.process.kill()
                self._guest.close()
                self._guest = None
            for process in [process for process in self._live if process.killed]:
                await process.done()
            if self._closed:
                raise SandboxError(CLOSED)
            if running and self._paused:
                raise RuntimeError("the box is paused: resume it before the next command")
            yield

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Nothing in the box runs meanwhile."""
        if not self._paused:
            await self._signal(b"stop")
        try:
            yield
        finally:
            if not self._paused:
                await self._signal(b"cont")

    async def _signal(self, message: bytes) -> None:
        if self._guest:
            answer = self._guest.ask(message)
            try:
                await asyncio.wait({answer}, timeout=START)
            finally:
                if not answer.done():
                    self._guest.process.kill()

    def _request(self, argv: Sequence[str], env: Mapping[str, str] | None) -> bytes | Result:
        """The request as guest.py reads it, or the result of a command that no system can start."""
        fields = [
            str(self._limits.memory),
            str(self._limits.processes),
            str(len(argv)),
            *argv,
            *(f"{k}={v}" for k, v in (env or {}).items()),
        ]
        try:
            return encode(fields) if argv else Result(126, b"an empty command\n")
        except ValueError as error:
            return Result(126, f"not a command: {error}\n".encode())

    async def _start_guest(self, mode: str) -> Guest:
        with os.fdopen(os.memfd_create("errors"), "rb") as errors, ExitStack() as on_failure:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(ours.close)
            with theirs:
                process = self._spawn((*self._bwrap(), *GUEST, mode), output=errors.fileno(), more=(theirs.fileno(),))
            on_failure.callback(process.kill)
            guest = Guest(process, ours)
            on_failure.callback(guest.close)
            await asyncio.wait({guest.answer}, timeout=START)
            if not guest.answer.done() or guest.gone:
                silence = "it was killed" if guest.gone else f"no answer within {START:g} s"
                raise SandboxError(CLOSED if self._closed else explain(read_all(errors.fileno()) or silence))
            on_failure.pop_all()
        return guest

    def _bwrap(self) -> tuple[str, ...]:
        files = f"/boxes/{self._number}"
        return (*BWRAP, "--bind", f"{files}/workspace", "/workspace", "--bind", f"{files}/tmp", "/tmp", "--chdir", "/workspace")

    def _spawn(self, argv: Sequence[str], *, stdin: int | None = None, output: int | None = None, more: Sequence[int] = ()) -> Request:
        with open(os.devnull, "r+b", buffering=0) as null:
            out = null.fileno() if output is None else output
            descriptors = (null.fileno() if stdin is None else stdin, out, out, *more)
            process = self._namespace.request("spawn", self._number, *argv, descriptors=descriptors)
        self._live.add(process)
        process.answer.add_done_callback(lambda _: self._live.discard(process))
        return process

    async def _helper(self, argv: Sequence[str], *, stdin: bytes = b"", keep: int) -> Result:
        """Run a program of the root's, isolated like a command but apart from the commands."""
        async with self._turn():
            capture = Capture(keep, keep + CHUNK)
            try:
                with memory_file(stdin) as source:
                    process = self._spawn((*self._bwrap(), *argv), stdin=source, output=capture.write_fd)
                capture.hand_over()
                result = await self._outcome(process, process.answer, capture, START)
            finally:
                capture.close()
        if result.exit_code == 1 and result.output.startswith(b"bwrap: "):  # no program of ours begins a message like this
            raise SandboxError(explain(result.text))
        return result

    async def _run(
        self, guest: Guest, request: bytes, stdin: bytes, seconds: float | None, status: asyncio.Future[int] | None = None
    ) -> Result:
        """Have the guest run a command; its exit code is the guest's answer, or `status` where that is given."""
        capture = Capture(self._limits.output, FLOOD)
        try:
            with memory_file(request) as fields, memory_file(stdin) as source:
                answer = guest.ask(b"run", fields, capture.write_fd, source)
            capture.hand_over()
            return await self._outcome(guest.process, status or answer, capture, self._limits.seconds if seconds is None else seconds)
        finally:
            capture.close()

    async def _outcome(
        self, process: Request, status: asyncio.Future[int] | asyncio.Future[int | None], capture: Capture, seconds: float
    ) -> Result:
        """Wait for an exit status; kill the process, with all of its box, if a limit or our caller's cancellation comes first."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await asyncio.wait((status, capture.flooded), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            ended = status.done()
            if ended:
                await capture.drain(began + seconds - loop.time())
            code, flooded = status.result() if ended else None, capture.flooded.done()
            took = loop.time() - began
            if code is None or flooded:
                process.kill()
                await process.done()
        except BaseException:
            process.kill()
            raise
        if self._closed:
            raise SandboxError(CLOSED)
        return Result(
            exit_code=None if flooded else code,
            output=capture.output,
            dropped=capture.dropped,
            timed_out=not ended and not flooded,
            killed="output" if flooded else "box" if ended and code is None else None,
            seconds=took,
        )


class Unpacks(Protocol):
    """A box of whatever backend, as `filled` needs it."""

    async def unpack(self, archive: bytes) -> Result: ...

    async def close(self) -> None: ...


async def filled(box: B, archives: Iterable[bytes | None], limits: Limits) -> B:
    """The new box with the files of the archives in it. Closes it and raises ValueError where they do not unpack."""
    try:
        for archive in filter(None, archives):
            if (result := await box.unpack(archive)).exit_code != 0:
                raise ValueError(f"the files given to start() do not unpack within {limits}: {result.text}")
    except BaseException:
        await box.close()
        raise
    return box


def pack(files: Mapping[str, bytes]) -> bytes:
    """A tar of files relative to /workspace, the same bytes for the same files. Raises ValueError for a path that leads elsewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as archive:
        for name, data in files.items():
            path = PurePosixPath(name)
            encode([name])
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"files: {name!r} must be a path below /workspace, without '..'")
            entry = tarfile.TarInfo(f"workspace/{path}")
            entry.size, entry.mode, entry.mtime = len(data), 0o644, MTIME
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@contextmanager
def memory_file(data: bytes) -> Iterator[int]:
    """The descriptor, at its beginning, of a file in memory that holds `data` for good: a command could fill the host's memory with it."""
    descriptor = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        yield descriptor
    finally:
        os.close(descriptor)
