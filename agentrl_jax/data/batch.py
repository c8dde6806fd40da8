"""What one update sees: episodes laid out in rows (tokens) and the same episodes as a table (episodes and turns).

Credit is computed on the table and laid on the tokens by one gather, so that rows, padding and packing cannot change it.
Three masks, never one for another: `segment > 0` says what attention sees, `mask` who wrote the token, `in_loss` what is trained.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """B rows of T tokens; a row holds one or several segments, one after the other, then padding.

    ids:         token ids, 0 in padding
    position:    position within the segment
    segment:     1, 2, ... numbers the segments of a row, 0 is padding; attention never crosses
    episode:     row of the episode table, 0 in padding (masked anyway)
    turn:        column of the episode table
    action:      index of the token among all policy tokens of its episode, -1 where the policy did not write it
    mask:        the policy sampled this token
    in_loss:     the token may be trained (the product with the episode's and the turn's flag counts)
    logprob:     behaviour log-prob of this very token (not of the next), 0 where not `mask`
    temperature: divides the logits that `logprob` is of, 1 where not `mask`
    version:     version of the weights that sampled it, -1 where not `mask`
    predict:     A positions per row, all those of `mask`, filled up with T; log-probs are computed at these alone
    """

    ids: Int[jax.Array, "B T"]
    position: Int[jax.Array, "B T"]
    segment: Int[jax.Array, "B T"]
    episode: Int[jax.Array, "B T"]
    turn: Int[jax.Array, "B T"]
    action: Int[jax.Array, "B T"]
    mask: Bool[jax.Array, "B T"]
    in_loss: Bool[jax.Array, "B T"]
    logprob: Float[jax.Array, "B T"]
    temperature: Float[jax.Array, "B T"]
    version: Int[jax.Array, "B T"]
    predict: Int[jax.Array, "B A"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episodes:
    """E episodes of up to K turns; rows past the last episode are filler with every flag False.

    group:       members of a group share this number, 0, 1, ... by first appearance; filler rows are a group of their own
    reward:      final reward, 0 where there is none (then `in_stats` is False)
    components:  named parts of the reward, in the order that was asked of `collate`
    in_stats:    counts in the statistics of its group
    in_loss:     may be trained
    truncated:   ran into a limit instead of terminating
    turn_exists: the episode has this turn
    turn_reward: reward of the turn alone, 0 where there is none
    turn_valid:  the action of the turn parsed and named a tool
    turn_in_loss: may be trained
    state:       anchor id: equal exactly where group and environment state before the action are equal, -1 unknown
    """

    group: Int[jax.Array, " E"]
    reward: Float[jax.Array, " E"]
    components: Float[jax.Array, "E C"]
    in_stats: Bool[jax.Array, " E"]
    in_loss: Bool[jax.Array, " E"]
    truncated: Bool[jax.Array, " E"]
    turn_exists: Bool[jax.Array, "E K"]
    turn_reward: Float[jax.Array, "E K"]
    turn_valid: Bool[jax.Array, "E K"]
    turn_in_loss: Bool[jax.Array, "E K"]
    state: Int[jax.Array, "E K"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The two halves. Rows may be sharded; the table is replicated."""

    tokens: Tokens
    episodes: Episodes


def trained(tokens: Tokens, table: Episodes) -> Bool[jax.Array, "B T"]:
    """Tokens in the loss: sampled by the policy, and allowed as tokens, as turns and as episodes."""
    return tokens.mask & tokens.in_loss & table.in_loss[tokens.episode] & table.turn_in_loss[tokens.episode, tokens.turn]
