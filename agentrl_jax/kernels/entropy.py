"""Entropy, log-prob and collision probability of a softmax whose logits all fit in memory; tokens of high entropy.

For small vocabularies, heads over few actions, and tests. A language model's loss takes `kernels/logprob.py`, which never holds the
logits of all tokens. A logit of -inf forbids a token: it adds 0 to the entropy, not the NaN of `0 * -inf`, and has gradient 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def log_softmax(logits: Float[Array, "*S V"], *, temperature: float = 1.0) -> Float[Array, "*S V"]:
    """`logits / temperature - logsumexp(logits / temperature)`; -inf where the logit is, with gradient 0 there."""
    allowed = ~jnp.isneginf(logits)
    scaled = jnp.where(allowed, logits, 0.0) / temperature
    scaled = scaled - jax.lax.stop_gradient(jnp.max(jnp.where(allowed, scaled, -jnp.inf), axis=-1, keepdims=True))
    total = jnp.sum(jnp.where(allowed, jnp.exp(jnp.where(allowed, scaled, 0.0)), 0.0), axis=-1, keepdims=True)
    return jnp.where(allowed, scaled - jnp.log(total), -jnp.inf)


def entropy(logits: Float[Array, "*S V"], *, temperature: float = 1.0) -> Float[Array, "*S"]:
    """`H = -sum_v p_v log p_v` in nats. As a bonus it is subtracted from the loss.

    Example:
        >>> entropy(jnp.array([1.0, 2.0, 3.0]))  # doctest: +SKIP
        Array(0.8323956)
    """
    logp = log_softmax(logits, temperature=temperature)
    safe = jnp.where(jnp.isneginf(logp), 0.0, logp)
    return -jnp.sum(jnp.where(jnp.isneginf(logp), 0.0, jnp.exp(safe)) * safe, axis=-1)


def log_prob(logits: Float[Array, "*S V"], token: Int[Array, "*S"], *, temperature: float = 1.0) -> Float[Array, "*S"]:
    """Log-prob of one token of each position under softmax(logits / temperature); -inf for a forbidden one."""
    logp = log_softmax(logits, temperature=temperature)
    return jnp.take_along_axis(logp, token[..., None], axis=-1)[..., 0]


def collision(logits: Float[Array, "*S V"], *, temperature: float = 1.0) -> Float[Array, "*S"]:
    """`sum_v p_v^2`, the chance that two samples agree: 1 for a sure choice, 1 / V for a uniform one."""
    logp = log_softmax(logits, temperature=temperature)
    safe = jnp.where(jnp.isneginf(logp), 0.0, logp)
    return jnp.sum(jnp.where(jnp.isneginf(logp), 0.0, jnp.exp(2.0 * safe)), axis=-1)


def highest(entropy: Float[Array, "*S"], mask: Bool[Array, "*S"], *, share: float) -> Bool[Array, "*S"]:
    """The `share` of the tokens of `mask` with the highest entropy: those at or above the quantile `1 - share` of all of them.

    Training on the forking tokens only (https://arxiv.org/abs/2506.01939, Eq. 5, with share 0.2): the policy's term counts there alone,
    its denominator as before. No gradient flows through. At least one token where `mask` has any, and all that tie with the lowest chosen.
    """
    x = jnp.where(mask, jax.lax.stop_gradient(entropy), jnp.inf)
    position = (1.0 - share) * jnp.maximum(jnp.sum(mask, dtype=x.dtype) - 1.0, 0.0)
    # A position that is whole but for rounding must not be rounded up.
    rank = jnp.ceil(position * (1.0 - 8 * jnp.finfo(x.dtype).eps)).astype(jnp.int32)
    return mask & (x >= jnp.sort(x.ravel())[rank])
