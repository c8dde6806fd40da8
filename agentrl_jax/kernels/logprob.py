"""Log-prob and entropy of given tokens without the [N, V] logits of all of them at once.

Small vocabularies go token by token: chunks of tokens, each with all its logits. Large ones go through the vocabulary instead, a part
of it for all tokens at a time: every row of the unembedding's gradient is then written once, not added to by each chunk of tokens,
which is what token chunks spend their time on. The sums are FlashAttention's (https://arxiv.org/abs/2205.14135, section 3.1): a running
maximum, and what was summed under the old one rescaled. On CPUs the tokens of a part go in chunks too: logits that stay in the cache
cost half the time of logits in memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

_CPU_TOKENS, _CPU_WORDS = 512, 2048  # 4 MiB of logits

_Results: TypeAlias = tuple[Float[jax.Array, " N"], Float[jax.Array, " N"]]
_Tokens: TypeAlias = tuple[Float[jax.Array, "C D"], Int[jax.Array, " C"], Float[jax.Array, " C"]]
_Chunked: TypeAlias = tuple[Float[jax.Array, "K C"], Float[jax.Array, "K C"]]
_Sums: TypeAlias = tuple[jax.Array, ...]
_Add: TypeAlias = Callable[[_Sums, Int[jax.Array, ""], Float[jax.Array, "S D"]], _Sums]


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

    Logits exist for `chunk` tokens at a time where V <= `vocabulary`, else for at most `vocabulary` entries of all tokens, and are
    computed again in the backward pass; with one chunk nothing is recomputed. Matmuls are in the type of `hidden` and add up in f32;
    the gradient of `unembedding` has its own type, so that one in f32 loses nothing to a bfloat16 `hidden`.

    targets:     -1 means nothing to predict: both results are 0 and no gradient flows, whatever `hidden` holds there
    temperature: 0 is greedy decoding, whose log-probs are recorded at temperature 1; no gradient flows to it
    """
    valid = targets >= 0
    hidden = jnp.where(valid[:, None], hidden, jnp.zeros((), hidden.dtype))
    inverse = jax.lax.stop_gradient(1 / jnp.where(valid & (temperature > 0), temperature, 1))
    if len(unembedding) > vocabulary:
        logprob, entropy = _by_vocabulary(vocabulary, hidden, unembedding, targets, inverse)
    else:
        logprob, entropy = _by_tokens(chunk, hidden, unembedding, targets, inverse)
    return jnp.where(valid, logprob, 0), jnp.where(valid, entropy, 0)


def _chunks(size: int, *tokens: Shaped[jax.Array, "N ..."]) -> tuple[Shaped[jax.Array, "K C ..."], ...]:
    padding = -len(tokens[0]) % size
    padded = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in tokens)
    return tuple(x.reshape(-1, size, *x.shape[1:]) for x in padded)


def _products(hidden: Float[jax.Array, "C D"], rows: Float[jax.Array, "S D"]) -> Float[jax.Array, "C S"]:
    return jnp.matmul(hidden, rows.astype(hidden.dtype).T, preferred_element_type=jnp.float32)


def _by_tokens(chunk: int, hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, inverse: jax.Array) -> _Results:
    n = len(targets)
    one = partial(_all_logits, unembedding=unembedding)
    if n <= chunk:
        return one((hidden, targets, inverse))
    logprob, entropy = jax.lax.map(jax.checkpoint(one), _chunks(chunk, hidden, targets, inverse))
    return logprob.ravel()[:n], entropy.ravel()[:n]


def _all_logits(tokens: _Tokens, unembedding: Float[jax.Array, "V D"]) -> tuple[Float[jax.Array, " C"], Float[jax.Array, " C"]]:
    hidden, targets, inverse = tokens
    logits = _products(hidden, unembedding) * inverse[:, None]
    # A comparison instead of a gather: its gradient is elementwise, that of a gather is a scatter.
    is_target = targets[:, None] == jnp.arange(logits.shape[1])[None]
    logits = logits - jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    unnormalised = jnp.exp(logits)
    total = unnormalised.sum(axis=1)
    log_total = jnp.log(total)
    logprob = jnp.where(is_target, logits, 0).sum(axis=1) - log_total
    entropy = log_total - (unnormalised * logits).sum(axis=1) / total
    return logprob, entropy


