"""Does an environment reward what it should? Any environment, every split, in real boxes.

    python -m experiments.check_env [--env NAME ...] [--split SPLIT ...] [--tasks 8]

NAME is one of `NAMES`, or yours: `file.py:Class` or `module:instance`. All of them if left out; one whose packages are not installed is
skipped with the reason. Of each task must hold:

    null    handing in at once, all arguments empty, scores 0
    gold    the right calls score 1, and the tools have nothing to say against them
    wrong   calls that look right to the policy score 0
    same    the same seed is the same task: drawn twice, and in a fresh process with another hash seed
    state   the same calls lead to the same keys in another box, and observations tell the key that `state` tells

The table has the mean rewards, how many of `SEEDS` seeds give different tasks, and what an episode of right calls takes: calls to the
sandbox (start, commands, files, forks), and seconds with `AT_ONCE` boxes at a time. Exit code 1 if anything is not as it must be, with
the task that shows it. All 35 rows take 160 s of CPU time.
"""

import argparse
import asyncio
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.expert import expert
from agentrl_jax.envs.protocol import Call, Environment, GraderError, Observation, Task
from agentrl_jax.overrides import ConfigError, load_attribute
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.protocol import Backend, Result, Sandbox

ENVS = "agentrl_jax.envs"
NAMES: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    **{f"bugfix{level}": ("bugfix", "BugFix", (level,)) for level in range(4)},
    **{f"repository{level}": ("repository", "Repository", (level,)) for level in range(2)},
    "search": ("search_qa", "SearchQA", ()),
    "terminal": ("terminal", "Terminal", ()),
    **{f"data{level}": ("data_analysis", "DataAnalysis", (level,)) for level in range(3)},
}
"""Module, class and arguments by name."""

AT_ONCE = 8  # boxes
SEEDS = 200  # in which different tasks are counted
AFRESH = 3  # tasks that a fresh process draws too
SHOWN = 3  # faults of a row
EMPTY: Mapping[str, Any] = {"string": "", "integer": 0, "number": 0.0, "boolean": False}


def make(name: str) -> Environment:
    """The environment of a name. Raises ImportError where its packages are missing, ConfigError for a name that is none."""
    if name in NAMES:
        module, kind, arguments = NAMES[name]
        return getattr(importlib.import_module(f"{ENVS}.{module}"), kind)(*arguments)
    if ":" not in name:
        raise ConfigError(f"no environment {name!r}: there are {', '.join(NAMES)}; yours is file.py:Class or module:instance")
    found = load_attribute(name)
    return found() if isinstance(found, type) else found


def splits_of(env: Environment) -> tuple[str, ...]:
    """The splits that the environment's module names as `SPLITS`."""
    return getattr(sys.modules[type(env).__module__], "SPLITS", ("train", "held_out"))


def scripted(calls: Iterable[Call]) -> Generator[Call, Observation, None]:
    """Calls that wait for no answer."""
    for call in calls:  # noqa: UP028 - `yield from` a list cannot be sent to
        yield call


def nothing(env: Environment, task: Task) -> list[Call]:
    """Handing in at once: the last call of the right ones, with nothing in it."""
    name, _ = env.gold(task)[-1]
    tool = next(tool for tool in env.tools if tool.name == name)
    return [(name, {key: EMPTY[kind] for key, kind in tool.parameters.items()})]


def content(task: Task) -> tuple[object, ...]:
    """What the policy sees of a task, files in any order."""
    return task.prompt, *sorted(task.files.items())


def digest(task: Task) -> str:
    """Of all that makes a task."""
    parts = (task.id, *content(task), task.limits, task.privileged, sorted(task.hidden.items()))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class Counted:
    """A box that counts what is asked of it and of its forks."""

    def __init__(self, box: Sandbox, calls: list[str]) -> None:
        self._box, self._calls = box, calls

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] | None = None
    ) -> Result:
        self._calls.append("exec")
        return await self._box.exec(argv, stdin=stdin, seconds=seconds, env=env)

    async def exec_fresh(
        self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] | None = None
    ) -> Result:
        self._calls.append("exec_fresh")
        return await self._box.exec_fresh(argv, stdin=stdin, seconds=seconds, env=env)

    async def put(self, files: Mapping[str, bytes]) -> Result:
        self._calls.append("put")
        return await self._box.put(files)

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        self._calls.append("get")
        return await self._box.get(path, limit=limit)

    async def fork(self) -> Sandbox:
        self._calls.append("fork")
        return Counted(await self._box.fork(), self._calls)

    async def snapshot(self) -> bytes:
        self._calls.append("snapshot")
        return await self._box.snapshot()

    async def pause(self) -> None:
        await self._box.pause()

    async def resume(self) -> None:
        await self._box.resume()

    async def close(self) -> None:
        await self._box.close()


class ScriptError(Exception):
    """A script ended before the episode."""


@dataclass
class Played:
    """An episode. states: key at the start and after each call but the last. said: what tools counted against it."""

    outcome: Outcome
    states: list[str]
    said: list[str]
    calls: int
    seconds: float


async def play(backend: Backend, env: Environment, task: Task, script: Generator[Call, Observation, None], *, ask: bool = False) -> Played:
    """Play a script that ends by handing in, and score it. Keys are taken from observations where they tell them, unless `ask`ed for."""
    began, calls, said = time.perf_counter(), ["start"], []
    box = Counted(await backend.start(task.files, limits=task.limits, image=task.image), calls)
    try:
        states = [await env.state(task, box)]
        call = next(script)
        while not (observation := await env.step(task, *call, box)).done:
            if observation.count is not None:
                said.append(f"{call[0]}: {observation.text[:100]}")
            told = None if ask else observation.state
            states.append(await env.state(task, box) if told is None else told)
            try:
                call = script.send(observation)
            except StopIteration:
                raise ScriptError(f"the calls end in {call[0]}, which is not the end of the episode") from None
        return Played(await env.score(task, box), states, said, len(calls), time.perf_counter() - began)
    finally:
        await box.close()


