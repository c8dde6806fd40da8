"""The backend for isolation by a Docker engine: one hardened container per box.

Docker ── Engine ══ dockerd                docker_engine.py: containers made, labelled, removed; docker_task.py: images of tasks
   └── DockerBox ── Link ══ docker_agent.py    the root process of a container; `══` is a socket, attached through dockerd
                              └─ a command     another user, no capabilities

python -m agentrl_jax.sandbox.docker      # does it work here, and how fast is it?
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from agentrl_jax.sandbox.box import filled, pack
from agentrl_jax.sandbox.docker_box import DockerBox
from agentrl_jax.sandbox.docker_engine import Engine, connect
from agentrl_jax.sandbox.docker_image import find_image
from agentrl_jax.sandbox.docker_spare import Spare
from agentrl_jax.sandbox.docker_task import TaskImage, TaskImages
from agentrl_jax.sandbox.protocol import Limits, SandboxError


class Docker:
    """A `Backend` on the engine that DOCKER_HOST names (a socket, or TCP without TLS). Its boxes end with `__aexit__`, or with this process
    however it ends; what an engine's restart or a lost connection may have left is removed by the next backend on this machine, when it
    opens or when it ends.

    image:    with `python3` (>= 3.11) and `sh` in its PATH; None for the default one (docker_image.py), which the first use builds
    cpus:     processors that a box may use
    packages: what Python finds besides the standard library in the default image, as ("numpy", "pandas"): see `Bubblewrap`

    From the first fork on, one empty container more is kept ready for the next.

    A command runs as user 1000 without capabilities, on a read-only root, without a network, under the engine's filter of system calls.
    `Limits.disk` and `inodes` hold for each of `/workspace`, `/tmp` and `/dev/shm`. `Limits.memory` is the address space of one process;
    the box as a whole has that, the three file systems and 64 MiB.

    `__aenter__` raises SandboxError, naming the cause and the remedy, where no engine answers or there is no image.
    """

    def __init__(self, image: str | None = None, *, cpus: float = 1.0, packages: tuple[str, ...] = ()) -> None:
        if image and packages:
            raise ValueError(f"Docker({image!r}, packages=...): packages are of the default image; an image of yours has its own")
        self._image, self._cpus, self._packages = image, cpus, packages
        self._boxes: set[DockerBox] = set()

    async def __aenter__(self) -> "Docker":
        client = await asyncio.to_thread(connect)
        try:
            image = self._image or await asyncio.to_thread(find_image, client, self._packages)
            self._default, self._images = image, TaskImages(client, image)
            self._engine = Engine(client, self._cpus)
            self._spare = Spare(self._engine)
            await self._engine.reap()
        except BaseException:
            client.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await asyncio.gather(self._images.close(), self._spare.close(), *(box.close() for box in tuple(self._boxes)))
        finally:
            await self._engine.close()

    async def start(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        snapshot: bytes | None = None,
        limits: Limits | None = None,
        image: str | Path | None = None,
    ) -> DockerBox:
        """`image`: with `python3` (>= 3.11) and `sh`; `docker_task.py` says what a box of it is like."""
        limits = limits or Limits()
        made = await self._images.find(image) if image is not None else TaskImage(self._default, b"")
        archives = None if snapshot else made.files, snapshot, pack(files) if files else None
        box = DockerBox(self._engine, self._spare, await self._engine.start(limits, made.name), limits, self._boxes)
        return await filled(box, archives, limits)


async def preflight(repeats: int = 5) -> str:
    """Use real boxes and say in one line what they cost. Raises SandboxError, naming the cause and the remedy, where that fails."""
    async with Docker() as backend:
        starts, commands, forks = [], [], []
        for _ in range(repeats):
            began = time.perf_counter()
            box = await backend.start({"a": b"1"})
            starts.append(time.perf_counter() - began)
            result = await box.exec(["cat", "a"])
            if (result.exit_code, result.output) != (0, b"1"):
                raise SandboxError(f"a box starts, but a simple command in it gives {result}")
            for _ in range(20):
                began = time.perf_counter()
                await box.exec(["true"])
                commands.append(time.perf_counter() - began)
            began = time.perf_counter()
            fork = await box.fork()
            forks.append(time.perf_counter() - began)
            await fork.close()
            await box.close()
    start, command, fork = (statistics.median(times) * 1e3 for times in (starts, commands, forks))
    return f"ok: Docker; median {start:.0f} ms per box, {command:.1f} ms per command, {fork:.0f} ms per fork"


if __name__ == "__main__":
    try:
        print(asyncio.run(preflight()))  # noqa: T201 - the program's output
    except SandboxError as error:
        sys.exit(str(error))
