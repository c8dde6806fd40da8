"""The jitted half of the engine: fixed shapes in, sampled ids and log-probs out; logits never leave the device.

A row's result must not depend on its neighbours. So no operation mixes rows, every call has one of a few fixed shapes, and a row
meets the same shapes whoever else is there. XLA on CPU then gives the same bits for a row at any place in the batch and, as the masked
tail adds exact zeros, for any context that is a multiple of `GRANULE`. Another number of rows or of tokens per call rounds differently.
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from agentrl_jax.models.decoder import Cache, Decoder, Params, cache_length, map_cache, unembed

# Sums over the context run in vector lanes: only at multiples of 64 does a longer context leave the order of the sums as it was.
GRANULE = 128

# Made with numpy on the host, seen as jax.Array inside of jit.
Array: TypeAlias = Any


class Rows(NamedTuple):
    """What decoding needs to know of every cache row, B rows.

    token:       last token of the row; its keys and values are not in the cache yet
    length:      cache slots filled so far, which is also the position of `token`
    active:      False: the row is computed, but samples nothing
    index:       how many tokens its request sampled before
    budget:      how many tokens it may still sample
    seed:        high and low half of the request's seed
    temperature: 0 is greedy
    stop:        ids that end the row; padded with -1
    """

    token: Int[Array, " B"]
    length: Int[Array, " B"]
    active: Bool[Array, " B"]
    index: Int[Array, " B"]
    budget: Int[Array, " B"]
    seed: UInt32[Array, "B 2"]
    temperature: Float[Array, " B"]
    stop: Int[Array, "B N"]

    @classmethod
    def idle(cls, size: int, stop_ids: int) -> "Rows":
        """numpy arrays to be filled in: no row active, no stop id."""
        return cls(
            token=np.zeros(size, np.int32),
            length=np.zeros(size, np.int32),
            active=np.zeros(size, np.bool_),
            index=np.zeros(size, np.int32),
            budget=np.zeros(size, np.int32),
            seed=np.zeros((size, 2), np.uint32),
            temperature=np.zeros(size, np.float32),
            stop=np.full((size, stop_ids), -1, np.int32),
        )


class Sampled(NamedTuple):
    """Up to K new tokens for every row: the first `count` of each are real."""

    tokens: Int[Array, "B K"]
    logprobs: Float[Array, "B K"]
    count: Int[Array, " B"]


def sample(
    logits: Float[jax.Array, "B V"], seed: UInt32[jax.Array, "B 2"], index: Int[jax.Array, " B"], temperature: Float[jax.Array, " B"]
) -> tuple[Int[jax.Array, " B"], Float[jax.Array, " B"]]:
    """One id per row from softmax(logits / temperature), and its log-prob; the argmax and its log-prob at 1 where temperature is 0.

    Inverts the cumulative distribution at one uniform number, drawn with fold_in(key(seed), index). Gumbel noise would need V numbers
    per row, a fifth of the time of a decoding step of a small model. A row of NaN has the log-prob NaN.
    """
    scale = jnp.where(temperature > 0, temperature, 1.0)
    logprobs = jax.nn.log_softmax(logits / scale[:, None])
    cumulative = jnp.cumsum(jnp.exp(logprobs), axis=-1)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
    uniform = jax.vmap(jax.random.uniform)(keys)
    drawn = jnp.sum(cumulative <= (uniform * cumulative[:, -1])[:, None], axis=-1)
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]


def _extend(decoder: Decoder, params: Params, tokens: jax.Array, start: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    out = decoder.apply({"params": params}, tokens, start, cache, method=Decoder.extend)
    return cast(tuple[jax.Array, Cache], out)


class _State(NamedTuple):
    step: Int[jax.Array, ""]
    alive: Bool[jax.Array, " B"]
    token: Int[jax.Array, " B"]
    out: Sampled
    cache: Cache


@partial(jax.jit, static_argnames=("decoder", "steps"), donate_argnames="cache")
def decode(decoder: Decoder, params: Params, cache: Cache, rows: Rows, *, steps: int) -> tuple[Cache, Sampled]:
    """Feed `rows.token`, sample the next, and so on, until every row is done or has `steps` new tokens.

    A row that is done or not active is computed on, for the shapes to stay: it writes to the slot after its last one, which
    nothing reads before it is overwritten. So the cache must have room for length + 1, and for an active row min(steps, budget) more.
    """
    matrix = unembed(params).T
    size = rows.token.shape[0]

    def proceed(state: _State) -> jax.Array:
        return (state.step < steps) & jnp.any(state.alive)

    def advance(state: _State) -> _State:
        tokens, logprobs, count = state.out
        hidden, cache = _extend(decoder, params, state.token[:, None], rows.length + count, state.cache)
        token, logprob = sample(hidden[:, 0] @ matrix, rows.seed, rows.index + count, rows.temperature)
        count = count + state.alive.astype(jnp.int32)
        out = Sampled(tokens.at[:, state.step].set(token), logprobs.at[:, state.step].set(logprob), count)
        stopped = jnp.any(token[:, None] == rows.stop, axis=-1) | (count >= rows.budget)
        return _State(state.step + 1, state.alive & ~stopped, jnp.where(state.alive, token, state.token), out, cache)

    nothing = Sampled(jnp.zeros((size, steps), jnp.int32), jnp.zeros((size, steps)), jnp.zeros(size, jnp.int32))
    end = jax.lax.while_loop(proceed, advance, _State(jnp.int32(0), rows.active, rows.token, nothing, cache))
    return end.cache, end.out


@partial(jax.jit, static_argnames="decoder", donate_argnames="cache")
def prefill(
    decoder: Decoder,
    params: Params,
    cache: Cache,
    rows: Int[jax.Array, " R"],
    tokens: Int[jax.Array, "R C"],
    start: Int[jax.Array, " R"],
) -> Cache:
    """Append C tokens to R rows of the cache, at slots start .. start+C-1; slots past the end of the cache are not written.

    The rows are gathered, extended, and the new slots alone are written back. A row may be given twice with the same tokens.
    """
    chunk, length = tokens.shape[1], cache_length(cache)
    # The copies are longer, for a padded chunk may begin less than C slots before the end.
    room = -(-chunk // GRANULE) * GRANULE
    copies = map_cache(lambda old, axis: _longer(old[rows], room, axis), cache)
    _, copies = _extend(decoder, params, tokens, start, copies)
    first = jnp.minimum(start, length - chunk)

    def write(r: jax.Array, cache: Cache) -> Cache:
        def one(old: jax.Array, copy: jax.Array, axis: int) -> jax.Array:
            new = jax.lax.dynamic_slice_in_dim(jax.lax.dynamic_slice_in_dim(copy, r, 1), first[r], chunk, axis)
            at = [rows[r], *(first[r] if i == axis else 0 for i in range(1, 4))]
            return jax.lax.dynamic_update_slice(old, new, at)

        return map_cache(one, cache, copies)

    return jax.lax.fori_loop(0, rows.shape[0], write, cache)


@partial(jax.jit, static_argnames="length")
def grow(cache: Cache, *, length: int) -> list[tuple[jax.Array, jax.Array]]:
    """The same cache with `length` slots a row."""
    return map_cache(lambda old, axis: _longer(old, length - cache_length(cache), axis), cache)


def _longer(old: jax.Array, room: int, axis: int) -> jax.Array:
    return jnp.pad(old, [(0, room if i == axis else 0) for i in range(4)])
