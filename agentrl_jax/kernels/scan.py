"""The linear recurrence that returns and advantages are made of, in logarithmic depth (on CPUs in blocks) instead of a loop over time.

Time is the last axis of every array. `keep` marks the positions that are steps; the others are passed over.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Factor = float | Float[Array, ""] | Float[Array, "*#B #T"]
"""A number for all steps, or one for each row or each step."""

BLOCK, TRIANGLE = 64, 32
"""Steps of a block on a CPU, of the recurrence and of plain sums."""

Cut = Bool[Array, "..."]
BehindCut = Float[Array, "..."]
"""One for each row, [*B], or for each position, [*B, T]."""


def filled(x: Factor, like: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """A factor as a whole array."""
    return jnp.broadcast_to(jnp.asarray(x, like.dtype), like.shape)


@jax.jit
def discounted_sum(x: Float[Array, "*B T"], decay: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """`y[t] = x[t] + decay[t] * y[t + 1]` along the last axis, with `y[T] = 0`.

    decay 0 ends a part (nothing flows in from later), 1 hands the later value on undiminished.
    """
    decay = jnp.broadcast_to(decay, x.shape)
    if x.shape[-1] < 4 * BLOCK:
        return _logarithmic(x, decay)
    return jax.lax.platform_dependent(x, decay, cpu=_blocked, default=_logarithmic)


def _logarithmic(x: Float[Array, "*B T"], decay: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    def join(
        later: tuple[Float[Array, "*S"], Float[Array, "*S"]], earlier: tuple[Float[Array, "*S"], Float[Array, "*S"]]
    ) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return jax.lax.associative_scan(join, (x, decay), reverse=True, axis=x.ndim - 1)[0]


def _blocked(x: Float[Array, "*B T"], decay: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """In blocks, all of them at once: what each hands to the one before, the recurrence over those, and then every step. Reads x twice."""
    blocks, end = -(-x.shape[-1] // BLOCK), -x.shape[-1] % BLOCK
    pad = [(0, 0)] * (x.ndim - 1) + [(0, end)]

    def in_time(a: Float[Array, "*B T"]) -> Float[Array, "L *B C"]:
        return jnp.moveaxis(jnp.pad(a, pad).reshape(*x.shape[:-1], blocks, BLOCK), -1, 0)

    def whole(
        behind: tuple[Float[Array, "*B C"], Float[Array, "*B C"]], step: tuple[Float[Array, "*B C"], Float[Array, "*B C"]]
    ) -> tuple[tuple[Float[Array, "*B C"], Float[Array, "*B C"]], None]:
        return (step[0] + step[1] * behind[0], step[1] * behind[1]), None

    def each(
        behind: Float[Array, "*B C"], step: tuple[Float[Array, "*B C"], Float[Array, "*B C"]]
    ) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]:
        y = step[0] + step[1] * behind
        return y, y

    steps = in_time(x), in_time(decay)
    like = steps[0][0]
    handed, _ = jax.lax.scan(whole, (jnp.zeros_like(like), jnp.ones_like(like)), steps, reverse=True)
    _, y = jax.lax.scan(each, shifted(discounted_sum(*handed)), steps, reverse=True)
    return jnp.moveaxis(y, 0, -1).reshape(*x.shape[:-1], blocks * BLOCK)[..., : x.shape[-1]]


def windowed_sum(x: Float[Array, "*B T"], decay: Float[Array, "*B T"], n: int) -> tuple[Float[Array, "*B T"], Float[Array, "*B T"]]:
    """The same recurrence over `n` steps: `x[t] + decay[t] x[t+1] + ...` (n terms), and the product of the n decays.

    Behind the end x is 0 and decay 1. The cost grows with log n.
    """

    def behind(part: tuple[Float[Array, "*B T"], Float[Array, "*B T"]], shift: int) -> tuple[Float[Array, "*B T"], Float[Array, "*B T"]]:
        pad = [(0, 0)] * (x.ndim - 1) + [(0, shift)]
        sums, product = (jnp.pad(a, pad, constant_values=fill)[..., shift:] for a, fill in zip(part, (0, 1), strict=True))
        return sums, product

    def join(
        first: tuple[Float[Array, "*B T"], Float[Array, "*B T"]], then: tuple[Float[Array, "*B T"], Float[Array, "*B T"]]
    ) -> tuple[Float[Array, "*B T"], Float[Array, "*B T"]]:
        return first[0] + first[1] * then[0], first[1] * then[1]

    if n < 1:
        raise ValueError(f"a window of {n} steps")
    n = min(n, x.shape[-1])
    done, width = (jnp.zeros_like(x), jnp.ones_like(x)), 0
    block, size = (x, decay), 1
    while True:
        if n & size:
            done, width = join(done, behind(block, width)), width + size
        if width == n:
            return done
        block, size = join(block, behind(block, size)), 2 * size


def cumulative_sum(x: Float[Array, "*B T"], *, reverse: bool = False) -> Float[Array, "*B T"]:
    """Sum of all entries up to each position, or from it on; x is finite, and whole numbers stay exact below 2^24 in float32.

    Matmuls with a triangle of ones, block by block, then over the blocks: on CPU two to four times as fast as `jnp.cumsum`.
    """
    width = x.shape[-1]
    if width <= TRIANGLE:
        ones = jnp.ones((width, width), x.dtype)
        return jnp.matmul(x, jnp.tril(ones) if reverse else jnp.triu(ones), precision="highest")
    blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % TRIANGLE)]).reshape(*x.shape[:-1], -1, TRIANGLE)
    inside = cumulative_sum(blocks, reverse=reverse)
    whole = inside[..., 0 if reverse else -1]
    others = cumulative_sum(whole, reverse=reverse)
    # Not `others - whole`, which would round.
    others = shifted(others) if reverse else jnp.concatenate([jnp.zeros_like(whole[..., :1]), others[..., :-1]], -1)
    return (inside + others[..., None]).reshape(*x.shape[:-1], -1)[..., :width]


class Steps(NamedTuple):
    """The steps of rows, which can be moved to the front of their rows and back."""

    mask: Bool[Array, "*B T"]
    number: Int[Array, "*B T"]
    """Of the last step up to each position: 0, 1, ... at the steps, -1 before the first."""

    @classmethod
    def of(cls, mask: Bool[Array, "*B T"]) -> "Steps":
        return cls(mask, cumulative_sum(mask.astype(jnp.float32)).astype(jnp.int32) - 1)

    @property
    def total(self) -> Int[Array, "*B 1"]:
        return self.number[..., -1:] + 1

    def together(self, x: Float[Array, "*B T"], *, fill: float = 0.0) -> Float[Array, "*B T"]:
        """The steps moved to the front of each row, `fill` behind them."""
        # One long scatter costs half of one in each row. A gather by the inverse would be fused, and done again, into all that reads it.
        rows, width = x.size // x.shape[-1], x.shape[-1]
        start = width * jnp.arange(rows, dtype=jnp.int32)[:, None]
        to = jnp.where(self.mask.reshape(rows, width), start + self.number.reshape(rows, width), x.size)
        return jnp.full(x.size, fill, x.dtype).at[to.ravel()].set(x.ravel(), mode="drop", unique_indices=True).reshape(x.shape)

    def apart(self, x: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
        """Each step's entry back in its place; other positions hold that of the step before them."""
        return jnp.take_along_axis(x, jnp.maximum(self.number, 0), -1)


