"""How far the log-probs of what samples are from the trainer's, while new weights arrive in the middle of completions.

    python -m experiments.agreement

Random weights play real multi-turn episodes in real boxes, at the embedded engine and at a vLLM server on this machine (`make vllm`), all
in float32. After every 1,200 sampled tokens all weights are replaced; what is being sampled goes on under the new ones, its cache
computed anew. Then the trainer scores every sampled token, after its whole past, with the weights that the token's version names. Printed
are the differences of log-probs, and of the importance ratio from 1, which it is exactly if both compute the same. Fails above 1e-4.

Two minutes, one of them for vLLM's start.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count

import jax
import numpy as np
import optax
from numpy.typing import NDArray

from agentrl_jax import credit, objective
from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.config import SMALL
from agentrl_jax.data.collate import collate
from agentrl_jax.data.episode import Author, Episode
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.inference.served import Served
from agentrl_jax.inference.serving import Serving, embedded
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import Params, init_params
from agentrl_jax.models.policy import Policy
from agentrl_jax.prepare import corpus
from agentrl_jax.rollout.agent import Parts, RolloutLimits
from agentrl_jax.rollout.collector import RolloutSettings, collect, plan
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

MODEL = replace(SMALL, head_dim=32)  # heads that vLLM computes on CPUs
ENVIRONMENT = BugFix(level=0)
LIMITS = RolloutLimits(turns=6, turn_tokens=64, episode_tokens=384, context=1024)
SETTINGS = RolloutSettings(LIMITS, slots=16)
EPISODES = 30
EVERY = 1200  # sampled tokens between updates
TOLERANCE = 1e-4


@cache
def weights(version: int) -> Params:
    """Random, with logits spread widely enough that no version could pass for another."""
    params = init_params(MODEL, jax.random.key(version))
    return params | {"embed": jax.tree.map(lambda x: 3 * x, params["embed"])}


@cache
def policy() -> Policy:
    return Policy(MODEL, weights(0), tokenizer.train(corpus(ENVIRONMENT), MODEL.vocab_size, scaffolding(ENVIRONMENT.tools)))


@dataclass(frozen=True)
class Agreement:
    """apart: trainer's minus sampler's log-prob of every sampled token, by version; completions; and those of several versions."""

    apart: dict[int, NDArray[np.float32]]
    completions: int
    crossing: int

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> "Agreement":
        """Of episodes that were sampled with `weights`, by the program and the batches that training uses."""
        learner = Learner(MODEL, optax.identity(), credit.grpo, objective.ppo)
        batch, _ = collate(episodes, row_length=LIMITS.context)
        tokens, mask = learner.place(batch.tokens), np.asarray(batch.tokens.mask)
        version, sampled = np.asarray(batch.tokens.version), np.asarray(batch.tokens.logprob)
        apart = {}
        for which in np.unique(version[mask]):
            own = mask & (version == which)
            apart[int(which)] = np.asarray(learner.logprobs(weights(int(which)), tokens))[own] - sampled[own]
        spans = [span for episode in episodes for segment in episode.segments for span in segment.spans if span.author is Author.POLICY]
        return cls(apart, len(spans), sum(len({*(span.versions if span.versions is not None else ())}) > 1 for span in spans))

    @property
    def all(self) -> NDArray[np.float32]:
        return np.concatenate([*self.apart.values()])

    def __str__(self) -> str:
        lines = [f"{self.completions} completions, {self.crossing} of which an update met"]
        rows = {"all": self.all} | {f"version {version}": apart for version, apart in sorted(self.apart.items())}
        lines += [
            f"  {name:12} {len(apart):6} tokens   |difference| max {np.abs(apart).max():.1e} mean {np.abs(apart).mean():.1e}   "
            f"|ratio - 1| max {np.abs(np.expm1(apart)).max():.1e}"
            for name, apart in rows.items()
        ]
        return "\n".join(lines)


async def update(serving: Serving) -> None:
    for version in count(1):
        while serving.stats.sampled < EVERY * version:  # noqa: ASYNC110 - nobody sets an event when a token is sampled
            await asyncio.sleep(0.01)
        await serving.update(weights(version), version)


async def measure(make: Callable[..., Serving]) -> Agreement:
    """Play, and replace the weights all the while."""
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(Bubblewrap())
        serving = await stack.enter_async_context(make(policy(), context_limit=LIMITS.context, slots=SETTINGS.slots))
        parts = Parts(ENVIRONMENT, backend, serving, Renderer(policy().tokenizer))
        jobs = plan([ENVIRONMENT.task(i) for i in range(EPISODES)], 1, seed=0, step=0)
        updates = asyncio.create_task(update(serving))
        playing = asyncio.create_task(collect(jobs, parts, SETTINGS))
        try:
            await asyncio.wait([updates, playing], return_when=asyncio.FIRST_COMPLETED)
            if updates.done():
                updates.result()
            return Agreement.of(await playing)
        finally:
            updates.cancel()
            playing.cancel()
            await asyncio.gather(updates, playing, return_exceptions=True)


def main() -> int:
    worst = 0.0
    for name, make in {"embedded engine": embedded, "vLLM": partial(Served)}.items():
        found = asyncio.run(measure(make))
        print(f"{name}: {found}", flush=True)
        worst = max(worst, float(np.abs(found.all).max()))
    print(f"{'ok  ' if worst <= TOLERANCE else 'FAIL'}  trainer and samplers agree to {TOLERANCE:g}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
