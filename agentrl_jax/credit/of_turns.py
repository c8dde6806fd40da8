"""Credit that differs from turn to turn, without a critic."""

from typing import Literal

import jax
from jaxtyping import Array, Bool, Float

from agentrl_jax.credit.base import Credit, Estimates, on_turns, turn_rewards
from agentrl_jax.data.batch import Batch
from agentrl_jax.kernels import group as kernels
from agentrl_jax.kernels import returns, turns
from agentrl_jax.kernels.group import Singleton, Stats, Std


def gigpo(
    batch: Batch,
    estimates: Estimates,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    std: Std = "population",
    eps: float = 0.0,
    singleton: Singleton = "zero",
    stats: Stats = "episodes",
) -> Credit:
    """GiGPO (https://arxiv.org/abs/2505.10978, Eq. 3, 5-8): `A = A^E + omega A^S` (`kernels.group.gigpo`).

    A^E compares whole episodes of a group; A^S compares the turns of the group that started in the same state by their
    discounted returns. The episode's reward arrives at its last turn. Without repeated states this is `grpo`.
    """
    del estimates
    e = batch.episodes
    to_go = kernels.turn_returns(turn_rewards(batch), e.turn_exists, gamma=gamma)
    advantage = kernels.gigpo(
        e.reward, to_go, e.group, e.state, e.turn_exists, e.in_stats, omega=omega, std=std, eps=eps, singleton=singleton, stats=stats
    )
    return Credit(on_turns(batch, advantage))


def mt_grpo(
    batch: Batch,
    estimates: Estimates,
    *,
    weight: float = 1.0,
    on: Literal["outcome", "turn"] = "outcome",
    std: Std = "population",
    eps: float = 0.0,
) -> Credit:
    """MT-GRPO (https://arxiv.org/abs/2505.11821): rewards of turns and the outcome, each relative to its group (`kernels.turns`)."""
    del estimates
    e = batch.episodes

    def of_turn(reward: Float[Array, " E"], exists: Bool[Array, " E"]) -> Float[Array, " E"]:
        return kernels.group_relative(reward, e.group, e.in_stats & exists, std=std, eps=eps)

    per_turn = jax.vmap(of_turn, in_axes=1, out_axes=1)(e.turn_reward, e.turn_exists)
    outcome = kernels.group_relative(e.reward, e.group, e.in_stats, std=std, eps=eps)
    return Credit(on_turns(batch, turns.mt_grpo(per_turn, outcome, e.turn_exists, weight=weight, on=on)))


def decayed(batch: Batch, estimates: Estimates, *, gamma: float = 0.95) -> Credit:
    """Kimi-Researcher's gamma-decay: each turn of an episode with a positive reward has it times gamma^(turns to the last), so that
    shorter successes count more; other episodes have theirs as it is."""
    del estimates
    e = batch.episodes
    counted = e.turn_exists & e.in_stats[:, None]
    return Credit(on_turns(batch, returns.decayed_outcome(e.reward, counted, gamma=gamma, where=e.reward > 0)))
