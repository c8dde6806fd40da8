"""Per-token losses of a critic, to be minimised. Reduction is somebody else's job (`kernels/reduce.py`)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def value_loss(
    value: Float[Array, "*S"],
    target: Float[Array, "*S"],
    mask: Bool[Array, "*S"],
    *,
    old: Float[Array, "*S"] | None = None,
    clip: float | None = None,
    huber: float | None = None,
    scale: float = 0.5,
) -> Float[Array, "*S"]:
    """`scale * f(V - R)`, or with `clip` `scale * max(f(V - R), f(old + clip(V - old, +-clip) - R))`; 0 where not `mask`.

    The clipped form is that of PPO's code, not of its paper (https://arxiv.org/abs/2005.12729, section 2): a value that has left the
    interval *towards* the target has no gradient any more.

    Args:
        value: V of the critic being trained; carries the gradient.
        target: R, the return; a constant.
        mask: tokens in the loss; everything else may hold anything.
        old: V when the episodes were scored, for `clip` only.
        clip: half width of the interval around `old`.
        huber: None for f(x) = x^2; a number h for x^2 up to |x| = h and 2 h |x| - h^2 beyond (with scale 0.5, the usual Huber loss).
        scale: 0.5 gives the gradient V - R. Some libraries leave the half out, others put it into the coefficient.

    Example:
        >>> value_loss(jnp.array([0.9]), jnp.array([1.0]), jnp.array([True]), old=jnp.array([0.5]), clip=0.2)  # doctest: +SKIP
        Array([0.045])
    """
    error, bounded = _errors(value, target, mask, old, clip)
    return scale * jnp.maximum(_penalty(error, huber), _penalty(bounded, huber))


def value_clipped(
    value: Float[Array, "*S"],
    target: Float[Array, "*S"],
    mask: Bool[Array, "*S"],
    *,
    old: Float[Array, "*S"],
    clip: float,
) -> Bool[Array, "*S"]:
    """Where `value_loss` takes the clipped value and passes no gradient."""
    error, bounded = _errors(value, target, mask, old, clip)
    return jnp.abs(bounded) > jnp.abs(error)


def _errors(
    value: Float[Array, "*S"], target: Float[Array, "*S"], mask: Bool[Array, "*S"], old: Float[Array, "*S"] | None, clip: float | None
) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """V - R of the value and of the clipped value, 0 where not `mask`."""
    if (old is None) != (clip is None):
        raise ValueError("`clip` needs `old` and `old` needs `clip`")
    v = jnp.where(mask, value, 0.0)
    r = jax.lax.stop_gradient(jnp.where(mask, target, 0.0))
    if old is None or clip is None:
        return v - r, v - r
    centre = jax.lax.stop_gradient(jnp.where(mask, old, 0.0))
    return v - r, jnp.clip(v, centre - clip, centre + clip) - r


def _penalty(x: Float[Array, "*S"], huber: float | None) -> Float[Array, "*S"]:
    if huber is None:
        return jnp.square(x)
    size = jnp.abs(x)
    return jnp.where(size <= huber, jnp.square(x), 2.0 * huber * size - huber**2)
