"""Log-prob and entropy of given tokens without the [N, V] logits of all of them at once."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int


def token_logprobs(
    hidden: Float[jax.Array, "N D"],
    unembedding: Float[jax.Array, "V D"],
    targets: Int[jax.Array, " N"],
    temperature: Float[jax.Array, " N"],
    *,
    chunk: int,
) -> tuple[Float[jax.Array, " N"], Float[jax.Array, " N"]]:
    """log softmax(hidden Wᵀ / temperature)[target] and the entropy of that softmax, both in nats.

    Logits exist for `chunk` tokens at a time and are computed again in the backward pass, so the peak is chunk * V floats
    instead of N * V; with one chunk nothing is recomputed.

    targets:     -1 means nothing to predict: both results are 0 and no gradient flows, whatever `hidden` holds there
    temperature: 0 is greedy decoding, whose log-probs are recorded at temperature 1
    """
    n = len(targets)
    one = partial(_chunk_logprobs, unembedding=unembedding)
    if n <= chunk:
        return one((hidden, targets, temperature))
    padding = -n % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding), constant_values=-1)
    temperature = jnp.pad(temperature, (0, padding))
    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (hidden, targets, temperature))
    logprob, entropy = jax.lax.map(jax.checkpoint(one), chunks)
    return logprob.ravel()[:n], entropy.ravel()[:n]


def _chunk_logprobs(
    tokens: tuple[Float[jax.Array, "C D"], Int[jax.Array, " C"], Float[jax.Array, " C"]], unembedding: Float[jax.Array, "V D"]
) -> tuple[Float[jax.Array, " C"], Float[jax.Array, " C"]]:
    hidden, targets, temperature = tokens
    valid = targets >= 0
    hidden = jnp.where(valid[:, None], hidden, 0)
    logits = hidden @ unembedding.T / jnp.where(valid & (temperature > 0), temperature, 1)[:, None]
    # A comparison instead of a gather: its gradient is elementwise, that of a gather is a scatter.
    is_target = targets[:, None] == jnp.arange(logits.shape[1])[None]
    logits = logits - jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    unnormalised = jnp.exp(logits)
    total = unnormalised.sum(axis=1)
    log_total = jnp.log(total)
    logprob = jnp.where(is_target, logits, 0).sum(axis=1) - log_total
    entropy = log_total - (unnormalised * logits).sum(axis=1) / total
    return jnp.where(valid, logprob, 0), jnp.where(valid, entropy, 0)
