"""From per-token losses to one number: weights that carry the global denominator.

`loss = weighted_sum(per_token_loss, weights)`. The weights are made once for all tokens of an update, so that any split into
micro-batches, rows or devices adds up to the same loss and the same gradient. Where the weights of one micro-batch have to be made
alone, `counts` of the whole update stand in for its own.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.units import row_count

Reduction = Literal["token", "episode", "group", "constant", "episode_sum", "sum"]
Denominator = Literal["original", "kept"]
Count = int | float | Float[Array, ""]


def token_weights(
    mask: Bool[Array, "B T"],
    episode: Int[Array, "B T"] | None = None,
    group: Int[Array, " E"] | None = None,
    *,
    reduction: Reduction = "token",
    horizon: float | None = None,
    keep: Bool[Array, "B T"] | None = None,
    denominator: Denominator = "original",
    scale: Float[Array, " E"] | None = None,
    tokens: Count | None = None,
    episodes: Count | None = None,
    groups: Count | None = None,
    tokens_of_episode: Float[Array, " E"] | None = None,
) -> Float[Array, "B T"]:
    """Weight of every token; 0 where not `mask`, all 0 if nothing is.

    Args:
        mask: tokens in the loss.
        episode: row of the episode table of each token; None: each row is an episode.
        group: group of each episode, in [0, E); None: as many groups as episodes, one each. With `episode` it tells E and is needed.
        reduction: what counts the same:
            "token":    every token (DAPO, https://arxiv.org/abs/2503.14476, Eq. 8): 1 / all tokens
            "episode":  every episode with a token in the loss, all its segments together (GRPO): 1 / (tokens of it * episodes)
            "group":    every group with a token in the loss: 1 / (tokens of it * groups)
            "constant": 1 / (episodes * horizon) (Dr. GRPO, https://arxiv.org/abs/2503.20783)
            "episode_sum": 1 / episodes: the mean over episodes of their sums
            "sum":      1, or 1 / horizon where there is one: nothing is averaged over, so that more episodes weigh more
        horizon: tokens; needed by "constant", possible with "sum"; a constant of the experiment, never a padded width.
        keep: False rejects a token (`kernels.correction.keep`): its weight is 0.
        denominator: whether rejected tokens, and episodes with no others, still count in every denominator ("original") or not ("kept").
            With three tokens of loss -1 of which one is kept, the loss is -1/3 or -1.
        scale: factor of each episode's weights, in no denominator.
        tokens, episodes, groups, tokens_of_episode: use these denominators instead of those of `mask`, see `counts`. They come from the
            whole update when `mask` is a part of it, or from a convention: `episodes` = number of rows also counts empty ones.

    Names elsewhere, with sequences for episodes: token-mean is "token", seq-mean-token-mean "episode", seq-mean-token-sum
    "episode_sum", seq-mean-token-sum-norm "constant" in verl since 2026-08, and "sum" with a horizon before and in ROLL.

    Example:
        >>> mask = jnp.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
        >>> token_weights(mask, reduction="episode")  # doctest: +SKIP
        Array([[0.25, 0.25, 0., 0.], [0.125, 0.125, 0.125, 0.125]])
    """
    if (reduction in ("token", "episode", "group", "episode_sum") and horizon is not None) or (reduction == "constant" and horizon is None):
        raise ValueError('`horizon` goes with reduction="constant", which needs it, and "sum"')
    kept = mask if keep is None else mask & keep
    counted = counts(mask if denominator == "original" else kept, episode, group)
    tokens = counted["tokens"] if tokens is None else tokens
    episodes = counted["episodes"] if episodes is None else episodes
    groups = counted["groups"] if groups is None else groups
    lengths = counted["tokens_of_episode"] if tokens_of_episode is None else tokens_of_episode
    one = jnp.ones_like(lengths)
    if reduction == "token":
        weight = one / jnp.maximum(tokens, 1.0)
    elif reduction == "episode":
        weight = one / (jnp.maximum(lengths, 1.0) * jnp.maximum(episodes, 1.0))
    elif reduction == "group":
        of_group = lengths if group is None else jax.ops.segment_sum(lengths, group, lengths.shape[0])[group]
        weight = one / (jnp.maximum(of_group, 1.0) * jnp.maximum(groups, 1.0))
    elif reduction in ("constant", "episode_sum"):
        weight = one / (jnp.maximum(episodes, 1.0) * (horizon or 1.0))
    elif reduction == "sum":
        weight = one / (horizon or 1.0)
    else:
        raise ValueError(f"reduction {reduction!r}: choose token, episode, group, constant, episode_sum or sum")
    weight = weight if scale is None else weight * scale
    return jnp.where(kept, weight[:, None] if episode is None else weight[episode], 0.0)


def counts(
    mask: Bool[Array, "B T"], episode: Int[Array, "B T"] | None = None, group: Int[Array, " E"] | None = None
) -> dict[str, Float[Array, ""] | Float[Array, " E"]]:
    """The denominators of `token_weights`, by the names of its arguments: `token_weights(part, **counts(whole))`.

    tokens: in the mask. episodes, groups: those with a token in it. tokens_of_episode: of each episode.
    """
    dtype = jnp.result_type(float)
    if episode is None:
        lengths = row_count(mask).astype(dtype)
    elif group is None:
        raise ValueError("`episode` goes with `group`, which tells how many episodes there are")
    else:
        lengths = jax.ops.segment_sum(mask.astype(dtype).ravel(), episode.ravel(), group.shape[0])
    of_group = lengths if group is None else jax.ops.segment_sum(lengths, group, lengths.shape[0])
    return {
        "tokens": jnp.sum(lengths),
        "episodes": jnp.sum(lengths > 0, dtype=dtype),
        "groups": jnp.sum(of_group > 0, dtype=dtype),
        "tokens_of_episode": lengths,
    }


def weighted_sum(x: Float[Array, "B T"], weights: Float[Array, "B T"]) -> Float[Array, ""]:
    """`sum(weights * x)`, where a weight of 0 hides whatever `x` holds there, NaN included, from value and gradient."""
    return jnp.sum(jnp.where(weights != 0, x * weights, 0.0))
