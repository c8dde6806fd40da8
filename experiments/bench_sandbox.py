"""Speed of the sandboxes: boxes, commands and copies, alone and through the pool, beside what the system takes for a bare process.

    python -m experiments.bench_sandbox [--docker] [--idle N]

Every backend that works here is measured; --docker asks for Docker alone, and fails where no engine answers. Lines, in ms unless named:

    boxes      start with a file, `true`, close, 4 at a time: bare and through a pool by turns, and 64 at once through that pool
    floor      the same command without a box: fork+exec, and for Docker `docker run --rm` of the same image, as the CLI does it
    lease      start with a file, of a box that the pool kept ready
    exec       `true` in a box; python is `python3 -c pass`
    copies     of a box that holds 50 files of 2 kB; a command in a fork of its own is what scoring takes; half a second between the forks
    idle       N boxes held at once (default 64): memory that the host lost for each, kernel and engine included, and `true` among them

p50/p95 of what is repeated. Half a minute and, with Docker, two; other work on the machine shows in every figure.
"""

import argparse
import asyncio
import importlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np

from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.pool import Pool
from agentrl_jax.sandbox.protocol import Backend, Sandbox, SandboxError

DOCKER = "agentrl_jax.sandbox.docker"
TRUE, PYTHON = ["true"], ["python3", "-c", "pass"]
FILES = {f"folder/{number}": b"x" * 2000 for number in range(50)}
AT_ONCE, ROUNDS = 4, 4
PAUSE = 0.5  # seconds


async def box_of_one_command(backend: Backend) -> None:
    box = await backend.start({"a": b"1"})
    try:
        await run(box)
    finally:
        await box.close()


async def run(box: Sandbox, argv: list[str] = TRUE) -> None:
    result = await box.exec(argv, seconds=60)
    if result.exit_code != 0:
        raise SandboxError(f"{argv} gives {result}")


async def rate(work: Callable[[], Awaitable[object]], count: int, at_once: int) -> float:
    """Times per second that the work gets done, `at_once` of it under way."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await work()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return count / (time.perf_counter() - began)


async def timed(work: Callable[[], Awaitable[object]], count: int) -> str:
    """p50/p95 in ms, one after another, the first left out."""
    seconds = []
    for _ in range(count + 1):
        began = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - began)
    return quantiles(seconds[1:])


def quantiles(seconds: list[float]) -> str:
    return "/".join(f"{value * 1e3:.1f}" for value in np.quantile(seconds, [0.5, 0.95]))


def timed_process(argv: list[str], count: int) -> list[float]:
    """Seconds of each."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return seconds


def available() -> int:
    """Bytes of memory that the host could still give."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


async def measure(name: str, make: Callable[[], Backend], image: str | None, idle: int, boxes: int) -> None:
    def show(what: str, text: str) -> None:
        print(f"{name:11} {what:8} {text}", flush=True)

    bare = timed_process(TRUE, 100)
    floor = f"fork+exec {1 / np.median(bare):,.0f}/s, {quantiles(bare)}"
    if image is not None:
        whole = timed_process(["docker", "run", "--rm", "--network", "none", image, *TRUE], 10)
        floor += f"   docker run {1 / np.median(whole):.1f}/s, {quantiles(whole)}"
    async with make() as backend, Pool([make()], starts=AT_ONCE) as pool:
        works = [partial(box_of_one_command, each) for each in (backend, pool)]
        await asyncio.gather(*(work() for work in works))
        rounds = [[await rate(work, boxes // ROUNDS, AT_ONCE) for work in works] for _ in range(ROUNDS)]
        alone, pooled = np.median(rounds, axis=0)
        crowded = await rate(works[1], boxes, 64)
    show("boxes", f"bare {alone:.1f}/s   pool {pooled:.1f}/s, {pooled / alone:.2f} of bare   64 at once {crowded:.1f}/s")
    show("floor", floor)

    async with Pool([make()], warm=2, starts=AT_ONCE) as pool:
        seconds = []
        while len(seconds) < boxes:
            while pool.stats.warm == 0:  # noqa: ASYNC110 - a pool tells nobody when a box is ready
                await asyncio.sleep(0.005)
            began = time.perf_counter()
            box = await pool.start({"a": b"1"})
            seconds.append(time.perf_counter() - began)
            await box.close()
        show("lease", f"{quantiles(seconds)}   {pool.stats.warm_hits} of {boxes} were ready")

        box = await pool.start(FILES)
        show("exec", f"true {await timed(lambda: run(box), 200)}   python {await timed(lambda: run(box, PYTHON), 50)}")

        forks, scores = [], []
        for _ in range(boxes // 2):
            began = time.perf_counter()
            fork = await box.fork()
            forks.append(time.perf_counter() - began)
            try:
                if (result := await fork.exec_fresh(TRUE, seconds=60)).exit_code != 0:
                    raise SandboxError(f"{TRUE} gives {result}")
            finally:
                await fork.close()
            scores.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE)
        text = f"fork {quantiles(forks)}   fork, command, close {quantiles(scores)}"
        show("copies", f"{text}   snapshot {await timed(box.snapshot, boxes // 2)}")

    async with make() as backend:
        before, began = available(), time.perf_counter()
        gate = asyncio.Semaphore(AT_ONCE)

        async def held() -> Sandbox:
            async with gate:
                box = await backend.start({"a": b"1"})
                await run(box)
                return box

        many = await asyncio.gather(*(held() for _ in range(idle)))
        took, lost = time.perf_counter() - began, (before - available()) / idle
        turn = iter([*many, *many, *many])
        latency = await timed(lambda: run(next(turn)), min(3 * idle, 200) - 1)
        show("idle", f"{idle} boxes in {took:.1f} s, {lost / 2**20:.1f} MiB each   true {latency}")


async def docker() -> tuple[Callable[[], Backend], str]:
    """The Docker backend and the image of its boxes. Raises SandboxError where it does not work."""
    if importlib.util.find_spec(DOCKER) is None:
        raise SandboxError(f"there is no {DOCKER}")
    try:
        make = importlib.import_module(DOCKER).Docker
    except ImportError as error:
        raise SandboxError(f"{DOCKER} does not import: {error}") from error
    async with make() as backend:
        await box_of_one_command(backend)
    client = importlib.import_module(f"{DOCKER}_engine").connect()
    return make, importlib.import_module(f"{DOCKER}_image").find_image(client)


async def bench(only_docker: bool, idle: int) -> None:
    if not only_docker:
        await measure("bubblewrap", Bubblewrap, None, idle, boxes=100)
    try:
        make, image = await docker()
    except SandboxError as error:
        if only_docker:
            raise
        print(f"docker      not measured: {error}")
    else:
        await measure("docker", make, image, idle, boxes=24)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench_sandbox", description="Speed of the sandboxes.")
    parser.add_argument("--docker", action="store_true", help="Docker alone, and an error where no engine answers")
    parser.add_argument("--idle", type=int, default=64, metavar="N", help="boxes held at once (default 64)")
    options = parser.parse_args(arguments)
    if options.idle < 1:
        parser.error(f"--idle must be at least 1, got {options.idle}")
    try:
        asyncio.run(bench(options.docker, options.idle))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
