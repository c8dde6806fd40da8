"""Weights and masks for tokens that another policy sampled than the one being trained.

The ratio is always train / rollout, and its log comes from `policy_loss.masked_log_ratio(train, rollout, mask)`, with a stale trainer's
or the current log-probs as "train". A rule has three parts, which combine freely:

    level   of which tokens the ratio is taken together: `over_unit`
    weight  what multiplies the loss:                    `importance_weight` (TIS, IcePop), `normalised`
    keep    which tokens stay in the loss:               `keep`, `within`, `opsm`, `m2po`; `reduce.token_weights(keep=...)` says whether
            what is rejected still counts in the denominator

None lets a gradient through. What a sequence is, `unit` says (`kernels/units.py`): `runs(segment)` for segments, `runs(segment, turn)`
for turns; left out, each row is one.

    TIS     weight min(r, C)              importance_weight(upper=C)                    https://fengyao.notion.site/off-policy-rl
    IcePop  weight r inside, 0 outside    importance_weight(mode="mask", ...)           https://arxiv.org/abs/2510.18855
    MIS     r by sequence, reject outside importance_weight(mode="raw"), keep(level="sum" or "mean")  https://richardli.xyz/rl-collapse-3
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels import kl, ranking, units
from agentrl_jax.kernels.policy_loss import MAX_LOG_RATIO

Level = Literal["token", "sum", "mean", "max", "min"]
Mode = Literal["raw", "truncate", "clamp", "mask"]
Statistic = Literal["ratio", "k2", "k3"]


def over_unit(
    x: Float[Array, "B T"], mask: Bool[Array, "B T"], unit: Int[Array, "B T"] | None = None, *, level: Level = "token"
) -> Float[Array, "B T"]:
    """`x` of each token, or of its unit: sum, mean, largest or smallest over the unit's tokens of `mask`.

    Of log-ratios the sum is the log of the product of the ratios, the mean that of their geometric mean. Every token of a unit carries
    the unit's value, those not in `mask` too; 0 where the unit has no token in it and, at level "token", where not `mask`.
    """
    x = jnp.where(mask, x, 0.0)
    if level == "token":
        return x
    if level == "sum":
        return units.unit_sum(x, unit)
    if level == "mean":
        return units.unit_mean(x, mask, unit)
    if level not in ("max", "min"):
        raise ValueError(f"level {level!r}: choose token, sum, mean, max or min")
    sign = 1.0 if level == "max" else -1.0

    def largest(x: Float[Array, " T"], unit: Int[Array, " T"]) -> Float[Array, " T"]:
        return jax.ops.segment_max(x, unit, x.shape[0])[unit]

    x = jnp.where(mask, sign * x, -jnp.inf)
    found = jnp.broadcast_to(jnp.max(x, axis=1, keepdims=True), x.shape) if unit is None else jax.vmap(largest)(x, unit)
    return jnp.where(jnp.isfinite(found), sign * found, 0.0)


def importance_weight(
    log_ratio: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None = None,
    *,
    level: Level = "token",
    mode: Mode = "truncate",
    lower: float | None = None,
    upper: float | None = None,
    strict: bool = False,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    outside: bool = False,
) -> Float[Array, "B T"]:
    """What to multiply the loss of a token with, because another policy sampled it. No gradient flows through.

    Args:
        log_ratio: log(train / rollout), not clamped (`masked_log_ratio(clamp=None)`) where a sum of it is wanted.
        level: "token" r_t; "sum" the product over the unit (unbiased, varies most); "mean" the geometric mean.
        mode: "raw"      r
              "truncate" min(r, upper): TIS
              "clamp"    r between the bounds, at them beyond
              "mask"     r between the bounds, 0 beyond: IcePop; the double-sided mask of GLM-5 with `strict`
        lower, upper: values of the ratio; None is no bound.
        strict: at the bounds counts as beyond ("mask").
        max_log_ratio: clamp of the log of the ratio, after it has been taken over the unit.
        outside: give the tokens that are not in `mask` their unit's weight (1 at level "token") instead of 0.

    With ratios 3, 1 and 1/4: truncated at 2 [2, 1, .25], masked to [.5, 2] [0, 1, 0], clamped to [.5, 5] [3, 1, .5].
    """
    if level not in ("token", "sum", "mean"):
        raise ValueError(f"level {level!r}: choose token, sum or mean")
    if mode == "truncate" and lower is not None:
        raise ValueError('mode "truncate" has no lower bound: choose clamp')
    of = over_unit(log_ratio, mask, unit, level=level)
    of = of if max_log_ratio is None else jnp.clip(of, -max_log_ratio, max_log_ratio)
    ratio = jnp.exp(of)
    if mode in ("truncate", "clamp"):
        ratio = jnp.clip(ratio, lower, upper)
    elif mode == "mask":
        ratio = jnp.where(_between(ratio, lower, upper, strict=strict), ratio, 0.0)
    elif mode != "raw":
        raise ValueError(f"mode {mode!r}: choose raw, truncate, clamp or mask")
    return jax.lax.stop_gradient(ratio if outside else jnp.where(mask, ratio, 0.0))


def normalised(
    weight: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None = None,
    *,
    over: Literal["token", "unit"] = "token",
) -> Float[Array, "B T"]:
    """`weight` divided by its mean over the batch, so that corrections do not change the size of a step. All 0 stay 0.

    over: the mean counts every token of `mask`, or every unit with a token in it, once ("unit", with the unit's mean weight).
    """
    mean = mean_weight(weight, mask, unit, over=over)
    return weight / jnp.where(mean > 0, mean, 1.0)


def mean_weight(
    weight: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None = None,
    *,
    over: Literal["token", "unit"] = "token",
) -> Float[Array, ""]:
    """What `normalised` divides by; 0 where nothing is in `mask`."""
    counted = mask.astype(weight.dtype)
    if over == "unit":
        size = units.unit_count(mask, unit, weight.dtype)
        counted = counted / jnp.maximum(size, 1.0)
    elif over != "token":
        raise ValueError(f"over {over!r}: choose token or unit")
    return jnp.sum(jnp.where(mask, weight, 0.0) * counted) / jnp.maximum(jnp.sum(counted), 1.0)


def within(
    x: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None = None,
    *,
    level: Level = "token",
    lower: float | None = None,
    upper: float | None = None,
    strict: bool = False,
) -> Bool[Array, "B T"]:
    """Whether `over_unit(x)` is between the bounds. All tokens of a unit are kept or rejected together, except at level "token"."""
    return _between(over_unit(jax.lax.stop_gradient(x), mask, unit, level=level), lower, upper, strict=strict)


def keep(
    log_ratio: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None = None,
    *,
    statistic: Statistic = "ratio",
    level: Level = "token",
    lower: float | None = None,
    upper: float | None = None,
    strict: bool = False,
) -> Bool[Array, "B T"]:
    """Rejection: False where the ratio, or a divergence made of it, is not between the bounds.

    Args:
        log_ratio: log(train / rollout). Whether its tokens are clamped before they are summed is the caller's choice.
        statistic: "ratio" train / rollout, of the token or (level) the product "sum", geometric mean "mean", largest or smallest;
                   "k2" (log r)^2 / 2 and "k3" r - 1 - log r of the tokens, then over the unit.
        lower, upper: values of the ratio, or of the divergence; None is no bound.
        strict: at the bounds is rejected.

    Veto of a sequence with one catastrophic token: `keep(level="min", lower=1e-4)`.
    Where verl's `*_k1` say "lo_hi", their statistic is rollout / train: here lower = 1 / hi and upper = 1 / lo.
    """
    if statistic == "ratio":
        bounds = [None if bound is None else math.log(bound) for bound in (lower, upper)]
        return within(log_ratio, mask, unit, level=level, lower=bounds[0], upper=bounds[1], strict=strict)
    return within(divergence(log_ratio, statistic=statistic), mask, unit, level=level, lower=lower, upper=upper, strict=strict)


def divergence(log_ratio: Float[Array, "*S"], *, statistic: Literal["k1", "k2", "k3"]) -> Float[Array, "*S"]:
    """Estimates of KL(rollout || train) from tokens that the rollout policy sampled; not clamped.

    k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r with r = train / rollout.
    """
    return kl.kl(-log_ratio, estimator=statistic, max_log_ratio=None)


def probability_gap(train: Float[Array, "*S"], rollout: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float[Array, "*S"]:
    """Difference of the probabilities, train - rollout, for `within`; 0 where not `mask`."""
    return jnp.exp(jnp.where(mask, train, 0.0)) - jnp.exp(jnp.where(mask, rollout, 0.0))


def opsm(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None = None,
    *,
    delta: float,
) -> Bool[Array, "B T"]:
    """Off-policy sequence masking (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, Eq. 9): False where A < 0 and the mean over the unit of
    log(rollout / train) exceeds `delta`. Bad samples that the policy has already moved away from teach nothing."""
    return (advantage >= 0) | within(-log_ratio, mask, unit, level="mean", upper=delta)


def m2po(log_ratio: Float[Array, "*S"], mask: Bool[Array, "*S"], *, threshold: float = 0.04) -> Bool[Array, "*S"]:
    """Second-moment trust region (M2PO, https://arxiv.org/abs/2510.01161): rejects the tokens of largest (log r)^2, as few as it takes
    for the mean of the rest to be below `threshold`, but never the last one. False where not `mask`. Of equal values the earlier
    tokens stay.
    """
    return ranking.smallest(jnp.square(jnp.where(mask, log_ratio, 0.0)), mask, mean_below=threshold)


def _between(x: Float[Array, "*S"], lower: float | None, upper: float | None, *, strict: bool) -> Bool[Array, "*S"]:
    inside = jnp.ones(x.shape, bool)
    if lower is not None:
        inside &= x > lower if strict else x >= lower
    if upper is not None:
        inside &= x < upper if strict else x <= upper
    return inside
