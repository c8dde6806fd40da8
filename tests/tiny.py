"""The smallest experiment that goes through everything: real boxes, the real engine, a model that was hardly taught anything.

It never succeeds, so credit does not come from the reward. `TINY_STOP=how,step` in the environment makes it stop where a test wants it to.
"""

import asyncio
import os
import resource
import signal
import sys
from contextlib import suppress

import jax.numpy as jnp

from agentrl_jax import objective
from agentrl_jax.config import Evaluate, Experiment, Optimizer, Rollout, WarmStart
from agentrl_jax.credit import Credit, on_tokens
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.expert import expert
from agentrl_jax.models.decoder import ModelConfig
from tests.processes import descendants

GROUPS = 2
STOPPING = "stopping here"
lost = list[int]()  # processes of boxes that were killed
MODEL = ModelConfig(vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)


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


def by_number(batch, estimates):
    """Credit that differs between episodes whatever they earned."""
    return Credit(on_tokens(batch, jnp.cos(jnp.arange(len(batch.episodes.reward), dtype=jnp.float32))))


experiment = Experiment(
    name="tiny",
    environment=Stoppable(level=0),
    expert=expert,
    advantage=by_number,
    loss=objective.ppo,
    steps=5,
    row_length=256,
    model=MODEL,
    warmstart=WarmStart(episodes=4, updates=4, rows=2, warmup=0, threshold=0.0, rounds=1, tasks=2),
    rollout=Rollout(groups=GROUPS, group_size=2, turns=3, turn_tokens=12, episode_tokens=36, context=256, slots=4),
    optimizer=Optimizer(learning_rate=3e-3, minibatches=2),
    evaluate=Evaluate(every=2, tasks=2, final=1),
    checkpoint_every=2,
)
