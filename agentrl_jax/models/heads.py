"""A value head: what a critic says of each state, read off the final hidden states of a decoder.

The hidden state at token t has seen the tokens up to t, so its value is that of the state *behind* token t; the state before a token is
behind the one before it, where its log-prob comes from too. Values are float32 whatever the decoder computes in.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ValueHead: TypeAlias = dict[str, Array]
"""kernel: f32[D]; bias: f32[]."""


def init_value_head(hidden_size: int) -> ValueHead:
    """A head that says 0 of every state: all weights are 0.

    As in OpenAI's code for https://arxiv.org/abs/1909.08593 (lm_human_preferences/language/model.py, `scale=0` for "value"): random first
    values would be noise in the first advantages. The gradient reaches the trunk from the second update on.
    """
    return {"kernel": jnp.zeros(hidden_size, jnp.float32), "bias": jnp.zeros((), jnp.float32)}


def values_behind(head: ValueHead, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Value of the state behind each token, from the final hidden states: `hidden . kernel + bias`, f32."""
    # Accelerators multiply float32 in less by default.
    return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"], precision="highest") + head["bias"]


def values_before(behind: Float[Array, "B T"], position: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Value of the state before each token, from those behind; 0 at the first token of a segment (`position` 0), which has none.

    >>> values_before(jnp.array([[0.1, 0.2, 0.3, 0.4]]), jnp.array([[0, 1, 0, 1]]))
    Array([[0. , 0.1, 0. , 0.3]], dtype=float32)
    """
    return jnp.where(position > 0, jnp.roll(behind, 1, axis=1), 0.0)


def values_at_end(
    behind: Float[Array, "B T"], segment: Int[Array, "B T"], episode: Int[Array, "B T"], last: Bool[Array, "B T"], *, episodes: int
) -> Float[Array, " E"]:
    """Value of the state in which each episode was left, tool output behind its last action included: that behind the last token of the
    segment which holds the action. 0 for an episode without one.

    last: the last action of each episode, one token at most
    """
    index = jnp.broadcast_to(jnp.arange(segment.shape[1]), segment.shape)
    ends = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(ends, index, segment.shape[1] - 1), axis=1, reverse=True)
    value = jnp.where(last, jnp.take_along_axis(behind, end, axis=1), 0.0)
    return jax.ops.segment_sum(value.ravel(), episode.ravel(), episodes)
