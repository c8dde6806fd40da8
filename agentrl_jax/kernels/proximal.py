"""The proximal policy of a decoupled loss without a forward pass of its own.

The decoupled PPO of asynchronous training (AReaL, https://arxiv.org/abs/2505.24298, section 5.2) clips around a proximal policy, the one
before the update, while tokens come from older behaviour policies. Running the model once more gives its log-probs exactly. These
approximations place it between the behaviour policy and the policy being trained, by how many versions each token is behind.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Interpolation = Literal["log", "linear", "behaviour"]


def proximal_log_prob(
    new: Float[Array, "*S"],
    behaviour: Float[Array, "*S"],
    version: Int[Array, "*S"],
    current: int | Int[Array, ""],
    *,
    interpolation: Interpolation = "log",
    floor: float = 0.0,
) -> Float[Array, "*S"]:
    """Log-prob of each token under version `current - 1`, guessed from `behaviour` (its own version) and `new` (version `current`).

    With `a = clip((current - 1 - version) / (current - version), 0, 1)`, the way that the proximal policy has come from the one to
    the other; 0 where `version` is `current`, or negative (the token was not sampled):
        "log":       (1 - a) behaviour + a new, a geometric mean
        "linear":    log((1 - a) exp(behaviour) + a exp(new) + floor)
        "behaviour": behaviour; the decoupled loss becomes the coupled one

    Args:
        new: under the weights being trained.
        behaviour: under the weights that sampled the token.
        version: number of those weights; negative for tokens that no policy sampled.
        current: number of the weights being trained.
        interpolation: as above.
        floor: smallest probability of "linear"; 0 needs none, since it is computed in log space.

    No gradient flows: the proximal policy is a constant. Versions differ between the tokens of one episode whenever weights arrived in
    the middle of it.
    """
    new, behaviour = jax.lax.stop_gradient((new, behaviour))
    behind = current - version
    sampled = (behind > 0) & (version >= 0)
    way = jnp.where(sampled, (behind - 1).astype(new.dtype) / jnp.where(sampled, behind, 1).astype(new.dtype), 0.0)
    if interpolation == "behaviour":
        return behaviour
    if interpolation == "log":
        return jnp.where(way > 0, behaviour + way * (new - behaviour), behaviour)
    if interpolation == "linear":
        moved = way > 0
        mixed = jnp.logaddexp(jnp.log1p(-way) + behaviour, jnp.log(jnp.where(moved, way, 1.0)) + new)
        mixed = jnp.where(moved, mixed, behaviour)
        return jnp.logaddexp(mixed, jnp.log(jnp.full_like(mixed, floor))) if floor > 0 else mixed
    raise ValueError(f"interpolation {interpolation!r}: choose log, linear or behaviour")
