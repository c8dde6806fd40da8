"""From per-token losses to one number: weights that carry the global denominator.

`loss = sum(weights * per_token_loss)`. The weights are made once for all tokens of an update, so that any split into
micro-batches, rows or devices adds up to the same loss and the same gradient.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Reduction = Literal["token", "episode", "group", "constant"]


def token_weights(
    mask: Bool[Array, "B T"],
    episode: Int[Array, "B T"],
    group: Int[Array, " E"],
    *,
    reduction: Reduction = "token",
    horizon: float | None = None,
) -> Float[Array, "B T"]:
    """Weight of every token; 0 where not `mask`, all 0 if nothing is.

    Args:
        mask: tokens in the loss.
        episode: row of the episode table of each token.
        group: group of each episode, in [0, E).
        reduction: what counts the same:
            "token":    every token (DAPO, https://arxiv.org/abs/2503.14476, Eq. 8): 1 / all tokens
            "episode":  every episode with a token in the loss, all its segments together (GRPO): 1 / (tokens of it * episodes)
            "group":    every group with a token in the loss: 1 / (tokens of it * groups)
            "constant": 1 / (episodes * horizon) (Dr. GRPO, https://arxiv.org/abs/2503.20783)
        horizon: tokens, for "constant" only; a constant of the experiment, never a padded width.
    """
    if (horizon is None) == (reduction == "constant"):
        raise ValueError('`horizon` goes with reduction="constant" and with no other')
    counted = mask.astype(jnp.float32)
    tokens_of_episode = jax.ops.segment_sum(counted.ravel(), episode.ravel(), group.shape[0])
    episodes = jnp.maximum(jnp.sum(tokens_of_episode > 0), 1).astype(jnp.float32)
    if reduction == "token":
        return counted / jnp.maximum(jnp.sum(counted), 1.0)
    if horizon is not None:
        return counted / (episodes * horizon)
    if reduction == "episode":
        return counted / (jnp.maximum(tokens_of_episode, 1.0) * episodes)[episode]
    if reduction == "group":
        tokens_of_group = jax.ops.segment_sum(tokens_of_episode, group, group.shape[0])
        groups = jnp.maximum(jnp.sum(tokens_of_group > 0), 1).astype(jnp.float32)
        return counted / (jnp.maximum(tokens_of_group, 1.0) * groups)[group][episode]
    raise ValueError(f"reduction {reduction!r}: choose token, episode, group or constant")
