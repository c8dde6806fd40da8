"""One box in Docker: a container, used one call at a time."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from agentrl_jax.sandbox.box import CLOSED, ENVIRONMENT, FILE_SECONDS, FLOOD, LONGEST, PATH_MAX, pack
from agentrl_jax.sandbox.docker_engine import START, Container, Engine
from agentrl_jax.sandbox.docker_link import Answer
from agentrl_jax.sandbox.docker_spare import Spare
from agentrl_jax.sandbox.namespace import encode
from agentrl_jax.sandbox.protocol import Limits, Result, SandboxError

# PATH is the image's own.
VARIABLES = {name: value for name, value in ENVIRONMENT.items() if name != "PATH"}


class DockerBox:
    """A `Sandbox`. Made by `Docker.start` and `fork`; `boxes` are those that are open."""

    def __init__(self, engine: Engine, spare: Spare, container: Container, limits: Limits, boxes: "set[DockerBox]") -> None:
        self._engine, self._spare, self._container, self._limits, self._boxes = engine, spare, container, limits, boxes
        self._lock = asyncio.Lock()
        self._fresh: Container | None = None
        self._used = self._paused = self._closed = False
        boxes.add(self)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] | None = None
    ) -> Result:
        if isinstance(request := self._request(argv, seconds, env), Result):
            return request
        async with self._turn(running=True):
            self._used = True
            return await self._run(self._container, request, stdin)

    async def exec_fresh(
        self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] | None = None
    ) -> Result:
        """In a container in which no other command ever ran: the box's own if that holds, else a second one over the same files."""
        if isinstance(request := self._request(argv, seconds, env), Result):
            return request
        request["alone"] = True
        async with self._turn(running=True):
            if not self._used:
                self._used = True
                result = await self._run(self._container, request, stdin)
            else:
                self._fresh = await self._engine.start(self._limits, self._container.image, files_of=self._container.name)
                try:
                    result = await self._run(self._fresh, request, stdin)
                finally:
                    fresh, self._fresh = self._fresh, None
                    await self._engine.remove(fresh)
        code = result.exit_code
        return replace(result, exit_code=128 - code) if code is not None and code < 0 else result

    async def put(self, files: Mapping[str, bytes]) -> Result:
        return await self.unpack(pack(files))

    async def unpack(self, archive: bytes) -> Result:
        """Extract a tar whose members are below `workspace/` and `tmp/`, as the box's user and inside the box."""
        async with self._turn():
            answer, _ = await self._ask({"do": "unpack"}, archive)
        return Result(1, f"{answer['error']}\n".encode(errors="surrogateescape")) if answer["error"] else Result(0, b"")

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        try:
            if len(encode([path])) > PATH_MAX:
                return None
        except ValueError:
            return None
        async with self._turn():
            answer, content = await self._ask({"do": "read", "path": path, "limit": limit})
        return content if answer["found"] else None

    async def fork(self) -> "DockerBox":
        archive = await self.snapshot()
        container = await self._spare.take(self._limits, self._container.image)
        box = DockerBox(self._engine, self._spare, container, self._limits, self._boxes)
        try:
            if (result := await box.unpack(archive)).exit_code != 0:
                raise SandboxError(f"the files of a box cannot be copied: {result.text}")
        except BaseException:
            await box.close()
            raise
        return box

    async def snapshot(self) -> bytes:
        async with self._turn():
            _, archive = await self._ask({"do": "pack", "still": self._paused, "longest": LONGEST})
        return archive

    async def pause(self) -> None:
        """By SIGSTOP from inside: the engine's own pause would stop the root process too, and with it the use of files."""
        async with self._turn():
            await self._ask({"do": "stop"})
            self._paused = True

    async def resume(self) -> None:
        async with self._turn():
            await self._ask({"do": "cont"})
            self._paused = False

    async def close(self) -> None:
        self._closed = True
        try:
            with suppress(SandboxError):  # an engine that is gone
                for container in filter(None, (self._fresh, self._container)):  # in this order, see Engine.remove
                    await self._engine.remove(container)
        finally:  # a container without its link ends by itself
            self._container.link.close(CLOSED)
            self._boxes.discard(self)

    @asynccontextmanager
    async def _turn(self, running: bool = False) -> AsyncIterator[None]:
        """One user of the box at a time."""
        async with self._lock:
            if self._closed:
                raise SandboxError(CLOSED)
            if running and self._paused:
                raise RuntimeError("the box is paused: resume it before the next command")
            yield

    def _request(self, argv: Sequence[str], seconds: float | None, env: Mapping[str, str] | None) -> dict[str, Any] | Result:
        """The request, or the result of a command that no system can start."""
        if not argv:
            return Result(126, b"an empty command\n")
        variables = {**VARIABLES, **(env or {})}
        try:
            encode([*argv, *variables, *variables.values()])
        except ValueError as error:
            return Result(126, f"not a command: {error}\n".encode())
        limits = self._limits
        return {
            "do": "run",
            "argv": list(argv),
            "env": variables,
            "seconds": limits.seconds if seconds is None else seconds,
            "memory": limits.memory,
            "keep": limits.output,
            "most": FLOOD,
            "alone": False,
        }

    async def _run(self, container: Container, request: Mapping[str, Any], stdin: bytes) -> Result:
        answer = container.link.ask(request, stdin)
        try:
            told, output = await self._wait(container, answer, request["seconds"] + START)
        except asyncio.CancelledError:
            container.link.end_command()
            raise
        return result_of(told, output)

    async def _ask(self, request: Mapping[str, Any], data: bytes = b"") -> Answer:
        return await self._wait(self._container, self._container.link.ask(request, data), FILE_SECONDS)

    async def _wait(self, container: Container, answer: asyncio.Future[Answer], seconds: float) -> Answer:
        await asyncio.wait({answer}, timeout=seconds)
        if not answer.done():
            container.link.close(f"the container did not answer within {seconds:g} s")
        if self._closed:
            raise SandboxError(CLOSED)
        return answer.result()


def result_of(told: Mapping[str, Any], output: bytes) -> Result:
    """What the root process tells of a command."""
    code, cause = told["code"], told["cause"]
    starved = told["oom"] and code in (-9, 128 + 9)  # the command itself, or what a shell ran last
    return Result(
        exit_code=None if starved else code,
        output=output,
        dropped=told["dropped"],
        timed_out=cause == "time",
        killed="output" if cause == "output" else "memory" if starved else None,
        seconds=told["seconds"],
    )