def shifted(x: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """`x[t + 1]`, 0 at the last position."""
    return jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], -1)


def following(x: Float[Array, "*B T"], keep: Bool[Array, "*B T"]) -> Float[Array, "*B T"]:
    """`x` at the next kept position behind t, 0 where there is none. What is not kept may hold anything."""
    steps = Steps.of(keep)
    behind = jnp.take_along_axis(steps.together(x), jnp.minimum(steps.number + 1, x.shape[-1] - 1), -1)
    return jnp.where(steps.number + 1 < steps.total, behind, 0.0)


def cuts(
    like: Float[Array, "*B T"], truncated: Cut | None, bootstrap_value: BehindCut | None
) -> tuple[Bool[Array, "*B T"], Float[Array, "*B T"]]:
    """Per position: whether an episode is cut off behind it, and the value of the state that it is cut off at.

    A flag for a row stands at its last position.
    """
    if (truncated is None) != (bootstrap_value is None):
        raise ValueError("`truncated` and `bootstrap_value` go together")
    if truncated is None or bootstrap_value is None:
        return jnp.zeros(like.shape, bool), jnp.zeros_like(like)
    if truncated.ndim == like.ndim:
        return truncated, jnp.where(truncated, bootstrap_value, 0.0)
    cut = jnp.zeros(like.shape, bool).at[..., -1].set(truncated)
    return cut, jnp.zeros_like(like).at[..., -1].set(jnp.where(truncated, bootstrap_value, 0.0))


def time_order(episode: Int[Array, " N"], time: Int[Array, " N"]) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Order that puts records of many episodes, mixed as they come, one episode after the other and each in its time.

    Also tells where, in that order, an episode ends: a discount of 0 there keeps the episodes apart.

    Example: discounted returns of steps that lie in any order.
        order, last = time_order(episode, time)
        returns = discounted_return(reward[order], jnp.ones(n, bool), discount=jnp.where(last, 0.0, gamma))
        returns = jnp.zeros(n).at[order].set(returns)
    """
    order = jnp.lexsort((time, episode))
    sorted_ = episode[order]
    return order, jnp.concatenate([sorted_[1:] != sorted_[:-1], jnp.ones(1, bool)])
