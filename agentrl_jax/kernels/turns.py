"""Credit for turns: between tokens [B, T] and the table of turns [E, K], and advantages over both levels.

`episode` and `turn` name the table entry of each token; the tokens of one turn stand together in one row. GAE over turns is
`gae.gae(reward, value, exists, ..)` on the table, with `value` from `to_turns(.., take="first")`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.gae import Gae, anchored, gae
from agentrl_jax.kernels.returns import At, discounted_return, edge
from agentrl_jax.kernels.scan import BehindCut, Cut, Factor
from agentrl_jax.kernels.units import runs, unit_sum


def to_turns(
    x: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    episode: Int[Array, "B T"],
    turn: Int[Array, "B T"],
    *,
    shape: tuple[int, int],
    take: Literal["sum", "first", "last"] = "sum",
) -> Float[Array, "E K"]:
    """One number per turn: the sum over its tokens in `mask`, or what stands at the first or the last of them. 0 without any.

    Args:
        shape: E, K.
        take: for the value of a turn, "first" is the state before the action; "last" has seen all of the action but its last token
            (VAGEN has both).
    """
    turns = shape[0] * shape[1]
    slot = jnp.where(mask, episode * shape[1] + turn, turns).ravel()
    if take == "sum":
        return jax.ops.segment_sum(x.ravel(), slot, turns + 1)[:-1].reshape(shape)
    if take not in ("first", "last"):
        raise ValueError(f"take {take!r}: choose sum, first or last")
    outermost = jax.ops.segment_min if take == "first" else jax.ops.segment_max
    at = outermost(jnp.arange(x.size), slot, turns + 1)[:-1]
    there = (at >= 0) & (at < x.size)  # without a token it is the largest or the smallest integer
    return jnp.where(there, x.ravel()[jnp.where(there, at, 0)], 0.0).reshape(shape)


def to_tokens(
    per_turn: Float[Array, "E K"],
    mask: Bool[Array, "B T"],
    episode: Int[Array, "B T"],
    turn: Int[Array, "B T"],
    *,
    at: Literal["all"] | At = "all",
) -> Float[Array, "B T"]:
    """A turn's number on all of its tokens in `mask`, or on the first or the last of them; 0 elsewhere.

    `at="last"` makes the token rewards of MT-PPO (https://arxiv.org/abs/2505.11821, Eq. 9) out of the rewards of turns, the outcome
    added to that of the last turn.
    """
    where = mask if at == "all" else edge(mask, runs(episode, turn), at)
    return jnp.where(where, per_turn[jnp.where(where, episode, 0), jnp.where(where, turn, 0)], 0.0)


def bi_level_gae(
    reward: Float[Array, "B T"],
    value: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    turn: Int[Array, "B T"],
    *,
    discount: Factor = 1.0,
    lam: Factor = 1.0,
    turn_discount: Factor = 1.0,
    turn_lam: Factor = 1.0,
    value_at: At = "last",
    truncated: Cut | None = None,
    bootstrap_value: BehindCut | None = None,
) -> Gae:
    """GAE over turns, whose returns are the rewards of a GAE over the tokens inside each turn.

    1. over turns: reward of a turn = sum of its tokens' rewards, value = that at one of its tokens, discount `turn_discount`
    2. inside a turn: its last token has the reward `A_turn + V_turn`, and nothing flows in from behind it

    Turn-aware GAE of VAGEN (https://arxiv.org/abs/2510.16907, "Bi-Level GAE") and RAGEN (public code).

    Args:
        reward: on any token of a turn, or behind it.
        turn: number of the turn of each token in its row, below T, one part for each turn (`units.runs(segment, turn)`). An explicit
            array: a turn whose reward is 0 is a turn.
        discount, lam: inside turns. turn_discount, turn_lam: over turns.
        value_at: the value of a turn is that at the "last" token (RAGEN) or the "first" (VAGEN: of the state before the action).
        truncated, bootstrap_value: as in `gae.gae`, over turns.
    """
    anchor, end = edge(mask, turn, value_at), edge(mask, turn, "last")
    of_turn = unit_sum(anchored(reward, mask), turn)
    over_turns = gae(
        jnp.where(anchor, of_turn, 0.0),
        value,
        anchor,
        discount=turn_discount,
        lam=turn_lam,
        truncated=truncated,
        bootstrap_value=bootstrap_value,
    )
    target = unit_sum(over_turns.returns, turn)
    inside = jnp.where(end, 0.0, discount)
    return gae(jnp.where(end, target, 0.0), value, mask, discount=inside, lam=lam)


def mt_grpo(
    turn_advantage: Float[Array, "E K"],
    outcome_advantage: Float[Array, " E"],
    exists: Bool[Array, "E K"],
    *,
    weight: float = 1.0,
    on: Literal["outcome", "turn"] = "outcome",
) -> Float[Array, "E K"]:
    """Advantage of each turn from the turns' own advantages and that of the outcome (MT-GRPO, https://arxiv.org/abs/2505.11821).

    on="outcome"   the paper (Eq. 5-6, App. D): `A_k = sum_{l=k}^{K-1} a^(l-k) A^I_l + a^(K-k) A^O`: a discounted return of which the
                   last term is the outcome
    on="turn"      its public code: `A_k = A^O + a A^I_k` before the last turn, where that code has A^I_1 alone

    K is each episode's own number of turns, and A^I of its last turn is not used: what the last turn earns is the outcome.

    Args:
        turn_advantage: A^I, the reward of a turn relative to those of its group at the same turn: `jax.vmap(group_relative,
            (1, None, 1), 1)(turn_reward, group, in_stats)`.
        outcome_advantage: A^O, from `group_relative`.
        weight: a; alpha of the paper, turn_advantage_coef of the code.
    """
    count = jnp.cumsum(exists, axis=1)
    last = exists & (count == count[:, -1:])
    outcome = jnp.broadcast_to(outcome_advantage[:, None], turn_advantage.shape)
    if on == "outcome":
        return discounted_return(jnp.where(last, outcome, turn_advantage), exists, discount=weight, off_step="drop")
    if on == "turn":
        return jnp.where(exists, outcome + jnp.where(last | ~exists, 0.0, weight * turn_advantage), 0.0)
    raise ValueError(f"on {on!r}: choose outcome or turn")
