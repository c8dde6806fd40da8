"""Losses that single out the few tokens whose log-prob and advantage move together most: those that eat up the entropy.

Clip-Cov and KL-Cov (https://arxiv.org/abs/2505.22617). The selection is an argument of the losses, made by
`most_covariant` or `choose`; it depends on all tokens of the update, so make it once, before any split into micro-batches.
`log_ratio`, `logprob` and `advantage` come as in `kernels/policy_loss.py`, with masked tokens set to 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from agentrl_jax.kernels import ranking
from agentrl_jax.kernels.policy_loss import clipped, ppo_clip


def covariance(logprob: Float[Array, "*S"], advantage: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float[Array, "*S"]:
    """`(log pi - mean) (A - mean)` of every token, means over `mask`; a constant, and 0 where not `mask`."""
    n = jnp.maximum(jnp.sum(mask), 1).astype(logprob.dtype)

    def centred(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
        x = jnp.where(mask, x, 0.0)
        return jnp.where(mask, x - jnp.sum(x) / n, 0.0)

    return jax.lax.stop_gradient(centred(logprob) * centred(advantage))


def share(mask: Bool[Array, "*S"], fraction: float) -> Int[Array, ""]:
    """Number of tokens that `fraction` of those of `mask` is: rounded down, at least 1."""
    n = jnp.sum(mask)
    return jnp.maximum(jnp.floor(n.astype(jnp.result_type(float)) * fraction).astype(n.dtype), 1)


def most_covariant(value: Float[Array, "*S"], mask: Bool[Array, "*S"], count: Int[Array, ""]) -> Bool[Array, "*S"]:
    """The `count` tokens of `mask` with the largest `value`; of equal ones the first in row-major order."""
    return ranking.largest(value, mask, count)


def choose(candidates: Bool[Array, "*S"], count: Int[Array, ""], key: Key[Array, ""] | None = None) -> Bool[Array, "*S"]:
    """`count` of the candidates at random, all of them if there are fewer. Without a key the first in row-major order."""
    if key is None:
        return ranking.first(candidates, count)
    return most_covariant(jax.random.uniform(key, candidates.shape), candidates, count)


def clip_cov_candidates(
    log_ratio: Float[Array, "*S"],
    logprob: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    mask: Bool[Array, "*S"],
    *,
    lower: float = 1.0,
    upper: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Bool[Array, "*S"]:
    """Tokens that Clip-Cov draws from: covariance strictly between the bounds, and not clipped by PPO anyway."""
    value = covariance(logprob, advantage, mask)
    inside = (value > lower) & (value < upper)
    return mask & inside & ~clipped(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high)


def clip_cov(
    log_ratio: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    dropped: Bool[Array, "*S"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Array, "*S"]:
    """`ppo_clip`, and 0 on the tokens that are `dropped`. They stay in the denominator of a mean.

    Example:
        >>> candidates = clip_cov_candidates(log_ratio, logprob, advantage, mask)  # doctest: +SKIP
        >>> loss = clip_cov(log_ratio, advantage, choose(candidates, share(mask, 2e-4), key))  # doctest: +SKIP
    """
    return jnp.where(dropped, 0.0, ppo_clip(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high))


def kl_cov(
    log_ratio: Float[Array, "*S"], advantage: Float[Array, "*S"], pulled: Bool[Array, "*S"], *, coefficient: float = 1.0
) -> Float[Array, "*S"]:
    """`-A r`, without any clip, plus `coefficient * |log_ratio|` on the tokens that are `pulled` back.

    Example:
        >>> top = most_covariant(covariance(logprob, advantage, mask), mask, share(mask, 2e-4))  # doctest: +SKIP
        >>> loss = kl_cov(log_ratio, advantage, top)  # doctest: +SKIP
    """
    absolute = jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio  # the gradient of jnp.abs is 1 at 0, where on policy all tokens are
    penalty = jnp.where(pulled, coefficient * absolute, 0.0)
    return penalty - advantage * jnp.exp(log_ratio)
