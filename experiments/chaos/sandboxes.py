"""Boxes, their keepers and their engine broken under episodes whose rewards are known, and commands that break what they can reach.

A script that mends the bug earns 1 and one that does nothing 0, unless infrastructure spoils the episode, which then has no score.
"""

import asyncio
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Ending, Episode
from agentrl_jax.data.events import Event
from agentrl_jax.data.store import EpisodeWriter, read, unfinished
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.rollout.agent import Job, RolloutLimits, Sink
from agentrl_jax.rollout.collector import RolloutSettings, plan
from agentrl_jax.rollout.scripted import Script, demonstrate
from agentrl_jax.sandbox import docker_engine
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.pool import Pool
from agentrl_jax.sandbox.protocol import Backend, Sandbox, SandboxError
from experiments.chaos.audit import Row, require
from experiments.chaos.dockerd import Dockerd, missing

Strike = Callable[[Random], Awaitable[None]]

REPOSITORY = Path(__file__).parent.parent.parent
JOBS = 12
EVENTS = 10  # at least as many has every episode
TESTS = 4  # runs of the tests before the bug is mended, so that there is something to interrupt
DEADLINE = 90.0  # seconds for all episodes of a round, or for one engine to come back
GONE = 30.0  # seconds for what a dead client left
OUTAGE = 1.0  # seconds at most that an engine is away
COMMAND = 2.0  # seconds of a hostile command
# Each stays inside the limits of its box, and all it can reach is its own episode.
HOSTILE = {
    "fills the files": "cat /dev/zero > fill; cat /dev/zero > /tmp/fill; echo full",
    "fills the inodes": 'python3 -c \'n = 0\nwhile True: open(f"/tmp/{n}", "w"); n += 1\'',
    "forks": "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'",
    "leaves processes that it cannot start more of": "for n in $(seq 100); do setsid sleep 1000 > /dev/null 2>&1 & done; kill -9 -1",
    "eats memory": "python3 -c 'm = []\nwhile True: m.append(bytearray(1 << 20))'",
    "floods": "yes",
    "floods in the background": "(setsid yes &) ; sleep 1000",
    "kills": "kill -9 -1",
    "stops": "kill -STOP -1",
}


