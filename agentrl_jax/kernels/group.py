"""Credit relative to the other members of a group, and to the other actions taken in the same state.

Statistics run over *members with `in_stats`* of each group, however many there are and in whatever order they come. A group
that is degenerate (fewer than two members, or max == min) gets exactly 0: decided by max == min and never by std == 0, since
eight float32 rewards of 0.1 do not centre to zero, and dividing that rounding noise by its own std makes an advantage of it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Std = Literal["population", "sample", "none"]
Baseline = Literal["mean", "leave_one_out"]
Singleton = Literal["zero", "raw"]


def group_relative(
    reward: Float[Array, " N"],
    group: Int[Array, " N"],
    in_stats: Bool[Array, " N"],
    *,
    std: Std = "population",
    baseline: Baseline = "mean",
    eps: float = 0.0,
    singleton: Singleton = "zero",
) -> Float[Array, " N"]:
    """Advantage of each member over its group: `(R_i - baseline) / (std + eps)`.

    GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2) with `std`; Dr. GRPO (https://arxiv.org/abs/2503.20783) with
    `std="none"`; RLOO (https://arxiv.org/abs/2402.14740) with `baseline="leave_one_out", std="none"`.

    Args:
        reward: one number per member.
        group: number of the member's group, in [0, N).
        in_stats: False leaves a member out of every statistic; its own advantage is 0.
        std: divisor n ("population"), n - 1 ("sample"), or no division.
        baseline: mean of the group, or mean of its other members.
        eps: added to the std.
        singleton: what the only member of a group gets: 0, or its reward as it is (verl's GRPO).

    Example:
        >>> group_relative(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.zeros(4, int), jnp.ones(4, bool))  # doctest: +SKIP
        Array([ 0.577, -1.732,  0.577,  0.577])
    """
    slots = reward.shape[0] + 1  # the last one takes whoever is in no statistic
    index = jnp.where(in_stats, group, slots - 1)
    value = jnp.where(in_stats, reward, 0.0)

    def total(x: Float[Array, " N"]) -> Float[Array, " N"]:
        return jax.ops.segment_sum(x, index, slots)[index]

    n = total(in_stats.astype(reward.dtype))
    mean = total(value) / jnp.maximum(n, 1.0)
    centred = value - mean
    others = jnp.maximum(n - 1.0, 1.0)
    advantage = centred if baseline == "mean" else centred * (n / others)
    if std != "none":
        squares = total(jnp.square(centred))
        variance = squares / (jnp.maximum(n, 1.0) if std == "population" else others)
        scale = jnp.sqrt(jnp.where(variance > 0, variance, 1.0)) + eps
        advantage = advantage / scale
    alike = jax.ops.segment_max(value, index, slots)[index] == jax.ops.segment_min(value, index, slots)[index]
    advantage = jnp.where(alike | (n < 2), 0.0, advantage)
    if singleton == "raw":
        advantage = jnp.where(n == 1, value, advantage)
    return jnp.where(in_stats, advantage, 0.0)


def turn_returns(reward: Float[Array, "E K"], exists: Bool[Array, "E K"], *, gamma: float) -> Float[Array, "E K"]:
    """Discounted return from each turn on: `R_t = sum_{k >= t} gamma^(k - t) r_k` (GiGPO, https://arxiv.org/abs/2505.10978, Eq. 5).

    Turns that do not exist are 0 and must follow those that do.
    """

    def step(later: Float[Array, " E"], r_t: Float[Array, " E"]) -> tuple[Float[Array, " E"], Float[Array, " E"]]:
        now = r_t + gamma * later
        return now, now

    masked = jnp.where(exists, reward, 0.0)
    _, returns = jax.lax.scan(step, jnp.zeros_like(masked[:, 0]), masked.T, reverse=True)
    return jnp.where(exists, returns.T, 0.0)


def state_relative(
    returns: Float[Array, "E K"],
    state: Int[Array, "E K"],
    in_stats: Bool[Array, "E K"],
    *,
    std: Std = "population",
    eps: float = 0.0,
) -> Float[Array, "E K"]:
    """Advantage of a turn over all turns of its group that started in the same state (GiGPO Eq. 6 and 7).

    Args:
        returns: discounted return from each turn on.
        state: anchor id, equal exactly where group and state are equal, in [0, E * K); -1 where the state is unknown.
        in_stats: False leaves a turn out.
        std, eps: as in `group_relative`.

    A state that nobody else reached gives 0. A trajectory that comes back to a state is in its group twice, as in the paper's
    definition; no turn is deduplicated.
    """
    known = in_stats & (state >= 0)
    flat = group_relative(returns.ravel(), jnp.maximum(state, 0).ravel(), known.ravel(), std=std, eps=eps)
    return flat.reshape(returns.shape)
