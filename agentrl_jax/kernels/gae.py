"""Advantages of a critic's values over time (GAE), for tokens, turns or steps: whatever the last axis is.

    delta_t = r_t + discount_t V_next(t) - V_t
    A_t     = delta_t + discount_t lam_t A_next(t)

`next(t)` is the next *step*. Tokens that the policy did not write are no steps: they cost no discount, no lambda, and the
critic's value there is never read, so that any number of them may be inserted. Over turns the same function is a turn-level
GAE: `reward`, `value` and `exists` of shape [E, K] (kernels/turns.py).

Where an episode ends:
    terminated   nothing follows. So ends a row; inside a row (many episodes one after the other) the discount of the last step is 0
    truncated    the state it was cut off at has `bootstrap_value`, and no advantage flows back from behind it
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.scan import BehindCut, Cut, Factor, cuts, discounted_sum, filled, following, shifted, time_order

OffStep = Literal["anchor", "drop"]


class Gae(NamedTuple):
    """advantages: for the policy; returns: targets of the critic, `A + V`, with its own lambda. Both 0 where not `mask`."""

    advantages: Float[Array, "*B T"]
    returns: Float[Array, "*B T"]


def anchored(reward: Float[Array, "*B T"], mask: Bool[Array, "*B T"]) -> Float[Array, "*B T"]:
    """Rewards outside `mask` move, undiminished, to the last token of `mask` before them; without one they are lost.

    An environment's reward often lands on its own output or on the end-of-turn template. Rewards must be finite everywhere.
    In a row of many episodes a reward belongs behind its own episode's first step.
    """
    zero = jnp.zeros_like(reward)
    off = discounted_sum(jnp.where(mask, zero, reward), jnp.where(mask, zero, 1.0))
    return jnp.where(mask, reward + shifted(off), 0.0)


def on_steps(reward: Float[Array, "*B T"], step: Bool[Array, "*B T"], off_step: OffStep) -> Float[Array, "*B T"]:
    """Rewards at the steps alone: those elsewhere "anchor" at the step before, or "drop"."""
    if off_step == "anchor":
        return anchored(reward, step)
    if off_step == "drop":
        return jnp.where(step, reward, 0.0)
    raise ValueError(f"off_step {off_step!r}: choose anchor or drop")


def gae(
    reward: Float[Array, "*B T"],
    value: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    *,
    discount: Factor = 1.0,
    lam: Factor = 1.0,
    value_lam: Factor | None = None,
    truncated: Cut | None = None,
    bootstrap_value: BehindCut | None = None,
    off_step: OffStep = "anchor",
    steps: Bool[Array, "*B T"] | None = None,
) -> Gae:
    """GAE (https://arxiv.org/abs/1506.02438, Eq. 16) that skips observations (SAO, https://arxiv.org/abs/2607.07508, Eq. 4-5).

    Args:
        reward: reward that arrives with or behind a token.
        value: critic's value of the state before the token. What stands outside `mask` is not read, NaN included.
        mask: tokens that the policy wrote.
        discount: gamma; as an array it may be 0 at the last step of an episode, which ends it there.
        lam: lambda; as [.., 1] one per row, see `adaptive_lambda`.
        value_lam: lambda of the returns, if it is another one.
        truncated, bootstrap_value: per row, or per token in rows of many episodes: the episode is cut off behind this position,
            at a state of this value (trailing tool output included). The flag may stand on any token from the last step on.
        off_step: a reward that lies outside `mask` counts for the last token of `mask` before it ("anchor"), or not at all ("drop":
            verl, AReaL).
        steps: tokens that are steps of the recursion, if these are not those of `mask`. With tool tokens in it, they cost discount
            and lambda and their values count (Search-R1, slime, ROLL): then rewards and values must be 0 in padding. At tokens
            of `mask` that are no steps stands the advantage of the next step.

    No gradient should flow through it: call it on `stop_gradient(value)`.

    Example:
        >>> gae(
        ...     jnp.array([0.0, 0.0, 1.0]), jnp.array([0.2, jnp.nan, 0.4]), jnp.array([True, False, True])
        ... ).advantages  # doctest: +SKIP
        Array([0.8, 0. , 0.6])
    """
    step = mask if steps is None else steps
    value = jnp.where(mask | step, value, 0.0)
    gamma = filled(discount, reward)
    cut, behind = cuts(reward, truncated, bootstrap_value)
    next_value = jnp.where(cut, behind, following(jnp.where(step, value, behind), step | cut))
    delta = jnp.where(step, on_steps(reward, step, off_step) + gamma * next_value - value, 0.0)

    def accumulate(lam: Factor) -> Float[Array, "*B T"]:
        decay = jnp.where(step, gamma * filled(lam, reward), 1.0)
        return discounted_sum(delta, jnp.where(cut, 0.0, decay))

    advantage = accumulate(lam)
    target = (advantage if value_lam is None else accumulate(value_lam)) + value
    return Gae(jnp.where(mask, advantage, 0.0), jnp.where(mask, target, 0.0))


def adaptive_lambda(length: Float[Array, "*S"] | Int[Array, "*S"], *, alpha: float = 1.5) -> Float[Array, "*S"]:
    """Lambda of the policy that grows with the number of tokens written: `1 - 1 / max(alpha * length, 1)`.

    VAPO (https://arxiv.org/abs/2504.05118, section 4.2); SAO (https://arxiv.org/abs/2607.07508) with alpha 1.5 and lambda 1 for the
    critic: `gae(.., lam=adaptive_lambda(length)[:, None], value_lam=1.0)`.
    """
    return 1.0 - 1.0 / jnp.maximum(alpha * jnp.asarray(length, jnp.result_type(float)), 1.0)


def segment_factor(
    tokens: Int[Array, " S"],
    episode: Int[Array, " S"],
    position: Int[Array, " S"],
    *,
    lam: Float[Array, " S"],
    gamma: float = 1.0,
) -> Float[Array, " S"]:
    """What the advantages of one segment of an episode are multiplied with: `(gamma lam_s) ^ (tokens in later segments)`.

    CompactionRL (https://arxiv.org/abs/2607.05378): an episode whose context was compacted is trained as several segments, each with
    its own GAE from the shared outcome; this is what the decay over the later ones would have been. Targets of the critic stay.

    Args:
        tokens: number of tokens in the loss of each segment.
        episode, position: whose segment it is, and its place in time there. Segments may come in any order.
        lam: of each segment; `adaptive_lambda(tokens)` in the paper.

    A short segment has a small lambda: where a summary is a segment of its own, its factor is nearly 0. In one segment with the
    turns before it, it is not.
    """
    order, last = time_order(episode, position)
    count = tokens.astype(lam.dtype)[order]
    later = discounted_sum(count, jnp.where(last, 0.0, 1.0).astype(lam.dtype)) - count
    return jnp.power(gamma * lam, jnp.zeros_like(later).at[order].set(later))
