"""Causal attention inside first, block by block, with its gradient written out.

The scores of one block of queries stay in the cache of a CPU core and are computed again in the backward pass, so that no
[T, T] array is ever written to memory (FlashAttention's bookkeeping, https://arxiv.org/abs/2205.14135, section 3). Blocks
see only the keys up to their own end. On 2 CPU cores, T = 512 and heads of 32 this is 3 to 4 times faster than the plain form.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

_BLOCK = 128
_HIDDEN = -1e30


@jax.custom_vjp
def causal_attention(
    q: Float[jax.Array, "B T H d"], k: Float[jax.Array, "B T KV d"], v: Float[jax.Array, "B T KV d"], first: Int[jax.Array, "B T"]
) -> Float[jax.Array, "B T H d"]:
    """softmax(q kᵀ) v over the keys `first[t]` .. t of query t; `q` comes scaled.

    Head h of q uses head h // (H / KV) of k and v.
    """
    return _forward(q, k, v, first)[0]


def _forward(q, k, v, first):  # noqa: ANN001, ANN202
    grouped = _by_group(q, _by_head(k)), _by_head(k), _by_head(v), first
    out, log_total = _each_head(_forward_head, *grouped)
    return _by_token(out), (*grouped, out, log_total)


def _backward(saved, d_out):  # noqa: ANN001, ANN202
    d_q, d_k, d_v = _each_head(_backward_head, *saved, _by_group(d_out, saved[1]))
    return _by_token(d_q), d_k.swapaxes(1, 2), d_v.swapaxes(1, 2), None


causal_attention.defvjp(_forward, _backward)


def _by_head(x: Float[jax.Array, "B T KV d"]) -> Float[jax.Array, "B KV T d"]:
    return x.swapaxes(1, 2)


def _by_group(x: Float[jax.Array, "B T H d"], k: Float[jax.Array, "B KV T d"]) -> Float[jax.Array, "B KV G T d"]:
    b, t, _, d = x.shape
    return x.reshape(b, t, k.shape[1], -1, d).transpose(0, 2, 3, 1, 4)


def _by_token(x: Float[jax.Array, "B KV G T d"]) -> Float[jax.Array, "B T H d"]:
    b, kv, g, t, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, kv * g, d)


def _each_head(head: Callable, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    """Key heads one after the other on CPU (the blocks of one fit the cache), all at once elsewhere."""
    b, kv = k.shape[:2]
    heads = jax.tree.map(lambda x: x.reshape(b * kv, *x.shape[2:]), (q, k, v, jnp.repeat(first[:, None], kv, 1), *rest))
    if jax.default_backend() == "cpu":
        out = jax.lax.map(lambda xs: head(*xs), heads)
    else:
        out = jax.vmap(head)(*heads)
    return jax.tree.map(lambda x: x.reshape(b, kv, *x.shape[1:]), out)


def _blocks(first: Int[jax.Array, " T"]) -> Iterator[tuple[slice, slice, jax.Array]]:
    """Query slice, key slice and mask [1, queries, keys] of every block."""
    t = len(first)
    index = jnp.arange(t)
    for start in range(0, t, _BLOCK):
        queries, keys = slice(start, min(start + _BLOCK, t)), slice(0, min(start + _BLOCK, t))
        visible = (index[None, keys] >= first[queries, None]) & (index[None, keys] <= index[queries, None])
        yield queries, keys, visible[None]


def _times(rows: Float[jax.Array, "G n a"], matrix: Float[jax.Array, "a b"]) -> Float[jax.Array, "G n b"]:
    """One plain matmul: the queries of a group are further rows."""
    g, n, a = rows.shape
    return (rows.reshape(g * n, a) @ matrix).reshape(g, n, -1)


def _times_transposed(left: Float[jax.Array, "G n a"], right: Float[jax.Array, "G n b"]) -> Float[jax.Array, "a b"]:
    return left.reshape(-1, left.shape[-1]).T @ right.reshape(-1, right.shape[-1])


def _forward_head(q, k, v, first):  # noqa: ANN001, ANN202
    outs, log_totals = [], []
    for queries, keys, mask in _blocks(first):
        scores = jnp.where(mask, _times(q[:, queries], k[keys].T), _HIDDEN)
        peak = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        outs.append(_times(weights, v[keys]) / total)
        log_totals.append(peak + jnp.log(total))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(log_totals, axis=1)


def _backward_head(q, k, v, first, out, log_total, d_out):  # noqa: ANN001, ANN202
    mean = (out * d_out).sum(axis=-1, keepdims=True)
    d_q, d_k, d_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for queries, keys, mask in _blocks(first):
        scores = jnp.where(mask, _times(q[:, queries], k[keys].T), _HIDDEN)
        weights = jnp.exp(scores - log_total[:, queries])
        d_scores = weights * (_times(d_out[:, queries], v[keys].T) - mean[:, queries])
        d_q.append(_times(d_scores, k[keys]))
        d_k = d_k.at[keys].add(_times_transposed(d_scores, q[:, queries]))
        d_v = d_v.at[keys].add(_times_transposed(weights, d_out[:, queries]))
    return jnp.concatenate(d_q, axis=1), d_k, d_v


def segment_starts(segments: Int[jax.Array, "B T"]) -> Int[jax.Array, "B T"]:
    """Index of the first token of every token's segment; a segment is a run of one number."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def cached_attention(
    q: Float[jax.Array, "B C H d"], k: Float[jax.Array, "B KV S d"], v: Float[jax.Array, "B KV S d"], start: Int[jax.Array, " B"]
) -> Float[jax.Array, "B C H d"]:
    """softmax(q kᵀ) v over the slots 0 .. start + i of query i; `q` comes scaled. Plain batched matmuls, no gradient needed."""
    q = _by_group(q, k)
    b, kv, g, c, d = q.shape
    scores = (q.reshape(b, kv, g * c, d) @ k.swapaxes(2, 3)).reshape(b, kv, g, c, -1)
    visible = jnp.arange(k.shape[2])[None, None] <= (start[:, None] + jnp.arange(c)[None])[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _HIDDEN), axis=-1)
    mixed = weights.reshape(b, kv, g * c, -1) @ v
    return _by_token(mixed.reshape(b, kv, g, c, d))