@dataclass
class Row:
    """What the episodes of a split showed: rewards by script, and in words what is not as it must be."""

    rewards: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ("null", "gold", "wrong", "expert")})
    faults: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def require(self, holds: object, what: str) -> None:
        if not holds:
            self.faults.append(what)

    def reward(self, name: str, want: float, task: Task, outcome: Outcome) -> None:
        self.rewards[name].append(outcome.reward)
        self.require(
            outcome.reward == want and outcome.true_success is bool(want) and not (want and outcome.tampering),
            f"{task.id}: {name} gives {outcome}, must score {want:g}",
        )


async def check(env: Environment, backend: Backend, *, split: str, tasks: int) -> Row:
    """Play the first `tasks` tasks of a split by every script. Raises SandboxError."""
    row, gate = Row(), asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> None:
        task = env.task(seed, split)
        row.require(task == env.task(seed, split), f"{task.id}: drawn a second time it is another task")
        async with gate:
            try:
                gold = await play(backend, env, task, scripted(env.gold(task)))
                again = await play(backend, env, task, scripted(env.gold(task)), ask=True)
                null = await play(backend, env, task, scripted(nothing(env, task)))
                wrong = await play(backend, env, task, scripted(env.wrong(task)))
                if isinstance(env, BugFix):
                    row.rewards["expert"].append((await play(backend, env, task, expert(env, task, Random(seed)))).outcome.reward)
            except (GraderError, ScriptError) as error:
                row.faults.append(f"{task.id}: {type(error).__name__}: {error}")
                return
        row.reward("gold", 1, task, gold.outcome)
        row.reward("null", 0, task, null.outcome)
        row.reward("wrong", 0, task, wrong.outcome)
        row.require(not gold.said, f"{task.id}: gold is told {gold.said}")
        row.require(gold.states == again.states, f"{task.id}: the same calls lead to states {gold.states} and {again.states}")
        row.require(len({null.states[0], wrong.states[0], gold.states[0]}) == 1, f"{task.id}: boxes start in different states")
        row.calls.append(gold.calls)
        row.seconds.append(gold.seconds)

    async with asyncio.TaskGroup() as group:
        for seed in range(tasks):
            group.create_task(one(seed))
    return row


async def drawn_afresh(name: str, splits: Sequence[str]) -> dict[str, list[str]]:
    """Digests of the first tasks by split, by a process of its own, whose hash seed is another."""
    argv = [sys.executable, "-m", "experiments.check_env", "--digests", "--env", name, *(f"--split={split}" for split in splits)]
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    process = await asyncio.create_subprocess_exec(
        *argv, env=environment, cwd=Path(__file__).parents[1], stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    return json.loads(out)


def digests(env: Environment, splits: Sequence[str]) -> dict[str, list[str]]:
    return {split: [digest(env.task(seed, split)) for seed in range(AFRESH)] for split in splits}


def line(name: str, split: str, row: Row, different: int) -> str:
    """A row of the table, and below it what is wrong with it."""
    means = [f"{fmean(found):7.2f}" if (found := row.rewards[key]) else f"{'-':>7}" for key in ("null", "gold", "wrong", "expert")]
    cost = f"{fmean(row.calls):7.1f}{fmean(row.seconds):9.2f}" if row.calls else f"{'-':>7}{'-':>9}"
    faults = [f"    {fault}" for fault in row.faults[:SHOWN]]
    if len(row.faults) > SHOWN:
        faults.append(f"    and {len(row.faults) - SHOWN} more")
    return "\n".join([f"{name:14} {split:20}{''.join(means)}{different:>6}/{SEEDS}{cost}{'  WRONG' * bool(faults)}", *faults])


async def main(names: Sequence[str], splits: Sequence[str], tasks: int) -> int:
    """Check environments by name, and print what was found. Returns the exit status."""
    print(f"{'environment':14} {'split':20}{'null':>7}{'gold':>7}{'wrong':>7}{'expert':>7}{'different':>10}{'calls':>7}{'seconds':>9}")
    bad = 0
    async with Bubblewrap() as backend:
        for name in names:
            try:
                env = make(name)
            except ImportError as error:
                print(f"{name:14} skipped: {error}")
                continue
            asked = [split for split in splits_of(env) if split in splits or not splits]
            here, afresh = digests(env, asked), await drawn_afresh(name, asked)
            for split in asked:
                row = await check(env, backend, split=split, tasks=tasks)
                row.require(here[split] == afresh[split], f"another process draws other tasks of {split}: {here[split]}, {afresh[split]}")
                bad += bool(row.faults)
                different = len({content(env.task(seed, split)) for seed in range(SEEDS)})
                print(line(name, split, row, different), flush=True)
    print(f"\n{bad} rows are not as they must be" if bad else "\nall rows are as they must be")
    return 1 if bad else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.check_env", description="Check environments in real boxes.")
    parser.add_argument("--env", action="append", metavar="NAME", help=f"{', '.join(NAMES)}, file.py:Class or module:instance")
    parser.add_argument("--split", action="append", default=[], help="of the environment; all if left out")
    parser.add_argument("--tasks", type=int, default=8, help="per row")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    try:
        if asked.digests:
            print(json.dumps(digests(make(asked.env[0]), asked.split)))
            sys.exit(0)
        sys.exit(asyncio.run(main(asked.env or list(NAMES), asked.split, asked.tasks)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