class Shell(BugFix):
    """With a tool more that runs anything."""

    tools = (*BugFix.tools, Tool("sh", "Run a command.", {"command": "string"}))

    async def step(self, task: Task, name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
        if name != "sh":
            return await super().step(task, name, arguments, box)
        result = await box.exec(["sh", "-c", str(arguments["command"])], seconds=COMMAND)
        return Observation(f"exit {result.exit_code}, killed {result.killed}, timed out {result.timed_out}: {result.text[-100:]!r}")


RENDERER = Renderer(tokenizer.train([*HOSTILE.values()], 400, scaffolding(Shell.tools)))
SETTINGS = RolloutSettings(
    RolloutLimits(turns=12, turn_tokens=400, episode_tokens=4000, context=10_000, deadline=30.0), slots=6, retries=5, min_usable=0.0
)


def scripted(*calls: Call) -> Script:
    """Calls that wait for no answer."""
    for call in calls:  # noqa: UP028 - `yield from` a tuple cannot be sent to
        yield call


def mends(task: Task, random: Random) -> Script:
    return scripted(*[("test", {})] * TESTS, *Shell().gold(task))


# Where there are boxes to break


@dataclass(frozen=True)
class Place:
    """A backend and what it holds. name: for people; make: a backend; held: containers and files that a process has there."""

    name: str
    make: Callable[[], Backend]
    held: Callable[[int], list[str]]

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[Pool]:
        """A pool of it, of which nothing may be left at the end."""
        before = boxes()
        async with Pool([self.make()], max_live=16, set_aside=3 * OUTAGE) as pool:
            yield pool
        require(pool.stats.live == 0, f"no box is left, found {pool.stats}")
        await self.cleared(os.getpid(), lambda: boxes() - before)

    async def cleared(self, process: int, alive: Callable[[], set[int]], starts: bool = False) -> None:
        """Wait until a process holds nothing here any more. `starts`: others start meanwhile, who clear away what it left."""
        deadline = asyncio.get_running_loop().time() + GONE
        while left := [*alive(), *await asyncio.to_thread(self.held, process)]:
            require(asyncio.get_running_loop().time() < deadline, f"{self.name}: nothing is left after {GONE:g} s, found {left}")
            if starts:  # an engine may still be making what the dead asked for
                async with self.make():
                    pass
            await asyncio.sleep(0.05)


def of_an_engine(process: int) -> list[str]:
    """Containers and volumes of a process of this machine in the engine that DOCKER_HOST names."""
    client = docker_engine.connect()
    here = {"label": f"{docker_engine.PLACE}={docker_engine.place()}"}
    found = {one["Id"]: one["Labels"] for one in client.containers(all=True, filters=here)}
    found |= {one["Name"]: one["Labels"] for one in client.volumes(filters=here)["Volumes"] or ()}
    client.close()
    return [name for name, labels in found.items() if labels[docker_engine.OWNER].split()[0] == str(process)]


BUBBLEWRAP = Place("bubblewrap", Bubblewrap, lambda _: [])
DOCKER = Place("Docker", Docker, of_an_engine)


def children(process: int) -> set[int]:
    with suppress(OSError):
        return {int(child) for task in Path(f"/proc/{process}/task").iterdir() for child in (task / "children").read_text().split()}
    return set()


def below(process: int) -> set[int]:
    """Processes below this one; those of a bubblewrap box are, whatever namespaces they are in."""
    direct = children(process)
    return direct.union(*map(below, direct))


def keepers() -> set[int]:
    """Of this process."""
    return {process for process in children(os.getpid()) if b"bwrap" in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0]}


def boxes() -> set[int]:
    """All processes of this process's keepers, themselves included."""
    return keepers().union(*map(below, keepers()))