def _by_vocabulary(size: int, hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, inverse: jax.Array) -> _Results:
    n = chunk = len(targets)
    if jax.default_backend() == "cpu":
        size, chunk = min(size, _CPU_WORDS), -(-n // -(-n // _CPU_TOKENS))
    found: Any = _in_parts(size, unembedding, *_chunks(chunk, hidden, targets, inverse))
    logprob, entropy = found
    return logprob.ravel()[:n], entropy.ravel()[:n]


def _each_part(size: int, unembedding: Float[jax.Array, "V D"], add: _Add, sums: _Sums) -> _Sums:
    """`add` one part of `unembedding` after the other, given the index of its first row. What is left over is a smaller part."""

    def part(sums: _Sums, first: Int[jax.Array, ""]) -> tuple[_Sums, None]:
        return add(sums, first, jax.lax.dynamic_slice_in_dim(unembedding, first, size)), None

    whole = len(unembedding) // size * size
    sums, _ = jax.lax.scan(part, sums, jnp.arange(0, whole, size))
    return add(sums, jnp.asarray(whole), unembedding[whole:]) if whole < len(unembedding) else sums


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(size: int, unembedding: jax.Array, hidden: jax.Array, targets: jax.Array, inverse: jax.Array) -> _Chunked:
    """Logits for `size` rows of the unembedding and one of the K chunks of C tokens at a time."""
    return _forward(size, unembedding, hidden, targets, inverse)[0]


def _forward(
    size: int, unembedding: jax.Array, hidden: jax.Array, targets: jax.Array, inverse: jax.Array
) -> tuple[_Chunked, tuple[jax.Array, ...]]:
    def add(sums: _Sums, first: jax.Array, rows: jax.Array) -> _Sums:
        def one(chunk: tuple[_Sums, jax.Array, jax.Array, jax.Array]) -> _Sums:
            (peak, total, weighted, chosen), hidden, targets, inverse = chunk
            products = _products(hidden, rows)
            new = jnp.maximum(peak, products.max(axis=1) * inverse)
            shifted = products * inverse[:, None] - new[:, None]
            unnormalised = jnp.exp(shifted)
            shift = peak - new
            weighted = (weighted + total * shift) * jnp.exp(shift) + (unnormalised * shifted).sum(axis=1)
            total = total * jnp.exp(shift) + unnormalised.sum(axis=1)
            at = targets - first
            found = jnp.take_along_axis(products, jnp.clip(at, 0, len(rows) - 1)[:, None], axis=1)[:, 0] * inverse
            return new, total, weighted, jnp.where((at >= 0) & (at < len(rows)), found, chosen)

        return jax.lax.map(one, (sums, hidden, targets, inverse))

    # Finite, as 0 * -inf is not 0.
    nothing = (jnp.full(targets.shape, -1e30), *(jnp.zeros(targets.shape) for _ in range(3)))
    peak, total, weighted, chosen = _each_part(size, unembedding, add, nothing)
    log_total = peak + jnp.log(total)
    entropy = jnp.log(total) - weighted / total
    return (chosen - log_total, entropy), (unembedding, hidden, targets, inverse, log_total, entropy)


def _backward(size: int, saved: tuple[jax.Array, ...], d_results: _Chunked) -> tuple[jax.Array, jax.Array, None, None]:
    """d logprob / d logits = onehot - p, d entropy / d logits = -p (log p + entropy)."""
    unembedding, hidden, targets, inverse, log_total, entropy = saved
    d_logprob, d_entropy = (d * inverse for d in d_results)
    # Barriers make the small factor and the small result the ones that are turned; XLA would turn `d_products`, twice the time on CPUs.
    columns = jax.lax.optimization_barrier(hidden.swapaxes(1, 2))
    chunks = hidden, columns, targets, inverse, log_total, d_logprob, d_logprob + d_entropy * entropy, d_entropy

    def add(sums: _Sums, first: jax.Array, rows: jax.Array) -> _Sums:
        def one(d_rows: jax.Array, chunk: tuple[jax.Array, tuple[jax.Array, ...]]) -> tuple[jax.Array, jax.Array]:
            d_hidden, (hidden, columns, targets, *factors) = chunk
            inverse, log_total, of_target, of_p, of_p_logp = (x[:, None] for x in factors)
            logprobs = _products(hidden, rows) * inverse - log_total
            is_target = (targets - first)[:, None] == jnp.arange(len(rows))[None]
            d_products = jnp.where(is_target, of_target, 0) - jnp.exp(logprobs) * (of_p + of_p_logp * logprobs)
            d_products = d_products.astype(hidden.dtype)
            d_hidden += jnp.matmul(d_products, rows.astype(hidden.dtype), preferred_element_type=jnp.float32)
            return d_rows + jnp.matmul(columns, d_products, preferred_element_type=jnp.float32), d_hidden

        d_unembedding, d_hidden = sums
        d_rows, d_hidden = jax.lax.scan(one, jnp.zeros(rows.T.shape), (d_hidden, chunks))
        d_rows = jax.lax.optimization_barrier(d_rows).T.astype(unembedding.dtype)
        return jax.lax.dynamic_update_slice_in_dim(d_unembedding, d_rows, first, 0), d_hidden

    nothing = jnp.zeros_like(unembedding), jnp.zeros(hidden.shape)
    d_unembedding, d_hidden = _each_part(size, unembedding, add, nothing)
    return d_unembedding, d_hidden.astype(hidden.dtype), None, None


_in_parts.defvjp(_forward, _backward)
