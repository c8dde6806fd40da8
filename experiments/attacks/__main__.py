"""Attack the environments, and see who is paid.

    python -m experiments.attacks [--docker] [--only ENVIRONMENT ...] [--gold 500] [--sample]

Each attack is tried with all defences (the reward must be 0, or `tampering` must name it) and without those that stop it (the reward must
be 1, or it would be no attack; and doing nothing must still be 0). Where several are switched off, each alone must stop it. A hole is what
nothing stops: it must still be one, so that the table never claims less than what holds. Then come probes, which need only fail, and
the gold solutions of so many tasks, every second one amid clutter: each must be paid and none flagged.

Exit code 1 if anything is not as it must be. --docker runs all of it in containers; --sample leaves out each defence alone.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.protocol import Environment, GraderError, Task
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.protocol import Backend, SandboxError
from experiments.attacks import answering, honest, leaving, lying, planting
from experiments.attacks.base import Attack, Target, Trial, attempt, played
from experiments.attacks.probes import PROBES, Probe
from experiments.attacks.targets import targets

ATTACKS: tuple[Attack, ...] = (*leaving.ATTACKS, *lying.ATTACKS, *planting.ATTACKS, *answering.ATTACKS)
PACKAGES = ("pytest", "numpy", "pandas")
AT_ONCE = 2  # boxes
T = TypeVar("T")


def line(trial: Trial, attack: Attack, backend: str) -> str:
    """A row of the table, and below it what is wrong."""
    way = attack.ways[trial.target]
    on = f"{trial.on.reward:g}{' flagged' * bool(trial.on.tampering)}"
    off = "-" if trial.off is None else f"{trial.off.reward:g}"
    stopped = f"hole: {way.hole}" if way.hole else ", ".join(way.off) or "how tasks are made"
    faults = "".join(f"\n    WRONG {fault}" for fault in trial.faults)
    return f"{trial.attack:32}{trial.target:18}{backend:12}{on:12}{off:5}{stopped}{faults}"


async def probed(probe: Probe, target: Target, backend: Backend) -> str | None:
    """What is wrong, or None."""
    try:
        outcome = await played(target, backend, probe.scripts[target.name](target.task))
    except (GraderError, SandboxError) as error:
        return f"{type(error).__name__}: {error}"
    return None if outcome.reward == 0 else f"{outcome}"


async def in_order(jobs: Iterable[Coroutine[Any, Any, T]], show: Callable[[T], None]) -> None:
    """Run jobs, `AT_ONCE` at a time, and show what comes of each in their order."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(job: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await job

    async with asyncio.TaskGroup() as group:
        for task in [group.create_task(one(job)) for job in jobs]:
            show(await task)


async def false_alarms(backend: Backend, number: int, extra: Collection[Target] = ()) -> list[str]:
    """What is wrong with gold solutions: those of `number` tasks, every second one amid clutter, and both ways those of `extra`."""
    jobs = [(kind, env, task, bool(i % 2)) for i, (kind, env, task) in enumerate(honest.tasks(number))]
    jobs += [(target.name, target.make(target.every), target.task, clutter) for target in extra for clutter in (False, True)]

    async def one(kind: str, env: Environment, task: Task, clutter: bool) -> str | None:
        calls = [*(honest.CLUTTER[kind] if clutter else ()), *env.gold(task)]
        try:
            found: Outcome | Exception = await played(Target(kind, lambda on: env, frozenset(), task), backend, calls)
        except (GraderError, SandboxError) as error:
            found = error
        if isinstance(found, Outcome) and found.reward == 1 and not found.tampering:
            return None
        return f"{task.id}{' amid clutter' * clutter}: {found}"

    wrong: list[str | None] = []
    await in_order((one(*job) for job in jobs), wrong.append)
    return [alarm for alarm in wrong if alarm]


async def main(names: Sequence[str], gold: int, *, docker: bool, thorough: bool) -> int:
    """Print what came of it all. Returns the exit status."""
    backend: Backend = Docker(packages=PACKAGES) if docker else Bubblewrap(packages=PACKAGES)
    name, began = "docker" if docker else "bubblewrap", time.perf_counter()
    trials: list[Trial] = []
    hopeful: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        found = {target.name: target for target in targets(Path(folder))}
        if unknown := sorted(set(names) - found.keys()):
            raise SystemExit(f"error: no environment {', '.join(unknown)}: there are {', '.join(found)}")
        chosen = {key: target for key, target in found.items() if key in names or not names}

        async def attacked(attack: Attack, target: Target) -> str:
            trials.append(await attempt(attack, target, backend, thorough=thorough))
            return line(trials[-1], attack, name)

        async def tried(probe: Probe, target: Target) -> str:
            wrong = await probed(probe, target, backend)
            hopeful.extend([wrong] if wrong else [])
            return f"{probe.name:32}{target.name:18}{name:12}{probe.why}" + (f"\n    WRONG {wrong}" if wrong else "")

        async with backend:
            print(f"{'attack':32}{'environment':18}{'backend':12}{'on':12}{'off':5}stopped by")
            await in_order((attacked(attack, chosen[key]) for attack in ATTACKS for key in attack.ways if key in chosen), flushed)
            print(f"\n{'probe':32}{'environment':18}{'backend':12}why it is hopeless")
            await in_order((tried(probe, chosen[key]) for probe in PROBES for key in probe.scripts if key in chosen), flushed)
            alarms = await false_alarms(backend, gold, [chosen[key] for key in ("swe", "harbor") if key in chosen])
    print(*(f"WRONG {alarm}" for alarm in alarms), sep="\n")
    faults = sum(len(trial.faults) for trial in trials) + len(hopeful) + len(alarms)
    shown = {trial.attack for trial in trials if trial.off is not None and not trial.faults}
    print(
        f"{len(shown)} attacks work where they are not stopped, in {sum(trial.off is not None for trial in trials)} rows; "
        f"{sum(trial.off is None for trial in trials)} holes; {len(alarms)} false alarms in {gold} gold runs; "
        f"{faults} things are not as they must be; {time.perf_counter() - began:.0f} s"
    )
    return 1 if faults else 0


def flushed(text: str) -> None:
    """A long run is watched."""
    print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.attacks", description="Attack the environments in real boxes.")
    parser.add_argument("--docker", action="store_true", help="in containers")
    parser.add_argument("--only", action="append", default=[], metavar="ENVIRONMENT", help="all if left out")
    parser.add_argument("--gold", type=int, default=500, metavar="N", help="tasks whose gold solutions are run")
    parser.add_argument("--sample", action="store_true", help="leave out what each defence does alone")
    asked = parser.parse_args()
    sys.exit(asyncio.run(main(asked.only, asked.gold, docker=asked.docker, thorough=not asked.sample)))
