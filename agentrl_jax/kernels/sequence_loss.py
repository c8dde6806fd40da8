"""Policy losses whose ratio belongs to a whole sequence, still one value per token, to be minimised.

A sequence is the tokens of one `unit` (`kernels/units.py`): a segment, a turn, or (None) a row. Every token carries the value of its
sequence, so that a mean over its tokens, then over sequences, is the papers' mean over sequences.
`log_ratio`, `logprob` and `advantage` come as in `kernels/policy_loss.py`, with masked tokens set to 0.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.policy_loss import MAX_LOG_RATIO, ppo_clip, reinforce
from agentrl_jax.kernels.units import unit_mean, unit_sum

Form = Literal["sequence", "token"]


def sequence_log_ratio(
    log_ratio: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None,
    *,
    average: bool = True,
    form: Form = "sequence",
    clamp: tuple[float, float] | None = None,
) -> Float[Array, "B T"]:
    """Log-ratio of each token's sequence, over its tokens of `mask`; all its tokens carry it.

    Args:
        average: mean of the tokens' log-ratios (the geometric mean of the ratios: GSPO) or their sum (the product: the true ratio of
            the sequence).
        form: "sequence": the gradient goes to every token of the sequence. "token": the value is the sequence's, the gradient goes to
            the token alone (GSPO-token, https://arxiv.org/abs/2507.18071, section 4.3). Under a mean over the tokens of the
            sequence the two have the same gradient if the advantage is the same on all of them.
        clamp: bounds of the result; beyond them no gradient.
    """
    of = unit_mean(log_ratio, mask, unit) if average else unit_sum(jnp.where(mask, log_ratio, 0.0), unit)
    if form == "token":
        of = jax.lax.stop_gradient(of) + (log_ratio - jax.lax.stop_gradient(log_ratio))
    elif form != "sequence":
        raise ValueError(f"form {form!r}: choose sequence or token")
    return of if clamp is None else jnp.clip(of, *clamp)


def geometric_mean(
    weight: Float[Array, "B T"], mask: Bool[Array, "B T"], unit: Int[Array, "B T"] | None, *, eps: float = 1e-10
) -> Float[Array, "B T"]:
    """One weight for each sequence out of its tokens' weights: `exp(mean_t log(w_t + eps))`."""
    return jnp.exp(unit_mean(jnp.log(jnp.where(mask, weight, 1.0) + eps), mask, unit))


def gspo(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    form: Form = "sequence",
    clamp: tuple[float, float] | None = (-MAX_LOG_RATIO, MAX_LOG_RATIO),
) -> Float[Array, "B T"]:
    """`max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))`, s the geometric mean of the sequence's ratios (GSPO,
    https://arxiv.org/abs/2507.18071, section 4.1; `form` and `clamp` as in `sequence_log_ratio`).

    Reduced by a mean over tokens, then over sequences, it is the paper's; reduced by a *sum* over tokens, then a mean over
    sequences, it is LUSPO's, which multiplies by the length. The default clip range is the paper's; frameworks default to 0.2.
    """
    of = sequence_log_ratio(log_ratio, mask, unit, form=form, clamp=clamp)
    return ppo_clip(of, advantage, clip_low=clip_low, clip_high=clip_high)


def gmpo_clipped(
    log_ratio: Float[Array, "B T"], advantage: Float[Array, "B T"], *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Bool[Array, "B T"]:
    """Where `gmpo` passes no gradient to the token."""
    return ((log_ratio > clip_high) & (advantage > 0)) | ((log_ratio < -clip_low) & (advantage < 0))


def gmpo(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Float[Array, "B T"]:
    """`-A exp(mean_t x_t)`, x the token's log-ratio clipped on one side: at most `clip_high` where A > 0, at least `-clip_low` where
    A < 0, 0 where A = 0 (GMPO, https://arxiv.org/abs/2507.20673).

    The bounds are log-ratios. A is the mean of the sequence's advantages.
    """
    upper, lower = jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low)
    x = jnp.where(advantage > 0, upper, jnp.where(advantage < 0, lower, 0.0))
    return -unit_mean(advantage, mask, unit) * jnp.exp(unit_mean(x, mask, unit))


def vespo(
    logprob: Float[Array, "B T"],
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None,
    *,
    weight: Float[Array, "B T"] | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    min_weight: float = 1e-8,
) -> Float[Array, "B T"]:
    """`-sg(phi(w)) A log pi` with `phi(w) = w^k exp(lambda (1 - w))` and w the product of the sequence's ratios (VESPO,
    https://arxiv.org/abs/2602.10693; `vespo_weight`). k and lambda depend on the sign of A, which is positive at 0.

    weight: importance weights of the tokens from outside (`kernels/correction.py`). They are taken into the product, where other
            losses are multiplied by them: `log_ratio` is then log(train / old) and the weight old / rollout.
    """
    phi = vespo_weight(
        log_ratio,
        advantage,
        mask,
        unit,
        weight=weight,
        k_positive=k_positive,
        lambda_positive=lambda_positive,
        k_negative=k_negative,
        lambda_negative=lambda_negative,
        min_weight=min_weight,
    )
    return reinforce(logprob, advantage, weight=phi)


def vespo_weight(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    unit: Int[Array, "B T"] | None,
    *,
    weight: Float[Array, "B T"] | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    min_weight: float = 1e-8,
) -> Float[Array, "B T"]:
    """`phi(w)` of `vespo`: 1 at w = 1, and bounded, since w^k falls towards 0 and exp(-lambda w) towards infinity."""
    bounds = (math.log(min_weight), MAX_LOG_RATIO)
    if weight is not None:
        log_ratio = log_ratio + jnp.clip(jnp.log(jnp.where(mask, jax.lax.stop_gradient(weight), 1.0)), *bounds)
    log_w = sequence_log_ratio(log_ratio, mask, unit, average=False, clamp=bounds)
    positive = advantage >= 0
    k = jnp.where(positive, jnp.asarray(k_positive, log_w.dtype), k_negative)
    rate = jnp.where(positive, jnp.asarray(lambda_positive, log_w.dtype), lambda_negative)
    return jnp.exp(k * log_w + rate * (1.0 - jnp.exp(log_w)))
