"""Returns: what still came after a token, a turn or a part of a row. Time is the last axis, and tokens outside `mask` are skipped.

Arguments are those of `kernels/gae.py`. Over turns, `reward` and `exists` of shape [E, K] go in as `reward` and `mask`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.gae import OffStep, anchored, gae, on_steps
from agentrl_jax.kernels.scan import BehindCut, Cut, Factor, Steps, cuts, filled, following, windowed_sum
from agentrl_jax.kernels.units import unit_sum

At = Literal["first", "last"]


def discounted_return(
    reward: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    *,
    discount: Factor = 1.0,
    truncated: Cut | None = None,
    bootstrap_value: BehindCut | None = None,
    off_step: OffStep = "anchor",
    steps: Bool[Array, "*B T"] | None = None,
) -> Float[Array, "*B T"]:
    """`G_t = r_t + discount_t G_next(t)`, 0 where not `mask`.

    Of tokens, the return of REINFORCE++ (https://arxiv.org/abs/2501.03262) before whitening; of turns (E, K), that of GiGPO
    (https://arxiv.org/abs/2505.10978, Eq. 5).

    Args: as in `gae.gae`. `steps=jnp.ones_like(mask)` discounts over tool tokens too (slime, ROLL).
    """
    return lambda_return(
        reward,
        jnp.zeros_like(reward),
        mask,
        discount=discount,
        truncated=truncated,
        bootstrap_value=bootstrap_value,
        off_step=off_step,
        steps=steps,
    )


def lambda_return(
    reward: Float[Array, "*B T"],
    value: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    *,
    discount: Factor = 1.0,
    lam: Factor = 1.0,
    truncated: Cut | None = None,
    bootstrap_value: BehindCut | None = None,
    off_step: OffStep = "anchor",
    steps: Bool[Array, "*B T"] | None = None,
) -> Float[Array, "*B T"]:
    """`G_t = r_t + discount_t ((1 - lam_t) V_next(t) + lam_t G_next(t))`, 0 where not `mask`: the returns of `gae.gae`, `A + V`."""
    return gae(
        reward,
        value,
        mask,
        discount=discount,
        lam=lam,
        truncated=truncated,
        bootstrap_value=bootstrap_value,
        off_step=off_step,
        steps=steps,
    ).returns


def n_step_return(
    reward: Float[Array, "*B T"],
    value: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    *,
    n: int,
    discount: Factor = 1.0,
    lam: Factor = 1.0,
    truncated: Cut | None = None,
    bootstrap_value: BehindCut | None = None,
    off_step: OffStep = "anchor",
) -> Float[Array, "*B T"]:
    """Rewards of the next `n` steps and then the value behind them; fewer where the episode ends. 0 where not `mask`.

    `G = r_t + discount_t V_next(t)` for n = 1, which with values of a target critic is the target of ArCHer's Q over turns
    (https://arxiv.org/abs/2402.19446). With `lam` < 1 each step mixes in the value as in `lambda_return`.
    """
    gamma, lam = filled(discount, reward), filled(lam, reward)
    cut, behind = cuts(reward, truncated, bootstrap_value)
    next_value = jnp.where(cut, behind, following(jnp.where(mask, value, behind), mask | cut))
    ends = cut if truncated is None else anchored(cut.astype(reward.dtype), mask) > 0
    decay = jnp.where(ends, 0.0, gamma * lam)
    x = on_steps(reward, mask, off_step) + (gamma - decay) * next_value
    # Steps move together, so that n counts steps.
    packed = Steps.of(mask)
    sums, product = windowed_sum(packed.together(x), packed.together(decay, fill=1.0), n)
    # Of windows that reach past the last step the value behind that.
    value_behind = packed.together(next_value)
    last = jnp.take_along_axis(value_behind, jnp.maximum(packed.total - 1, 0), -1)
    ahead = jnp.concatenate([value_behind[..., n - 1 :], jnp.zeros_like(value_behind[..., : n - 1])], -1)
    inside = jnp.broadcast_to(jnp.arange(n - 1, n - 1 + x.shape[-1], dtype=jnp.int32), x.shape) < packed.total
    return jnp.where(mask, packed.apart(sums + product * jnp.where(inside, ahead, last)), 0.0)


def edge(mask: Bool[Array, "B T"], part: Int[Array, "B T"] | None, at: At) -> Bool[Array, "B T"]:
    """The first or the last token of `mask` in each part of a row; parts are numbered below T (`kernels/units.py`), None: whole rows."""
    if at not in ("first", "last"):
        raise ValueError(f"at {at!r}: choose first or last")
    rows, width = mask.shape
    here = jnp.broadcast_to(jnp.arange(width), mask.shape)
    # Flat: a scatter into one long array costs half of one into each row.
    row = width * jnp.arange(rows, dtype=jnp.int32)[:, None]
    part = (jnp.broadcast_to(row, mask.shape) if part is None else row + part.astype(jnp.int32)).ravel()
    if at == "first":
        outer = jax.ops.segment_min(jnp.where(mask, here, width).ravel(), part, rows * width)
    else:
        outer = jax.ops.segment_max(jnp.where(mask, here, -1).ravel(), part, rows * width)
    return mask & (outer[part].reshape(mask.shape) == here)


def part_return(
    reward: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    part: Int[Array, "B T"],
    *,
    discount: Factor = 1.0,
    take: Literal["sum", "last"] = "sum",
) -> Float[Array, "B T"]:
    """Return from each part of a row on, the same for all of its tokens: one discount for each part, however long it is.

    Parts are turns (`units.runs(segment, turn)`), or stretches of tokens that the policy wrote (`units.runs(mask.astype(int))`).

    Args:
        part: numbered below T. Parts without a token of `mask` are passed over.
        take: the reward of a part is the "sum" over its tokens, or what stands at its "last" one and nothing else (ROLL).
    """
    end = edge(mask, part, "last")
    if take == "sum":
        reward = unit_sum(jnp.where(mask, reward, 0.0), part)
    elif take != "last":
        raise ValueError(f"take {take!r}: choose sum or last")
    each = discounted_return(jnp.where(end, reward, 0.0), end, discount=discount)
    return jnp.where(mask, unit_sum(each, part), 0.0)


def decayed_outcome(
    outcome: Float[Array, "*B"], steps: Bool[Array, "*B T"], *, gamma: float, where: Bool[Array, "*B"] | None = None
) -> Float[Array, "*B T"]:
    """The outcome of an episode on each of its N steps, `r gamma^(N - i)` for the i-th: of two that succeed the shorter gets more.

    Kimi-Researcher's gamma-decay (https://moonshotai.github.io/Kimi-Researcher/).

    Args:
        where: episodes that decay, there the correct ones; the others have their outcome on each step as it is. All if left out.

    Example:
        >>> decayed_outcome(jnp.array([1.0]), jnp.ones((1, 3), bool), gamma=0.9)  # doctest: +SKIP
        Array([[0.81, 0.9 , 1.  ]])
    """
    count = jnp.cumsum(steps, -1)
    last = steps & (count == count[..., -1:])
    reward = jnp.where(last, outcome[..., None], 0.0)
    decay = jnp.asarray(gamma, outcome.dtype) if where is None else jnp.where(where, gamma, 1.0)[..., None].astype(outcome.dtype)
    return discounted_return(reward, steps, discount=decay)


def reshaped_outcome(
    outcome: Float[Array, "*S"], *, bias: float = 0.0, scale: float = 1.0, limit: float | None = None
) -> Float[Array, "*S"]:
    """`(outcome + bias) * scale`, clipped to +-limit."""
    reshaped = (outcome + bias) * scale
    return reshaped if limit is None else jnp.clip(reshaped, -limit, limit)
