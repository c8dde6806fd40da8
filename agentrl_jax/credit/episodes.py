"""One reward per episode, against its group or the batch, on all tokens that the policy wrote."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array

from agentrl_jax.credit.base import Credit, Estimates, actions, on_tokens, walk, whitened
from agentrl_jax.data.batch import Batch
from agentrl_jax.kernels import baselines, returns
from agentrl_jax.kernels import group as kernels
from agentrl_jax.kernels.group import Baseline, Singleton, Std
from agentrl_jax.kernels.whiten import Divisor, whiten


def grpo(
    batch: Batch,
    estimates: Estimates,
    *,
    std: Std = "population",
    baseline: Baseline = "mean",
    eps: float = 0.0,
    singleton: Singleton = "zero",
) -> Credit:
    """One advantage per episode from its group, spread over every token the policy wrote (`kernels.group.group_relative`).

    GRPO, and with options Dr. GRPO, RLOO, OPO and others: the table is in `kernels/group.py`. With `baseline="length"` the lengths are
    the tokens that the policy wrote.
    """
    del estimates
    e = batch.episodes
    length = actions(batch).astype(e.reward.dtype) if baseline == "length" else None
    advantage = kernels.group_relative(
        e.reward, e.group, e.in_stats, std=std, baseline=baseline, eps=eps, singleton=singleton, length=length
    )
    return Credit(on_tokens(batch, advantage))


def gpg(batch: Batch, estimates: Estimates, *, informative: Literal["varied", "nonzero"] = "varied") -> Credit:
    """Mean-centred rewards, scaled up for the episodes of the batch that teach nothing (GPG; `kernels.baselines.gpg_scale`)."""
    e = batch.episodes
    scale = baselines.gpg_scale(e.reward, e.group, e.in_stats, informative=informative)
    return Credit(scale * grpo(batch, estimates, std="none").advantages)


def pass_at_k(batch: Batch, estimates: Estimates, *, std: Literal["population", "sample", "none"] = "none", eps: float = 0.0) -> Credit:
    """What the best of the group owes to each member (`kernels.baselines.pass_at_k`)."""
    del estimates
    e = batch.episodes
    return Credit(on_tokens(batch, baselines.pass_at_k(e.reward, e.group, e.in_stats, std=std, eps=eps)))


def max_rl(batch: Batch, estimates: Estimates, *, eps: float = 0.0) -> Credit:
    """Hard tasks weigh more: the distance from the group's mean over that mean (`kernels.baselines.max_rl`)."""
    del estimates
    e = batch.episodes
    return Credit(on_tokens(batch, baselines.max_rl(e.reward, e.group, e.in_stats, eps=eps)))


def gdpo(
    batch: Batch,
    estimates: Estimates,
    *,
    weights: tuple[float, ...] = (1.0,),
    std: Std = "population",
    eps: float = 0.0,
    over: Literal["episodes", "tokens"] = "episodes",
) -> Credit:
    """Every component of the reward relative to its group, then their weighted sum whitened (`kernels.baselines.gdpo`).

    over: what the whitening counts; "tokens" is the authors' code.
    """
    del estimates
    e = batch.episodes
    if len(weights) != e.components.shape[1]:
        raise ValueError(f"credit.gdpo: {len(weights)} weights for {e.components.shape[1]} reward components")
    present = jnp.broadcast_to(e.in_stats[:, None], e.components.shape)
    count = actions(batch).astype(e.reward.dtype) if over == "tokens" else None
    advantage = baselines.gdpo(e.components, jnp.array(weights, e.reward.dtype), e.group, present, std=std, eps=eps, count=count)
    return Credit(on_tokens(batch, advantage))


def remax(batch: Batch, estimates: Estimates) -> Credit:
    """The episode's reward less that of the greedy episode on its task (`kernels.baselines.remax`; rewards of turns count as returns)."""
    line, e = walk(batch), batch.episodes
    to_go = returns.discounted_return(line.reward, line.mask, discount=jnp.where(line.last, 0.0, 1.0))
    ahead = to_go - estimates.need("greedy_reward", "remax")[line.episode]
    return Credit(line.back(jnp.where(line.mask & e.in_stats[line.episode], ahead, 0.0)))


def reinforce_pp(batch: Batch, estimates: Estimates, *, gamma: float = 1.0, divisor: Divisor = "population", eps: float = 1e-8) -> Credit:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): returns of tokens, whitened over the batch. Tool output costs no discount."""
    del estimates
    line = walk(batch)
    to_go = returns.discounted_return(line.reward, line.mask, discount=jnp.where(line.last, 0.0, gamma))
    return Credit(whitened(batch, line.back(to_go), divisor, eps))


def reinforce_pp_baseline(
    batch: Batch,
    estimates: Estimates,
    *,
    over: Literal["tokens", "episodes"] = "episodes",
    centre: bool = True,
    divisor: Divisor = "population",
    eps: float = 1e-8,
) -> Credit:
    """REINFORCE++-baseline: rewards less the mean of their group, whitened over the batch.

    over:   what the whitening counts. "tokens" (verl) gives groups that teach nothing an advantage, where long episodes fail
    centre: False only divides by the std (rllm)
    """
    del estimates
    e = batch.episodes
    centred = kernels.group_relative(e.reward, e.group, e.in_stats, std="none")
    count = actions(batch).astype(e.reward.dtype) if over == "tokens" else None
    advantage = whiten(centred, e.in_stats, count=count, divisor=divisor, eps=eps, eps_in="variance", centre=centre)
    return Credit(on_tokens(batch, advantage))


def optimal_token_baseline(batch: Batch, estimates: Estimates, *, max_actions: int, gamma: float = 1.0) -> Credit:
    """Return of each token less the baseline of least variance over the group's k-th tokens (`kernels.baselines`).

    max_actions: tokens that the policy writes in an episode at most; what is beyond is not credited
    """
    e, tokens = batch.episodes, batch.tokens
    line = walk(batch)
    to_go = line.back(returns.discounted_return(line.reward, line.mask, discount=jnp.where(line.last, 0.0, gamma)))
    energy = baselines.score_energy(
        estimates.need("proximal", "optimal_token_baseline"), estimates.need("sum_pi_squared", "optimal_token_baseline")
    )
    count = e.group.shape[0]
    counts = tokens.mask & e.in_stats[tokens.episode] & (tokens.action < max_actions)
    cell = jnp.where(counts, tokens.episode * max_actions + tokens.action, count * max_actions)

    def dense(x: Array) -> Array:
        return jnp.zeros(count * max_actions, x.dtype).at[cell.ravel()].set(x.ravel(), mode="drop").reshape(count, max_actions)

    found = baselines.optimal_token_baseline(dense(to_go), dense(energy), dense(counts), e.group)
    return Credit(found.ravel().at[cell].get(mode="fill", fill_value=0.0))
