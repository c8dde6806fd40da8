"""Mean, variance and whitening of the entries under a mask.

References differ in three ways that change numbers, so each is an option: the divisor of the variance, where eps enters, and
what one entry stands for. `count` settles the last: one number per episode with its number of tokens as `count` gives the
statistics over tokens, without it those over episodes.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Divisor = Literal["population", "sample"]
EpsIn = Literal["std", "variance", "floor"]


class Moments(NamedTuple):
    """Of the entries under the mask; 0 where there are none (the variance: where there are too few)."""

    mean: Float[Array, "*R"]
    variance: Float[Array, "*R"]


def spread(variance: Float[Array, "*S"], *, eps: float = 0.0, eps_in: EpsIn = "std") -> Float[Array, "*S"]:
    """Standard deviation with eps: `sqrt(v) + eps` ("std"), `sqrt(v + eps)` ("variance") or `sqrt(max(v, eps))` ("floor")."""
    if eps_in == "std":
        return jnp.sqrt(variance) + eps
    if eps_in == "variance":
        return jnp.sqrt(variance + eps)
    if eps_in == "floor":
        return jnp.sqrt(jnp.maximum(variance, eps))
    raise ValueError(f"eps_in {eps_in!r}: choose std, variance or floor")


def moments(
    x: Float[Array, "*S"],
    mask: Bool[Array, "*S"],
    *,
    count: Float[Array, "*S"] | None = None,
    axis: int | None = None,
    divisor: Divisor = "population",
) -> Moments:
    """Mean and variance over all entries, or along one axis. What is not in `mask` may hold anything.

    Args:
        count: how often each entry counts (whole numbers), 1 if left out.
        divisor: n, or n - 1 ("sample"; the variance of fewer than two is 0).

    Distances are taken from the smallest entry, so that equal entries have variance exactly 0 and large ones lose no digits.
    """
    if divisor not in ("population", "sample"):
        raise ValueError(f"divisor {divisor!r}: choose population or sample")
    weight = jnp.where(mask, 1.0 if count is None else count, 0.0).astype(x.dtype)
    member = weight > 0
    low = jnp.min(jnp.where(member, x, jnp.inf), axis=axis, keepdims=True)
    low = jnp.where(jnp.isfinite(low), low, 0.0)
    above = jnp.where(member, x - low, 0.0)
    n = jnp.sum(weight, axis=axis, keepdims=True)
    rise = jnp.sum(weight * above, axis=axis, keepdims=True) / jnp.maximum(n, 1.0)
    squares = jnp.sum(weight * jnp.square(above - rise), axis=axis, keepdims=True)
    mean, variance = low + rise, squares / jnp.maximum(n if divisor == "population" else n - 1.0, 1.0)
    return Moments(jnp.squeeze(mean, axis), jnp.squeeze(variance, axis))


def standardise(
    x: Float[Array, "*S"],
    mean: Float[Array, "*#S"],
    variance: Float[Array, "*#S"],
    *,
    eps: float = 0.0,
    eps_in: EpsIn = "std",
    shift: bool = True,
) -> Float[Array, "*S"]:
    """`(x - mean) / spread(variance)`, on every entry there is. With `shift=False` the mean is put back: only the scale changes."""
    mean, scale = jnp.broadcast_to(mean, x.shape), jnp.broadcast_to(spread(variance, eps=eps, eps_in=eps_in), x.shape)
    whitened = (x - mean) / scale
    return whitened if shift else whitened + mean


def whiten(
    x: Float[Array, "*S"],
    mask: Bool[Array, "*S"],
    *,
    count: Float[Array, "*S"] | None = None,
    divisor: Divisor = "population",
    eps: float = 0.0,
    eps_in: EpsIn = "std",
    centre: bool = True,
    shift: bool = True,
) -> Float[Array, "*S"]:
    """`(x - mean) / std` over the entries of `mask`, 0 elsewhere; exactly 0 (or the mean, without `shift`) where they are all equal.

    REINFORCE++-baseline (https://arxiv.org/abs/2501.03262) is `group_relative(std="none")` and then this:

        over tokens    `count=tokens of the episode`, divisor "sample", eps 1e-8 in the variance (verl)
        over episodes  no `count`, `centre=False`, eps 1e-6 (rllm)

    Args:
        count, divisor: as in `moments`.
        eps, eps_in: as in `spread`.
        centre: False divides by the std and leaves the mean in.
        shift: False whitens and puts the mean back (as for rewards whose level matters).

    Token-weighted centring moves the advantage of a group without information away from 0; whitening over episodes does too
    unless every group is centred.
    """
    mean, variance = moments(x, mask, count=count, divisor=divisor)
    whole = jnp.where(mask, x, mean)
    alike = variance == 0
    safe = jnp.where(alike, 1.0, variance)
    whitened = standardise(whole, mean if centre else jnp.zeros_like(mean), safe, eps=eps, eps_in=eps_in)
    whitened = jnp.where(alike, 0.0, whitened)
    return jnp.where(mask, whitened if shift else whitened + mean, 0.0)
