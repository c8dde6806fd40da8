"""The one recurrence that returns and advantages are made of, in logarithmic depth instead of a loop over time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def discounted_sum(x: Float[Array, "*B T"], decay: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """`y[t] = x[t] + decay[t] * y[t + 1]` along the last axis, with `y[T] = 0`.

    decay 0 ends a part (nothing flows in from later), 1 hands the later value on undiminished.
    """

    def join(
        later: tuple[Float[Array, "*S"], Float[Array, "*S"]], earlier: tuple[Float[Array, "*S"], Float[Array, "*S"]]
    ) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return jax.lax.associative_scan(join, (x, jnp.broadcast_to(decay, x.shape)), reverse=True, axis=x.ndim - 1)[0]
