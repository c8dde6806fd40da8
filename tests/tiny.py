"""The tiny experiment of `experiments.chaos`, which `TINY_STOP=how,step` in the environment makes stop where a test wants it to."""

import asyncio
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import replace

from agentrl_jax.envs.bugfix import BugFix
from experiments.chaos import tiny
from tests.processes import descendants

GROUPS = tiny.experiment.rollout.groups
STOPPING = "stopping here"
lost = list[int]()  # processes of boxes that were killed


class Stoppable(BugFix):
    """Level 0, and at the first task of a step: interrupted before the collection, or waiting, out of disk or robbed of its boxes in it."""

    def task(self, seed, split="train"):
        if stops("interrupt", seed, split):
            os.kill(os.getpid(), signal.SIGINT)
        return super().task(seed, split)

    async def score(self, task, box):
        _, split, seed = task.id.split("/")
        if stops("wait", int(seed), split):
            sys.stderr.write(f"{STOPPING}\n")
            await asyncio.Event().wait()
        if stops("lose", int(seed), split) and not lost:
            lost.extend(descendants(os.getpid()))
            for process in lost:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        if stops("full", int(seed), split):
            # No file of this process can grow any more: what a full disk does, without filling one.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return await super().score(task, box)


def stops(how, seed, split):
    """Whether this is the place."""
    asked, _, step = os.environ.get("TINY_STOP", "").partition(",")
    return asked == how and split == "train" and seed == GROUPS * int(step)


experiment = replace(tiny.experiment, environment=Stoppable(level=0))
