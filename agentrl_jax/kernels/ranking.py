"""Which tokens of a batch rank highest or come first, without sorting them: their values are bisected bit by bit.

Sorting millions of floats on a CPU takes a hundred times as long as reading them once, and a bisection reads them 32 times at most.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt


def ordered(x: Float[Array, "*S"]) -> UInt[Array, "*S"]:
    """Unsigned integers in the order of the floats, at least 1; 0 and -0 are the same."""
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), unsigned)
    top = jnp.asarray(1 << (8 * x.dtype.itemsize - 1), unsigned)
    return jnp.where(bits >= top, ~bits, bits | top)


def largest(value: Float[Array, "*S"], mask: Bool[Array, "*S"], count: Int[Array, ""]) -> Bool[Array, "*S"]:
    """The `count` entries of `mask` with the largest `value`, all of them if there are fewer; of equal ones the first in row-major
    order."""
    key = jnp.where(mask, ordered(value), 0)
    width = 8 * value.dtype.itemsize

    def more(state: tuple[Array, Array, Array]) -> Bool[Array, ""]:
        bit, _, reached = state
        return (bit < width) & (reached != count)

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, bound, reached = state
        tried = bound | jnp.left_shift(jnp.ones_like(bound), (width - 1 - bit).astype(bound.dtype))
        number = jnp.sum(key >= tried, dtype=count.dtype)
        enough = number >= count
        return bit + 1, jnp.where(enough, tried, bound), jnp.where(enough, number, reached)

    start = jnp.int32(0), jnp.zeros((), key.dtype), jnp.asarray(value.size, count.dtype)
    _, bound, reached = jax.lax.while_loop(more, halve, start)

    def some(key: UInt[Array, "*S"]) -> Bool[Array, "*S"]:
        above = key > bound
        return above | first((key == bound) & mask, count - jnp.sum(above, dtype=count.dtype))

    return mask & jax.lax.cond(reached == count, lambda key: key >= bound, some, key)


def first(flags: Bool[Array, "*S"], count: Int[Array, ""]) -> Bool[Array, "*S"]:
    """The first `count` of the flags in row-major order; all of them if there are fewer."""
    rows = flags.reshape(-1, flags.shape[-1])
    each = jnp.sum(rows, axis=1, dtype=count.dtype)
    left = jnp.clip(count - (jnp.cumsum(each) - each), 0, each)
    # At most one row is kept in part.
    cut = jnp.argmax((left > 0) & (left < each))
    part = rows[cut] & (jnp.cumsum(rows[cut], dtype=count.dtype) <= left[cut])
    kept = jnp.where((jnp.arange(rows.shape[0]) == cut)[:, None], part[None], rows & (left >= each)[:, None])
    return kept.reshape(flags.shape)


def smallest(value: Float[Array, "*S"], mask: Bool[Array, "*S"], *, mean_below: float) -> Bool[Array, "*S"]:
    """As many of the smallest entries of `mask` as have a mean below `mean_below`, but at least one; of equal ones the first."""
    width = 8 * value.dtype.itemsize
    key = ordered(value)
    value = jnp.where(mask, value, 0.0)

    def fits(total: Float[Array, ""], number: Int[Array, ""]) -> Bool[Array, ""]:
        return (number <= 0) | (total / jnp.maximum(number, 1).astype(total.dtype) < mean_below)

    def up_to(bound: UInt[Array, ""]) -> tuple[Float[Array, ""], Int[Array, ""]]:
        inside = mask & (key <= bound)
        return jnp.sum(jnp.where(inside, value, 0.0)), jnp.sum(inside, dtype=jnp.int32)

    def halve(bit: Int[Array, ""], bound: UInt[Array, ""]) -> UInt[Array, ""]:
        tried = bound | jnp.left_shift(jnp.ones_like(bound), (width - 1 - bit).astype(bound.dtype))
        return jnp.where(fits(*up_to(tried)), tried, bound)

    bound = jax.lax.fori_loop(0, width, halve, jnp.zeros((), key.dtype))
    total, number = up_to(bound)
    # The next ones are all equal, and not all of them fit.
    beyond = mask & (key > bound)
    following = jnp.min(jnp.where(beyond, value, jnp.inf))
    ties = beyond & (value == following)
    room = jnp.where(following > mean_below, (mean_below * number.astype(total.dtype) - total) / (following - mean_below), 0.0)
    more = jnp.ceil(jnp.clip(room, 0.0, float(min(value.size, 2**30)))).astype(jnp.int32)
    more = jnp.where(fits(total + more.astype(total.dtype) * following, number + more), more, jnp.maximum(more - 1, 0))
    more = jnp.where(number == 0, jnp.maximum(more, 1), more)
    return (mask & (key <= bound)) | jax.lax.cond(more > 0, lambda: first(ties, more), lambda: jnp.zeros_like(mask))
