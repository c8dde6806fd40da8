"""Sums over parts of a row: segments of a packed row or turns, named by one integer per token, or whole rows.

Every token receives the result of its own part, so that shapes stay [B, T] and no count of parts has to be known.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def runs(*labels: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Number of the run of equal labels that each token of a row is in: 0, 1, ... from the left.

    With `tokens.segment` it numbers segments, with `tokens.segment, tokens.turn` turns.
    """
    changed = jnp.zeros(labels[0].shape, bool)
    for label in labels:
        changed = changed.at[:, 1:].set(changed[:, 1:] | (label[:, 1:] != label[:, :-1]))
    return jnp.cumsum(changed, axis=1, dtype=jnp.int32)


def unit_sum(x: Float[Array, "B T"], unit: Int[Array, "B T"] | None = None) -> Float[Array, "B T"]:
    """Sum of `x` over all tokens of the same `unit` in the row; units are numbered below T. Without them each row is one."""
    if unit is None:
        return jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), x.shape)

    def of_row(x: Float[Array, " T"], unit: Int[Array, " T"]) -> Float[Array, " T"]:
        return jax.ops.segment_sum(x, unit, x.shape[0])[unit]

    return jax.vmap(of_row)(x, unit)


def row_count(mask: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Number of tokens of `mask` in each row. Counted four to a word: of a plain sum XLA on CPU first writes out the terms."""
    fours = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 4))).astype(jnp.uint8).reshape(mask.shape[0], -1, 4)
    words = jax.lax.bitcast_convert_type(fours, jnp.uint32)
    return jnp.sum(jax.lax.population_count(words), axis=1, dtype=jnp.uint32).astype(jnp.int32)


def unit_count(mask: Bool[Array, "B T"], unit: Int[Array, "B T"] | None, dtype: jnp.dtype) -> Float[Array, "B T"]:
    """Number of tokens of `mask` in each token's unit, as floats of `dtype`."""
    if unit is None:
        return jnp.broadcast_to(row_count(mask).astype(dtype)[:, None], mask.shape)
    return unit_sum(mask.astype(dtype), unit)


def unit_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"], unit: Int[Array, "B T"] | None = None) -> Float[Array, "B T"]:
    """Mean of `x` over the tokens of `mask` in each token's unit; 0 where there are none. What is not in `mask` may hold anything."""
    return unit_sum(jnp.where(mask, x, 0.0), unit) / jnp.maximum(unit_count(mask, unit, x.dtype), 1.0)
