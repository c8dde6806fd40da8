"""Numbers for people: what the tokens of an update look like, sliced, and alarms.

`summary` over a mask is all of it; with `part` it gives one number for each slice, in one pass and without a loop:

    lag = policy_lag(tokens.version, now)
    of_lag = summary(log_ratio, tokens.mask, part=bucket(lag, (1, 2, 4)), parts=4)     # lag 0 | 1 | 2-3 | 4 and more
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels import units
from agentrl_jax.kernels.whiten import Divisor


class Summary(NamedTuple):
    """Of the entries under a mask, as a whole or of each part; 0 where there are none."""

    number: Float[Array, "*P"]
    total: Float[Array, "*P"]
    mean: Float[Array, "*P"]
    std: Float[Array, "*P"]
    minimum: Float[Array, "*P"]
    maximum: Float[Array, "*P"]


def summary(
    x: Float[Array, "*S"] | Bool[Array, "*S"],
    mask: Bool[Array, "*S"],
    *,
    part: Int[Array, "*S"] | None = None,
    parts: int = 1,
    divisor: Divisor = "population",
    lower: float | None = None,
    upper: float | None = None,
) -> Summary:
    """Number, sum, mean, std, smallest and largest of `x` over `mask`. What is not in the mask may hold anything.

    Args:
        x: numbers, or conditions, whose mean is a fraction.
        part: which slice each entry is in, in [0, parts); the results then have shape [parts]. Left out, they are scalars.
        divisor: of the variance: n, or n - 1 ("sample"; the std of fewer than two is 0).
        lower, upper: clamp `x` first, for statistics that one outlier must not make.
    """
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float)
    value = jnp.where(mask, x, False if x.dtype == bool else 0.0).astype(dtype).ravel()
    if lower is not None or upper is not None:
        value = jnp.clip(value, lower, upper)
    inside = mask.ravel()
    index = jnp.where(inside, 0 if part is None else part.ravel(), parts)

    def over_parts(x: Float[Array, " N"]) -> Float[Array, " P"]:
        return jax.ops.segment_sum(x, index, parts + 1)

    count = over_parts(jnp.ones_like(value))
    total = over_parts(jnp.where(inside, value, 0.0))
    mean = total / jnp.maximum(count, 1.0)
    squares = over_parts(jnp.square(value - mean[index]))
    variance = squares / jnp.maximum(count - (1.0 if divisor == "sample" else 0.0), 1.0)
    minimum = jax.ops.segment_min(value, index, parts + 1)
    maximum = jax.ops.segment_max(value, index, parts + 1)
    std = jnp.where(minimum == maximum, 0.0, jnp.sqrt(variance))
    there = count > 0
    found = (count, total, mean, std, jnp.where(there, minimum, 0.0), jnp.where(there, maximum, 0.0))
    return Summary(*(each[0] if part is None else each[:parts] for each in found))


def effective_sample_size(weight: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float[Array, ""]:
    """`(sum w)^2 / (n sum w^2)` in [0, 1]: the share of the samples that the weights leave. 0 where all weights are 0 (Kong 1992)."""
    w = jnp.where(mask, weight, 0.0)
    w = w / jnp.maximum(jnp.max(w, initial=0.0), jnp.finfo(w.dtype).tiny)
    squares = jnp.sum(jnp.square(w))
    n = jnp.sum(mask, dtype=w.dtype)
    return jnp.square(jnp.sum(w)) / jnp.where(squares > 0, n * squares, 1.0)


def explained_variance(value: Float[Array, "*S"], target: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float[Array, ""]:
    """`1 - Var(R - V) / Var(R)` over `mask`: how much of the returns R a critic's values V foresaw. 1 all, 0 no more than a constant,
    below 0 less than that; 0 where all returns are the same. (OpenAI baselines, common/math_util.py; a constant error does not count.)

    Example:
        >>> explained_variance(jnp.array([0.0, 2.0]), jnp.array([0.0, 4.0]), jnp.array([True, True]))  # doctest: +SKIP
        Array(0.75)
    """
    spread = summary(target, mask).std
    left = summary(jnp.where(mask, target - value, 0.0), mask).std
    return jnp.where(spread > 0, 1.0 - jnp.square(left / jnp.where(spread > 0, spread, 1.0)), 0.0)


def fractions_outside(
    x: Float[Array, "*S"], mask: Bool[Array, "*S"], *, lower: float | None = None, upper: float | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Fractions of the entries of `mask` that are below `lower` and above `upper`; without a bound 0."""
    nowhere = jnp.zeros(x.shape, bool)
    below = nowhere if lower is None else x < lower
    above = nowhere if upper is None else x > upper
    return summary(below, mask).mean, summary(above, mask).mean


def perplexity(logprob: Float[Array, "B T"], mask: Bool[Array, "B T"], unit: Int[Array, "B T"] | None = None) -> Float[Array, "B T"]:
    """`exp(-mean log-prob)` over the tokens of `mask` of each token's unit (each row, if left out); 1 where there are none.

    Of `-log_ratio` it is the geometric mean of the ratios; of `log_ratio` the perplexity of the trainer over the sampler's.
    """
    return jnp.exp(-units.unit_mean(logprob, mask, unit))


