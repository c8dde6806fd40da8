"""Per-token policy losses, to be minimised. Reduction is somebody else's job (`kernels/reduce.py`).

`log_ratio` is log(train / behaviour) with masked tokens already set to 0 (`masked_log_ratio`), so that nothing that stands
under the mask, NaN and inf included, reaches an `exp` or its gradient.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0


def masked_log_ratio(new: Float[Array, "*S"], old: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float[Array, "*S"]:
    """log(new / old), 0 where not `mask`, clamped to +-20 so that its `exp` is finite."""
    difference = jnp.where(mask, new, 0.0) - jnp.where(mask, old, 0.0)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    log_ratio: Float[Array, "*S"], advantage: Float[Array, "*S"], *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Float[Array, "*S"]:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` (PPO, https://arxiv.org/abs/1707.06347, Eq. 7).

    Clip-higher of DAPO (https://arxiv.org/abs/2503.14476, Eq. 10) is `clip_high > clip_low`.
    """
    ratio = jnp.exp(log_ratio)
    return jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))


def clipped(
    log_ratio: Float[Array, "*S"], advantage: Float[Array, "*S"], *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Bool[Array, "*S"]:
    """Where `ppo_clip` passes no gradient to the ratio."""
    ratio = jnp.exp(log_ratio)
    return ((ratio > 1.0 + clip_high) & (advantage > 0)) | ((ratio < 1.0 - clip_low) & (advantage < 0))
