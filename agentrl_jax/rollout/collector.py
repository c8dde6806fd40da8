"""Many episodes at once: groups of the same task, bounded by slots, spoilt ones tried again, and the step goes on without the rest."""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl_jax.data.episode import Episode
from agentrl_jax.envs.protocol import Task
from agentrl_jax.rollout.agent import Job, Parts, RolloutLimits, Sink, nowhere, run_episode

Progress = Callable[[int, int, int], None]
"""Called after each episode with: episodes done, episodes in all, tokens sampled so far."""


class CollectError(RuntimeError):
    """Too few usable episodes to go on with."""


@dataclass(frozen=True)
class RolloutSettings:
    """How episodes are collected.

    slots:       episodes in flight at once
    temperature: of the sampling; 0 is greedy
    retries:     further attempts, each in a fresh box, where infrastructure spoilt an episode
    min_usable:  share of the episodes that must be usable
    """

    limits: RolloutLimits
    slots: int = 16
    temperature: float = 1.0
    retries: int = 1
    min_usable: float = 0.5

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"RolloutSettings.slots must be at least 1, got {self.slots}")
        if self.retries < 0:
            raise ValueError(f"RolloutSettings.retries must be at least 0, got {self.retries}")
        if not 0 <= self.min_usable <= 1:
            raise ValueError(f"RolloutSettings.min_usable must be a share from 0 to 1, got {self.min_usable}")


def plan(tasks: Sequence[Task], group_size: int, *, seed: int, step: int, phase: str = "train") -> list[Job]:
    """`group_size` jobs for each task, group by group; evaluation is the same with groups of one.

    The seed of each derives from (run seed, phase, step, group, member), so it does not depend on what else runs, or when.
    """
    entropy = [seed, zlib.crc32(phase.encode()), step]
    return [
        Job(
            key=f"{phase}-{step}-{group}-{member}",
            task=task,
            group=f"{phase}-{step}-{group}",
            seed=int(np.random.SeedSequence([*entropy, group, member]).generate_state(1, np.uint64)[0] >> np.uint64(1)),
            step=step,
        )
        for group, task in enumerate(tasks)
        for member in range(group_size)
    ]


async def collect(
    jobs: Sequence[Job], parts: Parts, settings: RolloutSettings, *, sink: Sink = nowhere, progress: Progress | None = None
) -> list[Episode]:
    """Run the jobs; one episode each, in their order, whatever order they end in.

    An episode that infrastructure spoilt is tried again `retries` times, with the same seed, then kept with that
    ending. Raises CollectError where fewer than `min_usable` of the episodes are usable. Cancellation closes every box.
    """
    slots = asyncio.Semaphore(settings.slots)
    done = tokens = 0

    async def one(job: Job) -> Episode:
        nonlocal done, tokens
        waiting = time.monotonic()
        async with slots:
            episode = await _tried(job, parts, settings, queued=time.monotonic() - waiting, sink=sink)
        done, tokens = done + 1, tokens + episode.policy_tokens
        if progress is not None:
            progress(done, len(jobs), tokens)
        return episode

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(job), name=job.key) for job in jobs]
    episodes = [task.result() for task in running]
    usable = sum(episode.usable for episode in episodes)
    if usable < settings.min_usable * len(jobs):
        endings = ", ".join(f"{n} {ending.value}" for ending, n in Counter(e.ending for e in episodes).most_common())
        raise CollectError(
            f"only {usable} of {len(jobs)} episodes are usable, min_usable asks for {settings.min_usable:.0%}; they ended by: {endings}. "
            "The log says why each of them was lost"
        )
    return episodes


async def _tried(job: Job, parts: Parts, settings: RolloutSettings, *, queued: float, sink: Sink) -> Episode:
    """The first attempt that infrastructure did not spoil, or the last one."""
    while True:
        episode = await run_episode(job, parts, settings.limits, temperature=settings.temperature, queued=queued, sink=sink)
        if not episode.ending.infrastructure or len(job.spoilt) == settings.retries:
            return episode
        job = replace(job, spoilt=(*job.spoilt, episode.ending))
