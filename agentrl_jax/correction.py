"""What is done about tokens that other weights sampled than those being trained. A correction is a pure function:
`Tokens, log-probs before the update, advantages -> Correction`, over the whole batch of a step, once.

    importance   a weight for each token, or none for those too far off: TIS, IcePop, MIS
    opsm, m2po   tokens that leave the loss

The ratio is always log(train / rollout), with the weights before the update as "train": it also holds what is different between the
sampler's arithmetic and the trainer's. Formulas are in `kernels/correction.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.data.batch import Tokens
from agentrl_jax.kernels import correction as kernels
from agentrl_jax.kernels import units
from agentrl_jax.kernels.correction import Level, Mode, Statistic
from agentrl_jax.kernels.policy_loss import masked_log_ratio
from agentrl_jax.kernels.reduce import Denominator

Unit = Literal["segment", "turn"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Correction:
    """weight:  multiplies the policy's part of the loss, 0 where a token is rejected
    counted: tokens that are in the loss and in its denominators; a rejected one may be (weight 0) or not"""

    weight: Float[Array, "B T"]
    counted: Bool[Array, "B T"]


CorrectionFn = Callable[[Tokens, Float[Array, "B T"], Float[Array, "B T"]], Correction]


def importance(
    tokens: Tokens,
    proximal: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    unit: Unit = "segment",
    level: Level = "token",
    mode: Mode = "truncate",
    lower: float | None = None,
    upper: float | None = 2.0,
    normalise: bool = False,
    keep_level: Level | None = None,
    keep_statistic: Statistic = "ratio",
    keep_lower: float | None = None,
    keep_upper: float | None = None,
    veto: float | None = None,
    denominator: Denominator = "original",
) -> Correction:
    """Importance weights (`kernels.correction.importance_weight`), and tokens rejected by a second rule (`kernels.correction.keep`).

    unit, level, mode, lower, upper: what the weight is of, and what becomes of it beyond the bounds
    normalise:   weights are divided by their mean over the tokens
    keep_level, keep_statistic, keep_lower, keep_upper: the second rule; None for none
    veto:        a sequence with a token whose ratio is below this leaves as a whole
    denominator: whether what the second rule and the veto reject still counts ("original") or not ("kept")

    With three tokens of loss -1 of which one is kept, the mean is -1/3 or -1.
    """
    del advantages
    log_ratio, part = _ratio_and_unit(tokens, proximal, unit)
    weight = kernels.importance_weight(log_ratio, tokens.mask, part, level=level, mode=mode, lower=lower, upper=upper)
    kept = tokens.mask
    if keep_level is not None:
        kept &= kernels.keep(log_ratio, kept, part, statistic=keep_statistic, level=keep_level, lower=keep_lower, upper=keep_upper)
    if veto is not None:
        kept &= kernels.keep(log_ratio, tokens.mask, part, level="min", lower=veto)
    weight = kernels.normalised(weight, kept) if normalise else weight
    return _rejected(tokens, kept, weight, denominator)


def opsm(
    tokens: Tokens,
    proximal: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    delta: float,
    unit: Unit = "segment",
    denominator: Denominator = "original",
) -> Correction:
    """Bad sequences that the policy has moved away from teach nothing (`kernels.correction.opsm`, DeepSeek-V3.2)."""
    log_ratio, part = _ratio_and_unit(tokens, proximal, unit)
    kept = tokens.mask & kernels.opsm(log_ratio, advantages, tokens.mask, part, delta=delta)
    return _rejected(tokens, kept, jnp.ones_like(log_ratio), denominator)


def m2po(
    tokens: Tokens,
    proximal: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    threshold: float = 0.04,
    denominator: Denominator = "kept",
) -> Correction:
    """The tokens furthest off leave until the second moment of the log-ratio is small (`kernels.correction.m2po`)."""
    del advantages
    log_ratio, _ = _ratio_and_unit(tokens, proximal, "segment")
    kept = kernels.m2po(log_ratio, tokens.mask, threshold=threshold)
    return _rejected(tokens, kept, jnp.ones_like(log_ratio), denominator)


def _ratio_and_unit(tokens: Tokens, proximal: Float[Array, "B T"], unit: Unit) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    labels = (tokens.segment,) if unit == "segment" else (tokens.segment, tokens.turn)
    return masked_log_ratio(proximal, tokens.logprob, tokens.mask, clamp=None), units.runs(*labels)


def _rejected(tokens: Tokens, kept: Bool[Array, "B T"], weight: Float[Array, "B T"], denominator: Denominator) -> Correction:
    return Correction(jnp.where(kept, weight, 0.0), tokens.mask if denominator == "original" else kept)
