"""vLLM servers killed, stopped and beheaded under episodes, between two steps of a weight push too; one of ours, and a fleet of others'.

Random weights play, so that the log-prob of a token says which weights it was sampled from.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.chat.renderer import Renderer
from agentrl_jax.data.store import EpisodeWriter
from agentrl_jax.inference.served import Served
from agentrl_jax.inference.vllm_server import Restartable, Server, call, client, installed, serve
from agentrl_jax.rollout.agent import Parts, RolloutLimits
from agentrl_jax.rollout.collector import RolloutSettings, collect, plan
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.protocol import Backend
from experiments.agreement import ENVIRONMENT, TOLERANCE, Agreement, policy, weights
from experiments.chaos.audit import Row, require

VENV = Path(".venv-vllm")
JOBS = 16
SETTINGS = RolloutSettings(RolloutLimits(turns=4, turn_tokens=64, episode_tokens=256, context=512), slots=8)
PATIENCE = 5.0  # seconds without an answer, twice, after which a server counts as dead
DEADLINE = 180.0  # seconds from a fault to the end of all episodes; a server starts within 20 on an idle machine
GONE = 10.0  # seconds for what is left of a killed server


@dataclass
class Play:
    """Episodes at a sampler whose weights change. folder: of their stores; rounds: of episodes so far; version: of the latest weights."""

    backend: Backend
    served: Served
    folder: Path
    rounds: int = 0
    version: int = 0

    async def update(self) -> None:
        self.version += 1
        await self.served.update(weights(self.version), self.version)

    async def round(self, row: Row, strike: Callable[[], Awaitable[None]] | None = None) -> None:
        """Episodes, in the middle of which `strike` is called. All of them have to end well, with log-probs of the weights they name."""
        self.rounds += 1
        before, sampled = self.version, self.served.stats.sampled
        jobs = plan([ENVIRONMENT.task(i) for i in range(JOBS)], 1, seed=self.rounds, step=self.rounds)
        store = self.folder / f"{self.rounds}.episodes"
        parts = Parts(ENVIRONMENT, self.backend, self.served, Renderer(policy().tokenizer))
        with EpisodeWriter(store) as writer:
            playing = asyncio.create_task(collect(jobs, parts, SETTINGS, sink=writer.add))
            try:
                while self.served.stats.sampled == sampled and not playing.done():  # noqa: ASYNC110 - nobody sets an event
                    await asyncio.sleep(0.005)
                with row.within(DEADLINE, "the end of all episodes after the fault"):
                    if strike is not None:
                        require(not playing.done(), "there are episodes to strike")
                        await strike()
                    episodes = await playing
            finally:
                playing.cancel()
                await asyncio.wait([playing])
        row.times += 1
        row.count(jobs, episodes, store)
        require(all(episode.usable for episode in episodes), "every episode is played to its end")
        found = Agreement.of(episodes)
        apart = float(np.abs(found.all).max())
        require(
            apart <= TOLERANCE, f"log-probs are the trainer's to {TOLERANCE:g} under the weights they name, they are off by {apart:.1e}"
        )
        require(set(found.apart) <= set(range(before, self.version + 1)), f"no weights but the present ones, found {sorted(found.apart)}")


# What is done to a server


async def kill(play: Play, server: Server) -> None:
    os.killpg(server.pid, signal.SIGKILL)


async def stop(play: Play, server: Server) -> None:
    os.killpg(server.pid, signal.SIGSTOP)


async def behead(play: Play, server: Server) -> None:
    """Kill the engine alone: the front lives on."""
    [engine] = [process for process in members(server.pid) if name(process).startswith("VLLM::Engine")]
    os.kill(engine, signal.SIGKILL)


async def kill_in_push(play: Play, server: Server) -> None:
    """Kill it while it is paused for new weights."""
    async with await client(timeout=PATIENCE) as http:
        for _ in range(5):
            update = asyncio.create_task(play.update())
            while not update.done():
                if (await call(http, f"{server.url}/is_paused"))["is_paused"]:
                    os.killpg(server.pid, signal.SIGKILL)
                    await update
                    return
            await update
    require(False, "a push can be struck")


FAULTS: Mapping[str, Callable[[Play, Server], Awaitable[None]]] = {
    "vLLM is killed": kill,
    "vLLM hangs": stop,
    "vLLM's engine is killed, not its front": behead,
    "vLLM is killed within a weight push": kill_in_push,
}


async def run(times: int, venv: Path = VENV) -> AsyncIterator[Row | str]:
    """Every fault so many times; a row for each once it is done."""
    if not installed(venv):
        yield f"faults of vLLM are left out: there is none in {venv} (`make vllm`)"
        return
    async for row in ours(times, venv, FAULTS):
        yield row
    async for row in others(times, venv):
        yield row


async def ours(times: int, venv: Path, faults: Mapping[str, Callable[[Play, Server], Awaitable[None]]]) -> AsyncIterator[Row]:
    """A server of our own comes back by itself, with the present weights."""
    async with AsyncExitStack() as stack:
        play = await _play(stack, venv=str(venv), patience=PATIENCE)
        own = play.served.own
        assert own is not None
        for fault, strike in faults.items():
            row = Row(fault)
            for _ in range(times):
                await play.update()
                server = own.server
                assert server is not None
                await play.round(row, partial(strike, play, server))
                require(own.server is not None and own.server.pid != server.pid, "another server runs in its place")
                await cleared(server)
                await serves(own.url, play.version)
            yield row
        server = own.server
    assert server is not None
    await cleared(server)


async def others(times: int, venv: Path) -> AsyncIterator[Row]:
    """Of two servers that others look after one dies; they start it again."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "policy"
        policy().write(folder, context_limit=SETTINGS.limits.context)
        start = partial(_serve, folder, venv)
        mortal, other = [await stack.enter_async_context(Restartable(start)) for _ in range(2)]
        play = await _play(stack, urls=(mortal.url, other.url), patience=PATIENCE)
        death, back = Row("one of two servers is killed for good"), Row("... and comes back with old weights")
        for _ in range(times):
            await play.update()
            server = mortal.server
            assert server is not None
            await play.round(death, partial(kill, play, server))
            await play.update()
            await serves(other.url, play.version)
            await mortal.restart()
            await cleared(server)
            with back.within(DEADLINE, "new weights for a server that came back"):
                while not await has(mortal.url, play.version):  # noqa: ASYNC110 - nobody here sets an event
                    await asyncio.sleep(0.1)
            await play.round(back)
            require(await sampled(mortal.url) > 0, "a server that came back gets requests again")
            await serves(mortal.url, play.version)
        yield death
        yield back