def chi_square(log_ratio: Float[Array, "*S"], *, max_log_ratio: float | None = 20.0) -> Float[Array, "*S"]:
    """`r^2 - 1`, whose mean under the rollout policy is the chi-square divergence of train from rollout: the variance of the weights.

    Of a token's log-ratio, or of a sequence's (`correction.over_unit(level="sum")`).
    """
    bounded = log_ratio if max_log_ratio is None else jnp.clip(log_ratio, -max_log_ratio, max_log_ratio)
    return jnp.expm1(2.0 * bounded)


def bucket(x: Int[Array, "*S"], edges: tuple[int, ...]) -> Int[Array, "*S"]:
    """Number of the slice: 0 below the first edge, then 1, ... from each edge on; `len(edges) + 1` slices."""
    return jnp.searchsorted(jnp.array(edges, x.dtype), x, side="right").astype(jnp.int32)


def policy_lag(version: Int[Array, "*S"], now: Int[Array, ""] | int) -> Int[Array, "*S"]:
    """Updates between the weights that sampled a token and those being trained."""
    return now - version


def episode_length(mask: Bool[Array, "B T"], episode: Int[Array, "B T"], episodes: int) -> Int[Array, "B T"]:
    """Tokens of `mask` in each token's episode, in all its rows."""
    return jax.ops.segment_sum(mask.astype(jnp.int32).ravel(), episode.ravel(), episodes)[episode]


def versions_spanned(version: Int[Array, "B T"], mask: Bool[Array, "B T"], episode: Int[Array, "B T"], episodes: int) -> Int[Array, "B T"]:
    """Newest minus oldest version of the weights that sampled each token's episode, 0 where it has no token in `mask`."""
    index = jnp.where(mask, episode, episodes).ravel()
    newest = jax.ops.segment_max(version.ravel(), index, episodes + 1)
    oldest = jax.ops.segment_min(version.ravel(), index, episodes + 1)
    known = jax.ops.segment_sum(mask.astype(jnp.int32).ravel(), index, episodes + 1) > 0
    return jnp.where(known, newest - oldest, 0)[episode]


def repetition(
    ids: Int[Array, "B T"], mask: Bool[Array, "B T"], unit: Int[Array, "B T"] | None = None, *, n: int = 4
) -> Float[Array, "B T"]:
    """Share of the n-grams of each token's unit that the same unit already had; 0 where it has none.

    An n-gram is n tokens in a row of `mask` and one unit, compared exactly.
    """
    unit = jnp.zeros(ids.shape, jnp.int32) if unit is None else unit
    length = ids.shape[1]
    if length < n:
        return jnp.zeros(ids.shape, jnp.result_type(float))

    def of_row(ids: Int[Array, " T"], mask: Bool[Array, " T"], unit: Int[Array, " T"]) -> Float[Array, " T"]:
        windows = length - n + 1
        grams = [ids[k : k + windows] for k in range(n)]
        starts = unit[:windows]
        whole = jnp.ones(windows, bool)
        for k in range(n):
            whole &= mask[k : k + windows] & (unit[k : k + windows] == starts)
        keys = [*grams, starts, ~whole]
        order = jnp.lexsort(keys)
        same = jnp.ones(windows - 1, bool)
        for key in keys:
            same &= key[order][1:] == key[order][:-1]
        again = jnp.concatenate([jnp.zeros(1, bool), same]) & whole[order]
        dtype = jnp.result_type(float)
        repeated = jax.ops.segment_sum(again.astype(dtype), starts[order], length)
        counted = jax.ops.segment_sum(whole.astype(dtype), starts, length)
        return (repeated / jnp.maximum(counted, 1.0))[unit]

    return jax.vmap(of_row)(ids, mask, unit)


def echo_trap(
    *,
    reward_std: Float[Array, "*S"] | None = None,
    gradient_norm: Float[Array, "*S"] | None = None,
    entropy: Float[Array, "*S"] | None = None,
    repetition: Float[Array, "*S"] | None = None,
    min_reward_std: float | None = None,
    max_gradient_norm: float | None = None,
    min_entropy: float | None = None,
    max_repetition: float | None = None,
) -> dict[str, Bool[Array, "*S"]]:
    """Alarms of a policy that collapses onto one answer (Echo Trap: RAGEN, https://arxiv.org/abs/2504.20073, section 4.1).

    Args:
        reward_std: within groups, averaged over groups; falls first.
        gradient_norm: before clipping; its spikes come last, when there is no way back.
        entropy: of the policy, per token; falls.
        repetition: share of repeated n-grams (`repetition`).
        min_*, max_*: thresholds of the experiment; there are none that hold for all. Below, or above, the alarm rings.

    Only what has a value and a threshold is looked at; each may be a history. "any" is whether one of them rings; a NaN does.
    """
    watched = {
        "reward_std": (reward_std, min_reward_std, 1.0),
        "gradient_norm": (gradient_norm, max_gradient_norm, -1.0),
        "entropy": (entropy, min_entropy, 1.0),
        "repetition": (repetition, max_repetition, -1.0),
    }
    alarms = {
        name: ~(sign * value >= sign * threshold)
        for name, (value, threshold, sign) in watched.items()
        if value is not None and threshold is not None
    }
    if not alarms:
        raise ValueError("nothing to watch: give a value together with its threshold")
    return alarms | {"any": jnp.any(jnp.stack(list(alarms.values())), axis=0)}
