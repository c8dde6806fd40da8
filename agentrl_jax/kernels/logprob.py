"""Log-prob and entropy of given tokens without the [N, V] logits of all of them at once.

Small vocabularies go token by token: chunks of tokens, each with all its logits. Large ones go through the vocabulary instead, all
tokens at a time: every row of the unembedding's gradient is then written once, not added to by each chunk of tokens, which is what
token chunks spend their time on. The sums are FlashAttention's (https://arxiv.org/abs/2205.14135, section 3.1): a running maximum, and
what was summed under the old one rescaled.
"""

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

_Results: TypeAlias = tuple[Float[jax.Array, " N"], Float[jax.Array, " N"]]


def token_logprobs(
    hidden: Float[jax.Array, "N D"],
    unembedding: Float[jax.Array, "V D"],
    targets: Int[jax.Array, " N"],
    temperature: Float[jax.Array, " N"],
    *,
    chunk: int,
    vocabulary: int = 8192,
) -> _Results:
    """log softmax(hidden Wᵀ / temperature)[target] and the entropy of that softmax, both in nats, f32.

    Logits exist for `chunk` tokens at a time where V <= `vocabulary`, else for `vocabulary` entries of all tokens, and are computed
    again in the backward pass; with one chunk nothing is recomputed. Matmuls are in the type of `hidden` and add up in f32; the gradient of
    `unembedding` has its own type, so that one in f32 loses nothing to a bfloat16 `hidden`.

    targets:     -1 means nothing to predict: both results are 0 and no gradient flows, whatever `hidden` holds there
    temperature: 0 is greedy decoding, whose log-probs are recorded at temperature 1; no gradient flows to it
    """
    valid = targets >= 0
    hidden = jnp.where(valid[:, None], hidden, jnp.zeros((), hidden.dtype))
    inverse = jax.lax.stop_gradient(1 / jnp.where(valid & (temperature > 0), temperature, 1))
    if len(unembedding) > vocabulary:
        found: Any = _by_vocabulary(vocabulary, hidden, unembedding, targets, inverse)
    else:
        found = _by_tokens(chunk, hidden, unembedding, targets, inverse)
    logprob, entropy = found
    return jnp.where(valid, logprob, 0), jnp.where(valid, entropy, 0)


def _logits(hidden: Float[jax.Array, "N D"], unembedding: Float[jax.Array, "V D"], inverse: Float[jax.Array, " N"]) -> jax.Array:
    return jnp.matmul(hidden, unembedding.astype(hidden.dtype).T, preferred_element_type=jnp.float32) * inverse[:, None]


def _by_tokens(chunk: int, hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, inverse: jax.Array) -> _Results:
    n = len(targets)
    one = partial(_all_logits, unembedding=unembedding)
    if n <= chunk:
        return one((hidden, targets, inverse))
    padding = -n % chunk
    padded = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (hidden, targets, inverse))
    chunks = tuple(x.reshape(-1, chunk, *x.shape[1:]) for x in padded)
    logprob, entropy = jax.lax.map(jax.checkpoint(one), chunks)
    return logprob.ravel()[:n], entropy.ravel()[:n]


def _all_logits(
    tokens: tuple[Float[jax.Array, "C D"], Int[jax.Array, " C"], Float[jax.Array, " C"]], unembedding: Float[jax.Array, "V D"]
) -> tuple[Float[jax.Array, " C"], Float[jax.Array, " C"]]:
    hidden, targets, inverse = tokens
    logits = _logits(hidden, unembedding, inverse)
    # A comparison instead of a gather: its gradient is elementwise, that of a gather is a scatter.
    is_target = targets[:, None] == jnp.arange(logits.shape[1])[None]
    logits = logits - jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    unnormalised = jnp.exp(logits)
    total = unnormalised.sum(axis=1)
    log_total = jnp.log(total)
    logprob = jnp.where(is_target, logits, 0).sum(axis=1) - log_total
    entropy = log_total - (unnormalised * logits).sum(axis=1) / total
    return logprob, entropy


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_vocabulary(size: int, hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, inverse: jax.Array) -> _Results:
    return _forward(size, hidden, unembedding, targets, inverse)[0]