def kill(*processes: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


# Episodes, and a fault among them


class Moment:
    """A sink that passes events on; it `came` with a random one of them."""

    def __init__(self, sink: Sink, last: int, random: Random) -> None:
        self._sink, self._left, self.came = sink, random.randrange(last), asyncio.Event()

    def __call__(self, event: Event) -> None:
        self._sink(event)
        self._left -= 1
        if self._left <= 0:
            self.came.set()


def jobs_of(environment: Shell, count: int, step: int = 0) -> list[Job]:
    return plan([environment.task(seed) for seed in range(step * count, (step + 1) * count)], 1, seed=0, step=step)


def require_rewards(episodes: list[Episode], reward: float) -> None:
    """What infrastructure spoilt has no reward; everything else has the one that its script earns."""
    for episode in episodes:
        got = episode.outcome and episode.outcome.reward
        require(got in (None, reward), f"{episode.id} of {episode.task}: a script that earns {reward} got {got}")


async def play(row: Row, backend: Backend, random: Random, strike: Strike) -> None:
    """Episodes that earn 1, struck at a random moment; every one of them is scored in the end."""
    environment = Shell(level=row.times % 2)
    jobs = jobs_of(environment, JOBS)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        path = Path(folder, "episodes")
        with EpisodeWriter(path) as store, row.within(DEADLINE, f"{row.fault}: {JOBS} episodes"):
            moment = Moment(store.add, JOBS * EVENTS, random)

            async def struck() -> None:
                await moment.came.wait()
                await strike(random)

            async with asyncio.TaskGroup() as group:
                group.create_task(struck())
                episodes = await demonstrate(jobs, environment, backend, RENDERER, SETTINGS, expert=mends, sink=moment)
        row.count(jobs, episodes, path)
        require_rewards(list(read(path)), 1.0)
    row.times += 1
    require(row.excluded == 0, f"{row.fault}: episodes that were spoilt are made again until they are scored")


async def struck(place: Place, what: str, times: int, strike: Strike) -> Row:
    row, random = Row(f"{place.name}: {what}"), Random(what)
    for _ in range(times):
        async with place.pool() as pool:
            await play(row, pool, random, strike)
    return row


async def kill_boxes(random: Random) -> None:
    """With their keeper: the host's memory killer at its worst."""
    kill(*random.sample(sorted(boxes()), len(boxes())))


async def kill_keeper(random: Random) -> None:
    kill(random.choice(sorted(keepers())))


async def kill_containers(random: Random) -> None:
    """Every other one, by the engine or its processes one by one."""
    from docker.errors import APIError

    client = docker_engine.connect()
    try:
        names = [one["Id"] for one in client.containers(filters={"label": f"{docker_engine.OWNER}={docker_engine.owner(os.getpid())}"})]
        for name in random.sample(sorted(names), (len(names) + 1) // 2):
            with suppress(APIError):  # it has just ended
                if random.random() < 0.5 or os.geteuid() != 0:
                    client.kill(name)
                else:
                    kill(*below(client.inspect_container(name)["State"]["Pid"]))
    finally:
        client.close()


async def hostile(place: Place, times: int) -> Row:
    """Each command in an episode that then mends the bug, and in one that does nothing else."""
    row, environment = Row(f"{place.name}: {len(HOSTILE)} hostile commands"), Shell()
    for _ in range(times):
        jobs = jobs_of(environment, len(HOSTILE))
        commands = dict(zip((job.task.id for job in jobs), HOSTILE.values(), strict=True))
        async with place.pool() as pool:
            for reward in (1.0, 0.0):

                def script(task: Task, random: Random, reward: float = reward, commands: Mapping[str, str] = commands) -> Script:
                    rest = environment.gold(task) if reward else [("submit", {})]
                    return scripted(("sh", {"command": commands[task.id]}), *rest)

                with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
                    path = Path(folder, "episodes")
                    with EpisodeWriter(path) as store, row.within(DEADLINE, row.fault):
                        episodes = await demonstrate(jobs, environment, pool, RENDERER, SETTINGS, expert=script, sink=store.add)
                    row.count(jobs, episodes, path)
                    for name, episode in zip(HOSTILE, episodes, strict=True):
                        require(episode.ending == Ending.SUBMITTED, f"{place.name}: a command that {name} is no fault of infrastructure")
                        got = episode.outcome and episode.outcome.reward
                        require(got == reward, f"{place.name}: a command that {name}, then a script that earns {reward}: got {got}")
        require(row.retried == 0, f"{place.name}: no command is a fault of infrastructure")
        row.times += len(HOSTILE)
    return row


async def cancelled(place: Place, times: int) -> Row:
    """As by Ctrl-C."""
    row, environment, random = Row(f"{place.name}: the collection cancelled"), Shell(), Random(0)
    for _ in range(times):
        jobs = jobs_of(environment, JOBS)
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            path = Path(folder, "episodes")
            async with place.pool() as pool:
                with EpisodeWriter(path) as store:
                    moment = Moment(store.add, JOBS * EVENTS, random)
                    playing = demonstrate(jobs, environment, pool, RENDERER, SETTINGS, expert=mends, sink=moment)
                    task = asyncio.create_task(playing)
                    await asyncio.wait({task, asyncio.create_task(moment.came.wait())}, return_when=asyncio.FIRST_COMPLETED)
                    task.cancel()
                    with row.within(GONE, f"{row.fault}: giving back"):
                        await asyncio.wait({task})
                        while pool.stats.live:  # noqa: ASYNC110 - a pool tells nobody when a box is closed
                            await asyncio.sleep(0.02)
                    require(task.cancelled(), "a cancelled collection ends as cancelled")
            episodes = list(read(path))
            require(not unfinished(path), "no episode is left unfinished")
            require_rewards(episodes, 1.0)
            require(any(e.ending == Ending.CANCELLED for e in episodes), "there was something to cancel")
            row.episodes += len(episodes)
            row.excluded += sum(episode.outcome is None for episode in episodes)
            row.seen.update(episode.ending.value for episode in episodes)
        row.times += 1
    return row


async def client_killed(place: Place, times: int) -> Row:
    """The process that collects, SIGKILL; at the next start nothing of it is left."""
    row, random = Row(f"{place.name}: the client, SIGKILL"), Random(0)
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            path = Path(folder, "episodes")
            command = [sys.executable, "-m", __name__, place.name, str(path)]
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, cwd=REPOSITORY)
            try:
                with row.within(DEADLINE, f"{row.fault}: its first episode"):
                    while not await asyncio.to_thread(finished, path):
                        require(process.returncode is None, f"{row.fault}: it ends by itself")
                        await asyncio.sleep(0.1)
                await asyncio.sleep(random.uniform(0, 1))
                started = below(process.pid)
            finally:
                process.kill()
                await process.wait()
            with row.within(GONE, f"{row.fault}: what it leaves behind"):
                await place.cleared(process.pid, lambda: {one for one in started if Path(f"/proc/{one}").exists()}, starts=True)  # noqa: B023
            episodes = list(read(path))
            require_rewards(episodes, 1.0)
            row.episodes += len(episodes)
            row.seen.update(episode.ending.value for episode in episodes)
            row.seen["unfinished"] += len(unfinished(path))
        row.times += 1
    return row


def finished(path: Path) -> list[Episode]:
    """The finished episodes of a store that may not have been made yet."""
    return list(read(path)) if path.exists() else []


async def engine_stopped(number: signal.Signals, times: int, engine: Dockerd) -> Row:
    """And started again a moment later."""

    async def stop(random: Random) -> None:
        await engine.stop(number)
        await asyncio.sleep(random.uniform(0, OUTAGE))
        await engine.start()

    row = await struck(Place("Docker", lambda: Docker(engine.image), of_an_engine), f"the engine, {number.name}", times, stop)
    require(not (left := await engine.left()), f"{row.fault}: no container and no volume is left, found {left}")
    return row


async def working(place: Place) -> str | None:
    """Why it does not work here, or None."""
    try:
        async with place.make() as backend:
            await (await backend.start()).close()
    except SandboxError as error:
        return str(error)
    return None


async def run(times: int) -> AsyncIterator[Row | str]:
    """A row per fault; a line where a part is missing."""
    for place in (BUBBLEWRAP, DOCKER):
        if reason := await working(place):
            yield f"{place.name}: left out: {reason}"
            continue
        yield await hostile(place, times)
        if place is BUBBLEWRAP:
            yield await struck(place, "every process of its boxes, SIGKILL", times, kill_boxes)
            yield await struck(place, "a keeper, SIGKILL", times, kill_keeper)
        else:
            yield await struck(place, "every other container, SIGKILL", times, kill_containers)
        yield await cancelled(place, times)
        yield await client_killed(place, times)
    if reason := missing():
        yield f"Docker: the engine stopped: left out: {reason}"
    else:
        async with Dockerd() as engine:
            for number in (signal.SIGTERM, signal.SIGKILL):
                yield await engine_stopped(number, times, engine)


async def collect_for_ever(place: Place, path: Path) -> None:
    """What `client_killed` kills."""
    environment = Shell()
    async with Pool([place.make()], max_live=16) as pool:
        with EpisodeWriter(path) as store:
            for step in itertools.count():
                jobs = jobs_of(environment, JOBS, step)
                await demonstrate(jobs, environment, pool, RENDERER, SETTINGS, expert=mends, sink=store.add)


if __name__ == "__main__":
    asyncio.run(collect_for_ever({place.name: place for place in (BUBBLEWRAP, DOCKER)}[sys.argv[1]], Path(sys.argv[2])))