async def _play(stack: AsyncExitStack, **options: Any) -> Play:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    backend = await stack.enter_async_context(Bubblewrap())
    served = Served(policy(), context_limit=SETTINGS.limits.context, slots=SETTINGS.slots, **options)
    return Play(backend, await stack.enter_async_context(served), folder)


def _serve(folder: Path, venv: Path, port: int) -> Any:
    return serve(folder, venv=venv, port=port, slots=SETTINGS.slots)


# What is left of a server, and what it says


async def cleared(server: Server) -> None:
    """Wait until a server that was killed has left nothing."""
    end = asyncio.get_running_loop().time() + GONE
    while left := [*members(server.pid), *([server.log.parent] if server.log.parent.exists() else [])]:
        require(asyncio.get_running_loop().time() < end, f"a killed server leaves nothing after {GONE:g} s, found {left}")
        await asyncio.sleep(0.05)


def members(group: int) -> list[int]:
    """Processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found += [int(path.name)] if os.getpgid(int(path.name)) == group else []
        except ProcessLookupError:
            continue
    return found


def name(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text()


async def serves(url: str, version: int) -> None:
    """It is not paused, and has these weights."""
    async with await client(timeout=DEADLINE) as http:
        require(not (await call(http, f"{url}/is_paused"))["is_paused"], f"{url} is not left paused")
    require(await has(url, version), f"{url} serves version {version}")


async def has(url: str, version: int) -> bool:
    async with await client(timeout=DEADLINE) as http:
        return (await call(http, f"{url}/weight_info"))["weight_version"] == str(version)


async def sampled(url: str) -> float:
    """Tokens that a server sampled since its start."""
    async with await client(timeout=DEADLINE) as http:
        lines = (await call(http, f"{url}/metrics")).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))
