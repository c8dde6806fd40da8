"""Which episodes of a step are learnt from, and small changes of their rewards, for `Experiment.rewrite`: `Batch, log-probs -> Batch`,
before credit.

    rewrite=partial(selection.most_uncertain, fraction=0.25)

What is left out keeps its place, so shapes stay. Crashed episodes have left before, and limits are a setting of the experiment.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.data.batch import Batch, Tokens
from agentrl_jax.kernels import filters

LogProbs = Callable[[Tokens], Float[Array, "B T"]]
"""Log-probs of tokens under the weights before the update."""
RewriteFn = Callable[[Batch, LogProbs], Batch]


def informative(batch: Batch, logprobs: LogProbs, *, component: int | None = None) -> Batch:
    """Groups whose members are not all the same (dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476, section 3.2).

    component: what is compared, one of `Experiment.components` by its number, such as solved or not; None: the reward, which differs
               in shaping where the task does not
    """
    del logprobs
    e = batch.episodes
    value = e.reward if component is None else e.components[:, component]
    return _groups(batch, filters.varied(value, e.group, e.in_stats))


def most_uncertain(batch: Batch, logprobs: LogProbs, *, fraction: float = 0.25, rounding: Literal["ceil", "floor"] = "ceil") -> Batch:
    """The share of the groups with the largest std of their rewards (StarPO-S, https://arxiv.org/abs/2504.20073, section 4.2)."""
    del logprobs
    e = batch.episodes
    score = filters.group_score(e.reward, e.group, e.in_stats)
    valid = filters.group_exists(e.group, e.in_stats)
    return _groups(batch, filters.best(score, valid, fraction=fraction, rounding=rounding))


def variance_nucleus(batch: Batch, logprobs: LogProbs, *, share: float = 0.9) -> Batch:
    """As many groups, from the one whose rewards vary most, as hold `share` of all variance (VAGEN)."""
    del logprobs
    e = batch.episodes
    score = filters.group_score(e.reward, e.group, e.in_stats, score="variance", divisor="population")
    return _groups(batch, filters.nucleus(score, filters.group_exists(e.group, e.in_stats), share=share))


def mostly_valid(batch: Batch, logprobs: LogProbs, *, share: float = 0.5) -> Batch:
    """Groups that lost no more than a `share` of their members (GLM-5, https://arxiv.org/abs/2602.15763, section 4.1.2)."""
    del logprobs
    e = batch.episodes
    # Filler rows are a group of their own, which no statistics count.
    return _groups(batch, filters.mostly_valid(e.group, jnp.ones_like(e.in_stats), e.in_stats, share=share))


def overlong_penalty(
    batch: Batch, logprobs: LogProbs, *, limit: int, margin: int, scale: float = 1.0, bounded: bool = True, tools: bool = False
) -> Batch:
    """Less reward for episodes that come near a length (`kernels.filters.overlong_penalty`, DAPO's soft overlong punishment).

    limit, margin: tokens; the penalty begins `margin` before the `limit`
    tools: count what the tools wrote too, not the policy's tokens alone
    """
    del logprobs
    tokens, e = batch.tokens, batch.episodes
    counted = tokens.segment > 0 if tools else tokens.mask
    length = jax.ops.segment_sum(counted.astype(e.reward.dtype).ravel(), tokens.episode.ravel(), e.reward.shape[0])
    penalty = filters.overlong_penalty(length, limit=float(limit), margin=float(margin), scale=scale, bounded=bounded)
    return replace(batch, episodes=replace(e, reward=e.reward + penalty))


def each(batch: Batch, logprobs: LogProbs, *, rules: tuple[RewriteFn, ...]) -> Batch:
    """One rule after the other."""
    for rule in rules:
        batch = rule(batch, logprobs)
    return batch


@jax.jit
def _groups(batch: Batch, kept: Bool[Array, " E"]) -> Batch:
    """With the episodes of other groups out of the loss."""
    e = batch.episodes
    return replace(batch, episodes=replace(e, in_loss=e.in_loss & kept[e.group]))
