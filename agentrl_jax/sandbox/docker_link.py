"""The host's side of docker_agent.py: the attached streams of one container, as requests and their answers.

The engine's attach call turns its HTTP connection into the container's standard streams: what we send is its input; what comes is its
output, in pieces that each begin with one byte that says which stream, three of zero, and four of length, big-endian.
(https://docs.docker.com/reference/api/engine/, "Attach to a container")
"""

import asyncio
import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl_jax.sandbox.protocol import SandboxError

FRAME = 1 << 20  # bytes
STDOUT, STDERR = 1, 2
INSIDE = ("docker_files", "docker_agent")  # the last one is run
# Modules are made of the sources by hand: nothing of this package is in the image.
LOADER = """
import sys
from types import ModuleType
for name, source in MODULES.items():
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""
Answer = tuple[dict[str, Any], bytes]


def program() -> bytes:
    """The source of everything that runs inside."""
    sources = {name: Path(__file__).with_name(f"{name}.py").read_text() for name in INSIDE}
    names = {"agentrl_jax": "", "agentrl_jax.sandbox": ""} | {f"{__package__}.{name}": source for name, source in sources.items()}
    *others, (_, main) = names.items()
    return f"MODULES = {dict([*others, ('__main__', main)])!r}\n{LOADER}".encode()


def address() -> str | tuple[str, int]:
    """Where the engine listens: the path of a socket, or host and port. Raises SandboxError where DOCKER_HOST names something else."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    parts = urlsplit(host)
    if parts.scheme == "unix" and parts.path:
        return parts.path
    if parts.scheme == "tcp" and parts.hostname and parts.port and not os.environ.get("DOCKER_TLS_VERIFY"):
        return parts.hostname, parts.port
    raise SandboxError(
        f"DOCKER_HOST={host} is neither unix:///PATH nor tcp://HOST:PORT without TLS: forward a remote engine's socket by "
        "`ssh -NL /tmp/docker.sock:/var/run/docker.sock HOST` and set DOCKER_HOST=unix:///tmp/docker.sock"
    )


class Link(asyncio.Protocol):
    """A connection to the first process of a container. Requests are answered in their order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._attached: asyncio.Future[None] = self._loop.create_future()
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._received, self._frames = bytearray(), bytearray()
        self._data, self._data_ended, self._errors = bytearray(), False, b""
        self._transport: asyncio.WriteTransport | None = None
        self.gone: str | None = None  # why

    @classmethod
    async def attach(cls, container: str, version: str) -> "Link":
        """Attach to a container that is made but not started. Raises SandboxError, OSError."""
        where = address()
        loop = asyncio.get_running_loop()
        if isinstance(where, str):
            transport, link = await loop.create_unix_connection(cls, where)
        else:
            transport, link = await loop.create_connection(cls, *where)
        link._transport = transport
        path = f"/v{version}/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        transport.write(
            f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n".encode()
        )
        try:
            await link._attached
        except BaseException:
            link.close("it could not be attached")
            raise
        return link

    def boot(self, source: bytes) -> asyncio.Future[Answer]:
        """Send the source that the container waits for. It answers when it is ready."""
        self._write(source)
        return self._next()

    def ask(self, request: Mapping[str, Any], data: bytes = b"") -> asyncio.Future[Answer]:
        """Send a request at once; its answer. Fails with SandboxError if the container is gone."""
        pieces = [json.dumps(request).encode(), *(data[at : at + FRAME] for at in range(0, len(data), FRAME)), b""]
        self._write(b"".join(part for piece in pieces for part in (len(piece).to_bytes(4, "big"), piece)))
        return self._next()

    def end_command(self) -> None:
        """Have the command that runs, if any, and everything else in the box killed. It is answered as always."""
        self._write(bytes(4))

    def close(self, why: str) -> None:
        """Hang up, which ends the container. Whoever waits for an answer gets a SandboxError that says why."""
        self._fail(why)
        if self._transport:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport and not self.gone:
            self._transport.write(data)

    def _next(self) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = self._loop.create_future()
        future.add_done_callback(lambda future: future.cancelled() or future.exception())  # an answer nobody waits for is no warning
        self._waiting.append(future)
        if self.gone:
            self._fail(self.gone)
        return future

    def data_received(self, data: bytes) -> None:
        if self.gone:
            return
        self._received += data
        if not self._attached.done():
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            status = head.partition(b"\r\n")[0].decode(errors="replace")
            if status.split()[1:2] not in (["101"], ["200"]):
                self._attached.set_exception(SandboxError(f"the Docker engine does not attach to a container: {status}"))
                return
            self._attached.set_result(None)
            self._received = rest
        while len(self._received) >= 8 and len(self._received) >= (end := 8 + int.from_bytes(self._received[4:8], "big")):
            stream, payload = self._received[0], self._received[8:end]
            del self._received[:end]
            if stream == STDOUT:
                self._frames += payload
            elif stream == STDERR:
                self._errors = (self._errors + payload)[-2000:]
        self._read_frames()

    def _read_frames(self) -> None:
        while len(self._frames) >= 4 and len(self._frames) >= (end := 4 + int.from_bytes(self._frames[:4], "big")):
            frame = bytes(self._frames[4:end])
            del self._frames[:end]
            if not self._data_ended:
                self._data += frame
                self._data_ended = not frame
                continue
            answer = (json.loads(frame), bytes(self._data))
            self._data.clear()
            self._data_ended = False
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        text = " ".join(self._errors.decode(errors="replace").split())
        self._fail(f"the container is gone{f' ({exc})' if exc else ''}{f': {text}' if text else ''}")

    def _fail(self, why: str) -> None:
        self.gone = self.gone or why
        for future in (self._attached, *self._waiting):
            if not future.done():
                future.set_exception(SandboxError(self.gone))
        self._waiting.clear()
        if self._attached.done() and not self._attached.cancelled():
            self._attached.exception()
