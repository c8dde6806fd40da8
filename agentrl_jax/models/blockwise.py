"""Causal attention inside segments, block by block, with its gradient written out: the form for CPUs, and for any device.

The scores of one block of queries stay in the cache of a CPU core and are computed again in the backward pass, so that no
[T, T] array is ever written to memory (FlashAttention's bookkeeping, https://arxiv.org/abs/2205.14135, section 3). Blocks
see only the keys up to their own end. Scores, softmax and sums are f32, matmuls in the type of the inputs. Two CPU cores,
T = 512, heads of 32: a quarter of the time of the plain form.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

_BLOCK = 128
_HIDDEN = -1e30

# One key head of one row, with the G query heads that use it.
_Queries: TypeAlias = Float[jax.Array, "G T d"]
_Keys: TypeAlias = Float[jax.Array, "T d"]
_First: TypeAlias = Int[jax.Array, " T"]
_PerQuery: TypeAlias = Float[jax.Array, "G T 1"]


def segment_starts(segments: Int[jax.Array, "B T"]) -> Int[jax.Array, "B T"]:
    """Index of the first token of every token's segment; a segment is a run of one number.

    >>> segment_starts(jnp.array([[1, 1, 2, 2, 2, 0]]))
    Array([[0, 0, 2, 2, 2, 5]], dtype=int32)
    """
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


@jax.custom_vjp
def blockwise_attention(
    q: Float[jax.Array, "B T H d"], k: Float[jax.Array, "B T KV d"], v: Float[jax.Array, "B T KV d"], first: Int[jax.Array, "B T"]
) -> Float[jax.Array, "B T H d"]:
    """softmax(q kᵀ) v over the keys `first[t]` .. t of query t; `q` comes scaled.

    Head h of q uses head h // (H / KV) of k and v.
    """
    return _forward(q, k, v, first)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    inputs = by_group(q, k), k, v, jnp.repeat(first[:, None], k.shape[1], axis=1)
    out, log_total = _each_head(_forward_head, *inputs)
    return by_token(out), (*inputs, out, log_total)


def _backward(saved: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    d_q, d_k, d_v = _each_head(_backward_head, *saved, by_group(d_out, saved[1]))
    return by_token(d_q), d_k.swapaxes(1, 2), d_v.swapaxes(1, 2), None


blockwise_attention.defvjp(_forward, _backward)


def by_group(x: Float[jax.Array, "B T H d"], k: Float[jax.Array, "B KV S d"]) -> Float[jax.Array, "B KV G T d"]:
    """Heads of x beside the key head that they use."""
    b, t, _, d = x.shape
    return x.reshape(b, t, k.shape[1], -1, d).transpose(0, 2, 3, 1, 4)


def by_token(x: Float[jax.Array, "B KV G T d"]) -> Float[jax.Array, "B T H d"]:
    """The way back from `by_group`."""
    b, kv, g, t, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, kv * g, d)


def _each_head(head: Callable[..., tuple[jax.Array, ...]], *arrays: Shaped[jax.Array, "B KV ..."]) -> tuple[jax.Array, ...]:
    """The key heads of all rows: one after the other on CPU (the blocks of one fit the cache), all at once elsewhere."""
    b, kv = arrays[0].shape[:2]
    heads = tuple(x.reshape(b * kv, *x.shape[2:]) for x in arrays)
    one_by_one = jax.default_backend() == "cpu"
    out = jax.lax.map(lambda xs: head(*xs), heads) if one_by_one else jax.vmap(head)(*heads)
    return tuple(x.reshape(b, kv, *x.shape[1:]) for x in out)


def _blocks(first: _First) -> Iterator[tuple[slice, slice, Bool[jax.Array, "1 n m"]]]:
    """Queries, keys and who sees whom, block by block.

    That a query's keys are an interval matters: a bound per query costs nothing on CPU, segment numbers compared per pair cost
    more than the matmuls.
    """
    t = len(first)
    index = jnp.arange(t)
    for start in range(0, t, _BLOCK):
        end = min(start + _BLOCK, t)
        queries, keys = slice(start, end), slice(0, end)
        visible = (index[None, keys] >= first[queries, None]) & (index[None, keys] <= index[queries, None])
        yield queries, keys, visible[None]


def _times(rows: Float[jax.Array, "G n a"], matrix: Float[jax.Array, "a b"]) -> Float[jax.Array, "G n b"]:
    """One plain matmul: the queries of a group are further rows."""
    g, n, a = rows.shape
    flat = rows.reshape(g * n, a).astype(matrix.dtype)
    return jnp.matmul(flat, matrix, preferred_element_type=jnp.float32).reshape(g, n, -1)


def _transposed_times(left: Float[jax.Array, "G n a"], right: Float[jax.Array, "G n b"]) -> Float[jax.Array, "a b"]:
    left, right = (x.reshape(-1, x.shape[-1]).astype(left.dtype) for x in (left, right))
    return jnp.matmul(left.T, right, preferred_element_type=jnp.float32)


def _forward_head(q: _Queries, k: _Keys, v: _Keys, first: _First) -> tuple[_Queries, _PerQuery]:
    """The mixed values, and the log of every query's sum of exponentials."""
    outs, log_totals = [], []
    for queries, keys, visible in _blocks(first):
        scores = jnp.where(visible, _times(q[:, queries], k[keys].T), _HIDDEN)
        peak = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        outs.append(_times(weights, v[keys]) / total)
        log_totals.append(peak + jnp.log(total))
    return jnp.concatenate(outs, axis=1).astype(q.dtype), jnp.concatenate(log_totals, axis=1)


def _backward_head(
    q: _Queries, k: _Keys, v: _Keys, first: _First, out: _Queries, log_total: _PerQuery, d_out: _Queries
) -> tuple[_Queries, _Keys, _Keys]:
    """Gradients of q, k and v. Those of k and v are summed transposed: the small factor of their matmuls is the one to turn."""
    mean = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    d_q, d_k, d_v = [], jnp.zeros(k.T.shape), jnp.zeros(v.T.shape)
    for queries, keys, visible in _blocks(first):
        scores = jnp.where(visible, _times(q[:, queries], k[keys].T), _HIDDEN)
        weights = jnp.exp(scores - log_total[:, queries])
        d_scores = weights * (_times(d_out[:, queries], v[keys].T) - mean[:, queries])
        d_q.append(_times(d_scores, k[keys]))
        d_k = d_k.at[:, keys].add(_transposed_times(q[:, queries], d_scores))
        d_v = d_v.at[:, keys].add(_transposed_times(d_out[:, queries], weights))
    return jnp.concatenate(d_q, axis=1).astype(q.dtype), d_k.T.astype(k.dtype), d_v.T.astype(v.dtype)
