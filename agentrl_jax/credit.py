"""Which tokens the reward is credited to. A credit rule is a pure function: `Batch, Estimates -> Credit`.

Use them with `functools.partial`, or write your own:

    def my_rule(batch, estimates):
        episodes = batch.episodes
        return Credit(on_tokens(batch, my_numbers_per_episode))
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.data.batch import Batch
from agentrl_jax.kernels import group as kernels
from agentrl_jax.kernels.group import Baseline, Singleton, Std


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Estimates:
    """What a credit rule may look at besides the batch; each may be missing.

    reference: log-probs of the tokens under the reference policy
    """

    reference: Float[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Credit:
    """advantages: what the log-prob of each token is multiplied with, 0 where the policy did not write it."""

    advantages: Float[Array, "B T"]


AdvantageFn = Callable[[Batch, Estimates], Credit]


def on_tokens(batch: Batch, per_episode: Float[Array, " E"]) -> Float[Array, "B T"]:
    """Lay one number per episode on every token that the policy wrote in it."""
    return jnp.where(batch.tokens.mask, per_episode[batch.tokens.episode], 0.0)


def on_turns(batch: Batch, per_turn: Float[Array, "E K"]) -> Float[Array, "B T"]:
    """Lay one number per turn on every token that the policy wrote in it."""
    return jnp.where(batch.tokens.mask, per_turn[batch.tokens.episode, batch.tokens.turn], 0.0)


def grpo(
    batch: Batch,
    estimates: Estimates,
    *,
    std: Std = "population",
    baseline: Baseline = "mean",
    eps: float = 0.0,
    singleton: Singleton = "zero",
) -> Credit:
    """One advantage per episode from its group, spread over every token the policy wrote (`kernels.group.group_relative`)."""
    del estimates
    e = batch.episodes
    advantage = kernels.group_relative(e.reward, e.group, e.in_stats, std=std, baseline=baseline, eps=eps, singleton=singleton)
    return Credit(on_tokens(batch, advantage))


def gigpo(
    batch: Batch, estimates: Estimates, *, omega: float = 1.0, gamma: float = 0.95, std: Std = "population", eps: float = 0.0
) -> Credit:
    """GiGPO (https://arxiv.org/abs/2505.10978, Eq. 3, 5-8): `A = A^E + omega A^S`.

    A^E compares whole episodes of a group; A^S compares the turns of the group that started in the same state by their
    discounted returns. The episode's reward arrives at its last turn. Statistics are over trajectories, as in the paper; its
    public code takes them over step rows. Without repeated states this is `grpo`.
    """
    del estimates
    e = batch.episodes
    last = jnp.cumsum(e.turn_exists, axis=1) == jnp.sum(e.turn_exists, axis=1, keepdims=True)
    reward = e.turn_reward + jnp.where(last & e.turn_exists, e.reward[:, None], 0.0)
    returns = kernels.turn_returns(reward, e.turn_exists, gamma=gamma)
    in_stats = e.turn_exists & e.in_stats[:, None]
    episode = kernels.group_relative(e.reward, e.group, e.in_stats, std=std, eps=eps)
    step = kernels.state_relative(returns, e.state, in_stats, std=std, eps=eps)
    return Credit(on_turns(batch, episode[:, None] + omega * step))
