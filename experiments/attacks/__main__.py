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
from collections.abc import Collection, Sequence
from pathlib import Path

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.protocol import GraderError
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


async def false_alarms(backend: Backend, number: int, extra: Collection[Target] = ()) -> list[str]:
    """What is wrong with gold solutions: those of `number` tasks, every second one amid clutter, and both ways those of `extra`."""
    jobs = [(kind, env, task, bool(i % 2)) for i, (kind, env, task) in enumerate(honest.tasks(number))]
    jobs += [(target.name, target.make(target.every), target.task, clutter) for target in extra for clutter in (False, True)]
    gate = asyncio.Semaphore(AT_ONCE)
    wrong: list[str] = []

    async def one(kind: str, env: honest.Environment, task: honest.Task, clutter: bool) -> None:
        calls = [*(honest.CLUTTER[kind] if clutter else ()), *env.gold(task)]
        target = Target(kind, lambda on: env, frozenset(), task)
        async with gate:
            try:
                found: Outcome | Exception = await played(target, backend, calls)
            except (GraderError, SandboxError) as error:
                found = error
        if isinstance(found, Exception) or found.reward != 1 or found.tampering:
            wrong.append(f"{task.id}{' amid clutter' * clutter}: {found}")

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(one(*job))
    return wrong


async def main(names: Sequence[str], gold: int, *, docker: bool, thorough: bool) -> int:
    """Print what came of it all. Returns the exit status."""
    backend: Backend = Docker(packages=PACKAGES) if docker else Bubblewrap(packages=PACKAGES)
    name, faults, shown, holes, began = "docker" if docker else "bubblewrap", 0, 0, 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {target.name: target for target in targets(Path(folder)) if target.name in names or not names}
        async with backend:
            print(f"{'attack':32}{'environment':18}{'backend':12}{'on':12}{'off':5}stopped by")
            for attack in ATTACKS:
                rows = [await attempt(attack, chosen[way], backend, thorough=thorough) for way in attack.ways if way in chosen]
                for trial in rows:
                    print(line(trial, attack, name), flush=True)
                    faults += len(trial.faults)
                    holes += trial.off is None
                shown += any(trial.off is not None and not trial.faults for trial in rows)
            print(f"\n{'probe':32}{'environment':18}{'backend':12}why it is hopeless")
            for probe in PROBES:
                for target in (chosen[way] for way in probe.scripts if way in chosen):
                    wrong = await probed(probe, target, backend)
                    faults += wrong is not None
                    print(
                        f"{probe.name:32}{target.name:18}{name:12}{probe.why}{f'{chr(10)}    WRONG {wrong}' if wrong else ''}", flush=True
                    )
            alarms = await false_alarms(backend, gold, [chosen[key] for key in ("swe", "harbor") if key in chosen])
    for alarm in alarms:
        print(f"WRONG {alarm}")
    faults += len(alarms)
    print(
        f"\n{shown} attacks shown to work where they are not stopped; {holes} holes; {faults} things are not as they must be; "
        f"{len(alarms)} false alarms in {gold} gold runs; {time.perf_counter() - began:.0f} s"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.attacks", description="Attack the environments in real boxes.")
    parser.add_argument("--docker", action="store_true", help="in containers")
    parser.add_argument("--only", action="append", default=[], metavar="ENVIRONMENT", help="all if left out")
    parser.add_argument("--gold", type=int, default=500, metavar="N", help="tasks whose gold solutions are run")
    parser.add_argument("--sample", action="store_true", help="leave out what each defence does alone")
    asked = parser.parse_args()
    sys.exit(asyncio.run(main(asked.only, asked.gold, docker=asked.docker, thorough=not asked.sample)))
