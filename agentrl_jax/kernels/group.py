"""Credit relative to the other members of a group, and to the other actions taken in the same state.

Statistics run over *members with `in_stats`* of each group, however many there are and in whatever order they come. A group
that is degenerate (fewer than two members, or max == min) gets exactly 0: never decided by std == 0 of plain sums, since eight
float32 rewards of 0.1 do not centre to zero, and dividing that rounding noise by its own std makes an advantage of it. Here all
sums are of distances from the group's smallest reward, which are exactly 0 where all are equal.

| rule | call |
|---|---|
| GRPO (https://arxiv.org/abs/2402.03300, 4.1.2) | `group_relative(...)`, `std="sample", eps=1e-6` in most frameworks |
| Dr. GRPO (https://arxiv.org/abs/2503.20783) | `std="none"` |
| RLOO (https://arxiv.org/abs/2402.14740), DeepSWE | `baseline="leave_one_out", std="none"` |
| NeMo-RL's default | `baseline="leave_one_out", std="leave_one_out", eps=1e-6` |
| OPO (https://arxiv.org/abs/2505.23585) | `baseline="length", length=tokens the policy wrote, std="none"` |
| centred by group, scaled by batch (TRL, ROLL) | `scale_group=zeros` |
| AReaL's Normalization | `std_about="baseline"` |
| statistics over rows or steps | `count=rows of the episode` |
| REINFORCE++-baseline | `std="none"`, then `whiten.whiten` |

Rules that are more than a baseline and a scale are in `baselines.py`.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.scan import discounted_sum
from agentrl_jax.kernels.whiten import EpsIn, spread

Std = Literal["population", "sample", "leave_one_out", "none"]
Baseline = Literal["mean", "leave_one_out", "length", "none"]
Singleton = Literal["zero", "raw"]
Stats = Literal["episodes", "rows"]


class GroupStatistics(NamedTuple):
    """One entry per group number: how many members count, their mean, std, smallest and largest; infinite extremes where there are none."""

    members: Float[Array, " G"]
    mean: Float[Array, " G"]
    std: Float[Array, " G"]
    low: Float[Array, " G"]
    high: Float[Array, " G"]


class _Sums(NamedTuple):
    """Per group: count, extremes, mean distance from the smallest, squared distances from the mean. Per member: weight, both distances."""

    n: Float[Array, " G"]
    low: Float[Array, " G"]
    high: Float[Array, " G"]
    rise: Float[Array, " G"]
    squares: Float[Array, " G"]
    weight: Float[Array, " N"]
    above: Float[Array, " N"]
    centred: Float[Array, " N"]


def _sums(
    value: Float[Array, " N"], group: Int[Array, " N"], in_stats: Bool[Array, " N"], count: Float[Array, " N"] | None, groups: int
) -> _Sums:
    weight = jnp.where(in_stats, 1.0 if count is None else count, 0.0).astype(value.dtype)
    member = weight > 0
    index = jnp.where(member, group, groups)  # one slot more takes whoever is in no statistic
    low = jax.ops.segment_min(jnp.where(member, value, jnp.inf), index, groups + 1)[:-1]
    high = jax.ops.segment_max(jnp.where(member, value, -jnp.inf), index, groups + 1)[:-1]
    n = jax.ops.segment_sum(weight, index, groups + 1)[:-1]
    above = value - jnp.where(jnp.isfinite(low), low, 0.0)[group]
    rise = jax.ops.segment_sum(weight * jnp.where(member, above, 0.0), index, groups + 1)[:-1] / jnp.maximum(n, 1.0)
    centred = above - rise[group]
    squares = jax.ops.segment_sum(weight * jnp.square(jnp.where(member, centred, 0.0)), index, groups + 1)[:-1]
    return _Sums(n, low, high, rise, squares, weight, above, centred)


def _variance(squares: Float[Array, "*S"], n: Float[Array, "*S"], std: Std) -> Float[Array, "*S"]:
    return squares / jnp.maximum(n if std == "population" else n - 1.0, 1.0)


def group_statistics(
    reward: Float[Array, " N"],
    group: Int[Array, " N"],
    in_stats: Bool[Array, " N"],
    *,
    groups: int | None = None,
    count: Float[Array, " N"] | None = None,
    std: Literal["population", "sample"] = "population",
    eps: float = 0.0,
    eps_in: EpsIn = "std",
    singleton: Singleton = "zero",
) -> GroupStatistics:
    """Statistics of each group, for those who select or report.

    Args:
        groups: how many group numbers there are; N if left out.
        singleton: what a group of fewer than two reports: its own mean and std 0 ("zero"), or mean 0 and std 1 ("raw": what makes
            its advantage the raw reward).
        others: as in `group_relative`.
    """
    s = _sums(reward, group, in_stats, count, groups or reward.shape[0])
    mean = jnp.where(s.n > 0, s.low + s.rise, 0.0)
    deviation = spread(_variance(s.squares, s.n, std), eps=eps, eps_in=eps_in)
    if singleton == "raw":
        mean, deviation = jnp.where(s.n < 2, 0.0, mean), jnp.where(s.n < 2, 1.0, deviation)
    return GroupStatistics(s.n, mean, deviation, s.low, s.high)


def group_relative(
    reward: Float[Array, " N"],
    group: Int[Array, " N"],
    in_stats: Bool[Array, " N"],
    *,
    std: Std = "population",
    baseline: Baseline = "mean",
    eps: float = 0.0,
    eps_in: EpsIn = "std",
    singleton: Singleton = "zero",
    count: Float[Array, " N"] | None = None,
    length: Float[Array, " N"] | None = None,
    scale_group: Int[Array, " N"] | None = None,
    std_about: Literal["mean", "baseline"] = "mean",
    in_loss: Bool[Array, " N"] | None = None,
) -> Float[Array, " N"]:
    """Advantage of each member over its group: `(R_i - baseline) / (std + eps)`. The module's table says which paper is which call.

    Args:
        reward: one number per member.
        group: number of the member's group, in [0, N).
        in_stats: False leaves a member out of every statistic; its reward may be anything then.
        std: divisor of the variance n ("population") or n - 1 ("sample"); "leave_one_out" is the sample std of the other members,
            and does not divide where they are all equal; "none" does not divide.
        baseline: mean of the group; mean of its other members; mean weighted by `length`; or "none".
        eps, eps_in: guard of the division, see `whiten.spread`.
        singleton: what the only member of a group gets: 0, or what mean 0 and std 1 give ("raw": its reward, over 1 + eps;
            verl's and rllm's GRPO).
        count: how often each member counts in the statistics (whole numbers): 1 if left out, the number of its rows or steps for
            statistics over rows, where long episodes weigh more. A group whose counts sum to 1 is a singleton.
        length: for `baseline="length"` alone, the tokens that the policy wrote.
        scale_group: the groups that the std is taken over, if not `group`: all 0 for the whole batch.
        std_about: the std is the spread of rewards about the mean of their `scale_group`, or of what is divided by it about 0
            ("baseline"; AReaL). They differ where baseline and mean do.
        in_loss: who gets an advantage; `in_stats` if left out. A member can be compared with a group that it is not counted in
            (a second row of the same episode), or count without being trained (an episode cut short). The others get 0.

    Example:
        >>> group_relative(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.zeros(4, int), jnp.ones(4, bool))  # doctest: +SKIP
        Array([ 0.577, -1.732,  0.577,  0.577])
    """
    if (length is None) == (baseline == "length"):
        raise ValueError('`length` goes with baseline="length" and with no other')
    slots = reward.shape[0]
    in_loss = in_stats if in_loss is None else in_loss
    s = _sums(reward, group, in_stats, count, slots)
    n, alike = s.n[group], (s.high == s.low)[group]
    ours = (s.weight > 0).astype(reward.dtype)  # an outsider has nobody to leave out
    advantage = s.centred
    if baseline == "leave_one_out":
        advantage = advantage * (n / jnp.maximum(n - ours, 1.0))
    elif baseline == "none":
        advantage = reward
    elif length is not None:
        weight = jnp.where(s.weight > 0, s.weight * length, 0.0)
        tokens, weighted = (jax.ops.segment_sum(x, group, slots)[group] for x in (weight, weight * jnp.where(s.weight > 0, s.above, 0.0)))
        advantage = jnp.where(tokens > 0, s.above - weighted / jnp.where(tokens > 0, tokens, 1.0), s.centred)
    elif baseline != "mean":
        raise ValueError(f"baseline {baseline!r}: choose mean, leave_one_out, length or none")
    if baseline != "none":
        advantage = jnp.where(alike | (n < 2), 0.0, advantage)
    if singleton == "raw":
        advantage = jnp.where(n == 1, reward, advantage)
    if std == "leave_one_out":
        advantage = advantage / _others_std(s, group, ours, eps=eps, eps_in=eps_in)
    elif std in ("population", "sample"):
        over, of = (group, s) if scale_group is None else (scale_group, _sums(reward, scale_group, in_stats, count, slots))
        squares = of.squares
        if std_about == "baseline":
            squares = jax.ops.segment_sum(s.weight * jnp.square(jnp.where(s.weight > 0, advantage, 0.0)), over, slots)
        # No spread, nothing to divide by; of one entry it is taken to be 1, so that only eps acts.
        variance = jnp.where(squares > 0, _variance(squares, of.n, std), 1.0)
        scale = jnp.where((squares > 0) | (of.n < 2), spread(variance, eps=eps, eps_in=eps_in), 1.0)
        advantage = advantage / scale[over]
    elif std != "none":
        raise ValueError(f"std {std!r}: choose population, sample, leave_one_out or none")
    return jnp.where(in_loss & (n > 0), advantage, 0.0)


def _others_std(s: _Sums, group: Int[Array, " N"], ours: Float[Array, " N"], *, eps: float, eps_in: EpsIn) -> Float[Array, " N"]:
    """Sample std of the members other than this one; 1 where they are fewer than two or all equal."""
    n, low, high = s.n[group], s.low[group], s.high[group]
    value = s.above
    top = high - low
    at_low, at_high = (
        jax.ops.segment_sum(jnp.where(value == x, s.weight, 0.0), group, s.n.shape[0])[group] for x in (jnp.zeros_like(value), top)
    )
    others = n - ours
    same = (low == high) | ((value != 0) & (at_low == others)) | ((value != top) & (at_high == others)) | (others < 2)
    squares = s.squares[group] - ours * jnp.square(s.centred) * (n / jnp.maximum(n - 1.0, 1.0))
    variance = jnp.where(same, 1.0, jnp.maximum(squares, 0.0) / jnp.maximum(others - 1.0, 1.0))
    return jnp.where(same, 1.0, spread(variance, eps=eps, eps_in=eps_in))


def turn_returns(reward: Float[Array, "E K"], exists: Bool[Array, "E K"], *, gamma: float) -> Float[Array, "E K"]:
    """Discounted return from each turn on: `R_t = sum_{k >= t} gamma^(k - t) r_k` (GiGPO, https://arxiv.org/abs/2505.10978, Eq. 5).

    Turns that do not exist are 0 and must follow those that do.
    """
    returns = discounted_sum(jnp.where(exists, reward, 0.0), jnp.full_like(reward, gamma))
    return jnp.where(exists, returns, 0.0)


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
            `data/anchors.py` makes them.
        in_stats: False leaves a turn out.
        std, eps: as in `group_relative`; "none" is the paper's `F_norm = 1`.

    A state that nobody else reached gives 0. A trajectory that comes back to a state is in its group twice, as in the paper's
    definition; no turn is deduplicated.
    """
    known = in_stats & (state >= 0)
    flat = group_relative(returns.ravel(), jnp.maximum(state, 0).ravel(), known.ravel(), std=std, eps=eps)
    return flat.reshape(returns.shape)


def gigpo(
    reward: Float[Array, " E"],
    returns: Float[Array, "E K"],
    group: Int[Array, " E"],
    state: Int[Array, "E K"],
    exists: Bool[Array, "E K"],
    in_stats: Bool[Array, " E"],
    *,
    omega: float = 1.0,
    std: Std = "population",
    eps: float = 0.0,
    singleton: Singleton = "zero",
    stats: Stats = "episodes",
) -> Float[Array, "E K"]:
    """`A = A^E + omega A^S` (GiGPO, https://arxiv.org/abs/2505.10978, Eq. 8): advantage of every turn, 0 where there is none.

    A^E compares whole episodes of a group by `reward` (Eq. 3), A^S turns that started in the same state by `returns`
    (`turn_returns`, Eq. 5; `state_relative`, Eq. 6 and 7). Where no state repeats this is GRPO.

    Args:
        reward: of the episode; what A^E compares. exists: which turns there are.
        std, eps: for both levels; "none" is mean_norm.
        singleton: for the episode level; a state reached once always gives 0.
        stats: "episodes" counts each episode once (Eq. 3); "rows" counts it once per turn, as the public code does.
    """
    turns = jnp.sum(exists, axis=1).astype(reward.dtype) if stats == "rows" else None
    episode = group_relative(reward, group, in_stats, std=std, eps=eps, singleton=singleton, count=turns)
    step = state_relative(returns, state, exists & in_stats[:, None], std=std, eps=eps)
    return jnp.where(exists, episode[:, None] + omega * step, 0.0)
