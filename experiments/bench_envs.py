"""Scored episodes of bug fixing per second: in bubblewrap boxes, beside the same commands without any isolation.

    python -m experiments.bench_envs [--episodes 64] [--rounds 3] [--level N ...]

An episode: start from the task's files; run the tests; for each bug read its function and make the right edit; run the tests; submit; score
(a copy of the files, graded by a command of its own); close. No model and no tokens: the calls are known beforehand, the tasks drawn
and the library evaluated before the clock starts. `AT_ONCE` episodes are under way, on at most two cores, and every one must score 1.

    boxes      episodes per second in `Bubblewrap`
    floor      the same: the same argv and standard input for each command, as a plain `python3` process in a folder in memory; a copy is a
               copied folder. No limits, namespaces or file systems of its own; `share` is boxes / floor.
    warm       the floor once more, with each command in a fork of one interpreter that lives as long as the episode, as boxes have it; a
               scoring command still starts a process. `share` as before.

Medians of the rounds, which take turns. Other work on the machine shows in the rates, and less so in the shares.
"""

import argparse
import asyncio
import os
import py_compile
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_jax.envs.bugfix import LEVELS, BugFix
from agentrl_jax.envs.protocol import Task
from agentrl_jax.sandbox import guest
from agentrl_jax.sandbox.box import ENVIRONMENT, memory_file
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.namespace import encode
from agentrl_jax.sandbox.protocol import Limits, Result

AT_ONCE = 4
CORES = 2
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
LIMITS = Limits()


class Folder:
    """A folder with plain processes in it: as much of a `Sandbox` as an episode of bug fixing asks for.

    interpreter: compiled code of what commands are forked from; None where each is a process of its own
    """

    def __init__(self, parent: str, interpreter: str | None) -> None:
        self.parent, self.interpreter = parent, interpreter
        self.path = Path(tempfile.mkdtemp(dir=parent))
        self.process = 0
        self.link: socket.socket | None = None

    async def exec_fresh(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None) -> Result:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *argv[1:]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.path,
            env=ENVIRONMENT,
        )
        output, _ = await process.communicate(stdin)
        return Result(process.returncode, output)

    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None) -> Result:
        if self.interpreter is None:
            return await self.exec_fresh(argv, stdin=stdin)
        loop = asyncio.get_running_loop()
        if self.link is None:
            self.link = self.start(self.interpreter)
            await loop.sock_recv(self.link, 64)
        output = os.memfd_create("output")
        try:
            with memory_file(encode([str(LIMITS.memory), "4000", str(len(argv)), *argv])) as request, memory_file(stdin) as source:
                socket.send_fds(self.link, [b"run"], [request, output, source])
            code = int(await loop.sock_recv(self.link, 64))
            return Result(code, os.pread(output, LIMITS.output, 0))
        finally:
            os.close(output)

    def start(self, interpreter: str) -> socket.socket:
        """Start the interpreter; the socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            command = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.path), sys.executable, "-s", "-S", "-P", interpreter, "serve"]
            self.process = os.posix_spawnp("sh", command, ENVIRONMENT, file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)])
        return ours

    def end(self) -> None:
        """End the interpreter."""
        if self.link is not None:
            self.link.close()
            os.waitpid(self.process, 0)

    async def fork(self) -> "Folder":
        copy = Folder(self.parent, self.interpreter)
        shutil.copytree(self.path, copy.path, dirs_exist_ok=True)
        return copy

    async def close(self) -> None:
        self.end()
        shutil.rmtree(self.path)


class Floor:
    """As much of a `Backend`."""

    def __init__(self, warm: bool = False) -> None:
        self.warm = warm

    async def __aenter__(self) -> "Floor":
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.interpreter = py_compile.compile(guest.__file__, f"{self.folder.name}/guest.pyc", doraise=True) if self.warm else None
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.folder.cleanup()

    async def start(self, files: Mapping[str, bytes], *, limits: Limits | None = None, image: object = None) -> Folder:
        folder = Folder(self.folder.name, self.interpreter)
        for name, data in files.items():
            (folder.path / name).write_bytes(data)
        return folder


async def episode(backend: Any, env: BugFix, task: Task) -> None:
    box = await backend.start(task.files, limits=task.limits, image=task.image)
    try:
        await env.step(task, "test", {}, box)
        for name, arguments in env.gold(task)[:-1]:
            await env.step(task, "read", {"function": arguments["function"]}, box)
            await env.step(task, name, arguments, box)
        await env.step(task, "test", {}, box)
        outcome = await env.score(task, box)
    finally:
        await box.close()
    if outcome.reward != 1:
        raise RuntimeError(f"{task.id} scores {outcome}")


async def rate(work: Callable[[Task], Awaitable[None]], tasks: Sequence[Task]) -> float:
    """Tasks per second."""
    left = iter(tasks)

    async def worker() -> None:
        for task in left:
            await work(task)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    return len(tasks) / (time.perf_counter() - began)


async def row(level: int, episodes: int, rounds: int) -> str:
    env = BugFix(level)
    tasks = [env.task(seed) for seed in range(episodes)]
    backends: tuple[Callable[[], AbstractAsyncContextManager[Any]], ...] = (Bubblewrap, Floor, partial(Floor, warm=True))
    rates: list[list[float]] = []
    for _ in range(rounds):
        rates.append([])
        for backend in backends:
            async with backend() as opened:
                await episode(opened, env, tasks[0])  # the first one starts the interpreter's caches
                rates[-1].append(await rate(lambda task, opened=opened: episode(opened, env, task), tasks))
    boxes, floor, warm = (statistics.median(column) for column in zip(*rates, strict=True))
    return f"{level:5} {boxes:9.1f} {floor:9.1f} {boxes / floor:7.2f} {warm:9.1f} {boxes / warm:7.2f}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench_envs", description="Scored episodes per second.")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--level", type=int, nargs="*", default=range(len(LEVELS)))
    options = parser.parse_args(arguments)
    if options.episodes < 1 or options.rounds < 1:
        parser.error("--episodes and --rounds must be at least 1")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    print(f"{'level':>5} {'boxes/s':>9} {'floor/s':>9} {'share':>7} {'warm/s':>9} {'share':>7}")
    for level in options.level:
        print(asyncio.run(row(level, options.episodes, options.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