def _part(
    first: Int[jax.Array, ""], size: int, unembedding: Float[jax.Array, "V D"]
) -> tuple[Int[jax.Array, ""], Float[jax.Array, "S D"], Bool[jax.Array, "1 S"]]:
    """Where the rows `first` .. first + size - 1 are read, those rows, and which count.

    The last part begins early where V is no multiple of `size`, and what the part before it had does not count twice.
    """
    start = jnp.minimum(first, len(unembedding) - size)
    rows = jax.lax.dynamic_slice_in_dim(unembedding, start, size)
    return start, rows, (start + jnp.arange(size) >= first)[None]


def _forward(
    size: int, hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, inverse: jax.Array
) -> tuple[_Results, tuple[jax.Array, ...]]:
    n = len(targets)

    def add(sums: tuple[jax.Array, ...], first: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        peak, total, weighted, chosen = sums
        start, rows, counts = _part(first, size, unembedding)
        logits = _logits(hidden, rows, inverse)
        new = jnp.maximum(peak, jnp.where(counts, logits, -jnp.inf).max(axis=1))
        shifted = logits - new[:, None]
        unnormalised = jnp.where(counts, jnp.exp(shifted), 0)
        shift = peak - new
        weighted = (weighted + total * shift) * jnp.exp(shift) + jnp.where(counts, unnormalised * shifted, 0).sum(axis=1)
        total = total * jnp.exp(shift) + unnormalised.sum(axis=1)
        at = targets - start
        found = jnp.take_along_axis(logits, jnp.clip(at, 0, size - 1)[:, None], axis=1)[:, 0]
        return (new, total, weighted, jnp.where((at >= 0) & (at < size), found, chosen)), None

    # Finite, as 0 * -inf is not 0.
    zeros = (jnp.full(n, -1e30), jnp.zeros(n), jnp.zeros(n), jnp.zeros(n))
    (peak, total, weighted, chosen), _ = jax.lax.scan(add, zeros, jnp.arange(0, len(unembedding), size))
    log_total = peak + jnp.log(total)
    entropy = jnp.log(total) - weighted / total
    return (chosen - log_total, entropy), (hidden, unembedding, targets, inverse, log_total, entropy)


def _backward(size: int, saved: tuple[jax.Array, ...], d_results: _Results) -> tuple[jax.Array, jax.Array, None, None]:
    """d logprob / d logits = onehot - p, d entropy / d logits = -p (log p + entropy)."""
    hidden, unembedding, targets, inverse, log_total, entropy = saved
    d_logprob, d_entropy = (d[:, None] for d in d_results)
    # Barriers make the small factor and the small result the ones that are turned; XLA would turn `d_logits`, twice the time on CPUs.
    columns = jax.lax.optimization_barrier(hidden.T)

    def add(sums: tuple[jax.Array, jax.Array], first: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        d_hidden, d_unembedding = sums
        start, rows, counts = _part(first, size, unembedding)
        logprobs = _logits(hidden, rows, inverse) - log_total[:, None]
        is_target = (targets - start)[:, None] == jnp.arange(size)[None]
        d_logits = jnp.where(is_target, d_logprob, 0) - jnp.exp(logprobs) * (d_logprob + d_entropy * (logprobs + entropy[:, None]))
        d_logits = jnp.where(counts, d_logits * inverse[:, None], 0).astype(hidden.dtype)
        d_hidden = d_hidden + jnp.matmul(d_logits, rows.astype(hidden.dtype), preferred_element_type=jnp.float32)
        d_rows = jax.lax.optimization_barrier(jnp.matmul(columns, d_logits, preferred_element_type=unembedding.dtype)).T
        d_rows = jax.lax.dynamic_slice_in_dim(d_unembedding, start, size) + d_rows
        return (d_hidden, jax.lax.dynamic_update_slice_in_dim(d_unembedding, d_rows, start, 0)), None

    zeros = jnp.zeros(hidden.shape), jnp.zeros_like(unembedding)
    (d_hidden, d_unembedding), _ = jax.lax.scan(add, zeros, jnp.arange(0, len(unembedding), size))
    return d_hidden.astype(hidden.dtype), d_unembedding, None, None


_by_vocabulary.defvjp(_forward, _backward)
