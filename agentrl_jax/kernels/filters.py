"""Which episodes and groups take part in an update, as masks: what is left out keeps its place, so that shapes do not change.

A group is a number in [0, E), a score or a mask over groups has one entry per number (`group_exists` says which are in use), and
`kept[group]` lays it on the episodes. Two masks of an episode, never one for the other: `in_stats`, whether it counts in the
statistics of its group, and `in_loss`, whether it is trained. Rules that drop groups look at the task's own metric; the reward that
makes the advantages may be another one.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.whiten import Divisor

Score = Literal["std", "variance", "mean", "sum"]
Order = Literal["largest", "smallest"]


def exclude(
    drop: Bool[Array, " E"],
    in_stats: Bool[Array, " E"],
    in_loss: Bool[Array, " E"],
    *,
    scope: Literal["statistics", "loss"],
) -> tuple[Bool[Array, " E"], Bool[Array, " E"]]:
    """`in_stats` and `in_loss` without the episodes to `drop`: those that crashed, or hit a limit (compact filtering, DeepSWE).

    scope: "statistics": before grouping, its reward is in no baseline (crashes always; rllm); "loss": its reward stays in the baseline,
           and it is not trained (SUPO, https://arxiv.org/abs/2510.06727; TRL). With rewards 1, 0, 1, 0, the last cut off, the
           others get 1/3, -2/3, 1/3 or 1/2, -1/2, 1/2.
    """
    if scope not in ("statistics", "loss"):
        raise ValueError(f"scope {scope!r}: choose statistics or loss")
    return (in_stats & ~drop if scope == "statistics" else in_stats), in_loss & ~drop


def overlong_penalty(
    length: Float[Array, " E"], *, limit: float, margin: float, scale: float = 1.0, bounded: bool = True
) -> Float[Array, " E"]:
    """Soft overlong punishment (DAPO, https://arxiv.org/abs/2503.14476, Eq. 13): 0 up to `limit - margin`, down to `-scale` at `limit`.

    Args:
        length: tokens of an episode; of the policy alone, or with the tools' output: the two can be a whole penalty apart.
        bounded: stay at `-scale` beyond the limit, as in the paper. verl and AReaL go on down.
    """
    penalty = jnp.minimum(-(length - (limit - margin)) / margin * scale, 0.0)
    return jnp.maximum(penalty, -scale) if bounded else penalty


def group_exists(group: Int[Array, " E"], in_stats: Bool[Array, " E"], *, at_least: int = 1) -> Bool[Array, " E"]:
    """Groups with `at_least` so many members in the statistics."""
    return _per_group(in_stats.astype(jnp.int32), group, in_stats) >= at_least


def mostly_valid(
    group: Int[Array, " E"], member: Bool[Array, " E"], in_stats: Bool[Array, " E"], *, share: float = 0.5
) -> Bool[Array, " E"]:
    """Groups of which more than `share` of the members are in the statistics (GLM-5, https://arxiv.org/abs/2602.15763, section 4.1.2).

    member: False for filler rows, which are in no group.
    """
    valid = _per_group(in_stats.astype(jnp.result_type(float)), group, in_stats & member)
    return valid > share * _per_group(member.astype(valid.dtype), group, member)


def group_score(
    value: Float[Array, " E"],
    group: Int[Array, " E"],
    in_stats: Bool[Array, " E"],
    *,
    score: Score = "std",
    divisor: Divisor = "sample",
) -> Float[Array, " E"]:
    """One number per group over its members with `in_stats`: 0 where there are none, exactly 0 spread where all are the same.

    divisor: of "std" and "variance": n, or n - 1 ("sample"; a single member has no spread).
    """
    n = _per_group(jnp.ones_like(value), group, in_stats)
    total = _per_group(value, group, in_stats)
    if score == "sum":
        return total
    mean = total / jnp.maximum(n, 1.0)
    if score == "mean":
        return mean
    squares = _per_group(jnp.square(value - mean[group]), group, in_stats)
    variance = squares / jnp.maximum(n - (1.0 if divisor == "sample" else 0.0), 1.0)
    variance = jnp.where(varied(value, group, in_stats), variance, 0.0)
    if score == "variance":
        return variance
    if score == "std":
        return jnp.sqrt(variance)
    raise ValueError(f"score {score!r}: choose std, variance, mean or sum")


def varied(value: Float[Array, " E"], group: Int[Array, " E"], in_stats: Bool[Array, " E"]) -> Bool[Array, " E"]:
    """Groups whose members are not all the same: those with something to learn from (dynamic sampling, DAPO, section 3.2).

    value: of the task, such as solved or not; not a shaped reward, which differs where nothing else does.
    """
    index = jnp.where(in_stats, group, group.shape[0])
    number = group.shape[0] + 1
    largest, smallest = jax.ops.segment_max(value, index, number), jax.ops.segment_min(value, index, number)
    return (largest > smallest)[:-1]


def best(
    score: Float[Array, " G"],
    valid: Bool[Array, " G"],
    *,
    fraction: float | None = None,
    count: int | None = None,
    of: int | None = None,
    order: Order = "largest",
    rounding: Literal["ceil", "floor"] = "ceil",
    at_least: int = 1,
) -> Bool[Array, " G"]:
    """The groups of best score: StarPO-S keeps a quarter by the std of their rewards (https://arxiv.org/abs/2504.20073, section 4.2).

    Args:
        valid: groups to choose from.
        fraction, count: how many, one of the two.
        of: the fraction is of this many groups; of those that are `valid`, if left out.
        rounding: of the fraction. With "floor" and `at_least=0`, a quarter of three groups is none.
        at_least: never fewer, if there are as many.

    Of equal scores the lower number is taken.
    """
    if (fraction is None) == (count is None):
        raise ValueError("give `fraction` or `count`")
    if rounding not in ("ceil", "floor"):
        raise ValueError(f"rounding {rounding!r}: choose ceil or floor")
    dtype = jnp.result_type(float)
    size = jnp.asarray(count or 0, dtype)
    if fraction is not None:
        # 0.07 * 100 is 7.000000000000001: what is off by rounding alone is no reason for one group more or less.
        exact = fraction * jnp.asarray(jnp.sum(valid) if of is None else of, dtype)
        slack = 1e-6 * (1.0 + exact)
        size = jnp.ceil(exact - slack) if rounding == "ceil" else jnp.floor(exact + slack)
    return valid & (_rank(score, valid, order).astype(dtype) < jnp.maximum(size, at_least))


def nucleus(
    score: Float[Array, " G"],
    valid: Bool[Array, " G"],
    *,
    share: float,
    order: Order = "largest",
    weights: Literal["linear", "softmax"] = "linear",
    slack: float = 0.0,
    positive: bool = False,
    at_least: int = 1,
    flat: Literal["all", "none"] = "all",
) -> Bool[Array, " G"]:
    """From the best score on, as many groups as it takes for their scores to add up to `share` of all (VAGEN's variance top-p, RAGEN).

    Args:
        share: 1 or more keeps all that are valid.
        weights: add up the scores, or their softmax (of the negated scores, for "smallest").
        slack: enough is this much less than the share.
        positive: leave out groups without a positive score, however much is missing.
        at_least: never fewer, if there are as many.
        flat: what remains where all scores add up to 0 or less ("linear").

    Of equal scores the lower number is taken.
    """
    if share >= 1:
        return valid
    if weights == "linear":
        weight = jnp.where(valid, score, 0.0)
    elif weights == "softmax":
        weight = jax.nn.softmax(jnp.where(valid, score if order == "largest" else -score, -jnp.inf))
    else:
        raise ValueError(f"weights {weights!r}: choose linear or softmax")
    rank = _rank(score, valid, order)
    descending = jnp.zeros_like(weight).at[rank].set(weight)
    before = (jnp.cumsum(descending) - descending)[rank]
    total = jnp.sum(weight)
    kept = (before < share * total - slack) & ((weight > 0) | (not positive))
    kept |= rank < at_least
    return valid & jnp.where((total <= 0) & (flat == "all"), True, kept)


def near_best(score: Float[Array, " G"], valid: Bool[Array, " G"], *, share: float, order: Order = "largest") -> Bool[Array, " G"]:
    """Groups whose score is at least `share` of the largest, or at most 1 / share of the smallest (RAGEN's min-p)."""
    if order == "largest":
        return valid & (score >= share * jnp.max(jnp.where(valid, score, -jnp.inf)))
    if order == "smallest":
        return valid & (score * share <= jnp.min(jnp.where(valid, score, jnp.inf)))
    raise ValueError(f"order {order!r}: choose largest or smallest")


def kept_share(score: Float[Array, " G"], kept: Bool[Array, " G"], valid: Bool[Array, " G"]) -> Float[Array, ""]:
    """What the kept groups hold of the sum of all scores; 0 where that is 0."""
    total = jnp.sum(jnp.where(valid, score, 0.0))
    return jnp.sum(jnp.where(kept & valid, score, 0.0)) / jnp.where(total == 0, 1.0, total)


def rescaled(x: Float[Array, "*S"], kept: Bool[Array, " G"], valid: Bool[Array, " G"]) -> Float[Array, "*S"]:
    """`x * sqrt(kept groups / all groups)`: advantages, where fewer groups are to make a smaller step (VAGEN)."""
    return x * jnp.sqrt(jnp.sum(kept & valid, dtype=x.dtype) / jnp.maximum(jnp.sum(valid, dtype=x.dtype), 1.0))


def _per_group(x: Float[Array, " E"] | Int[Array, " E"], group: Int[Array, " E"], member: Bool[Array, " E"]) -> Array:
    """Sum over the members of each group, whatever the others hold."""
    zero = jnp.zeros((), x.dtype)
    return jax.ops.segment_sum(jnp.where(member, x, zero), group, group.shape[0])


def _rank(score: Float[Array, " G"], valid: Bool[Array, " G"], order: Order) -> Int[Array, " G"]:
    """Place of each group from the best on, those that are not valid last."""
    if order not in ("largest", "smallest"):
        raise ValueError(f"order {order!r}: choose largest or smallest")
    key = jnp.where(valid, -score if order == "largest" else score, jnp.inf)
    return jnp.argsort(jnp.argsort(key, stable=True), stable=True)
