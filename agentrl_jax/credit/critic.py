"""Credit with a critic: its values come in `Estimates.values`."""

from typing import Literal

import jax.numpy as jnp

from agentrl_jax.credit.base import Credit, Estimates, actions, cut_off, on_turns, turn_rewards, walk, whitened
from agentrl_jax.data.batch import Batch
from agentrl_jax.kernels import gae as gae_kernels
from agentrl_jax.kernels import turns, units, vtrace
from agentrl_jax.kernels.gae import adaptive_lambda
from agentrl_jax.kernels.policy_loss import masked_log_ratio


def gae(
    batch: Batch,
    estimates: Estimates,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_lam: float | None = None,
    adaptive: float | None = None,
    bootstrap: bool = False,
    normalise: bool = False,
) -> Credit:
    """GAE over the tokens that the policy wrote (`kernels.gae.gae`); rewards of turns arrive at their last tokens (MT-PPO).

    value_lam: lambda of the critic's targets, if it is another one
    adaptive:  alpha of a lambda that grows with the episode's length instead of `lam` (`kernels.gae.adaptive_lambda`)
    bootstrap: episodes that ran into a limit go on with `Estimates.bootstrap`; otherwise they have terminated
    normalise: advantages are whitened over the batch's tokens
    """
    line, e = walk(batch), batch.episodes
    value = line.lay(estimates.need("values", "gae"))
    lambdas = lam if adaptive is None else adaptive_lambda(actions(batch), alpha=adaptive)[line.episode].astype(value.dtype)
    cut, behind = cut_off(batch, estimates, line, bootstrap)
    found = gae_kernels.gae(
        line.reward,
        value,
        line.mask,
        discount=jnp.where(line.last & ~cut, 0.0, gamma),
        lam=lambdas,
        value_lam=value_lam,
        truncated=cut,
        bootstrap_value=behind,
    )
    counted = line.mask & e.in_stats[line.episode]
    advantages = line.back(jnp.where(counted, found.advantages, 0.0))
    return Credit(whitened(batch, advantages, "population", 1e-8) if normalise else advantages, line.back(found.returns))


def turn_gae(
    batch: Batch, estimates: Estimates, *, gamma: float = 1.0, lam: float = 1.0, value_at: Literal["first", "last"] = "first"
) -> Credit:
    """GAE over turns: all tokens of a turn share its advantage, and its value is that at its first token, of the state before the
    action (VAGEN; "last" has seen the action)."""
    e, tokens = batch.episodes, batch.tokens
    values = estimates.need("values", "turn_gae")
    e_k = (e.turn_exists.shape[0], e.turn_exists.shape[1])
    value = turns.to_turns(values, tokens.mask, tokens.episode, tokens.turn, shape=e_k, take=value_at)
    found = gae_kernels.gae(turn_rewards(batch), value, e.turn_exists, discount=gamma, lam=lam)
    counted = jnp.where(e.in_stats[:, None], found.advantages, 0.0)
    return Credit(on_turns(batch, counted), on_turns(batch, found.returns))


def bi_level_gae(
    batch: Batch,
    estimates: Estimates,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_gamma: float = 0.95,
    turn_lam: float = 1.0,
    value_at: Literal["first", "last"] = "last",
) -> Credit:
    """GAE over turns, then over the tokens inside each (`kernels.turns.bi_level_gae`: RAGEN, VAGEN)."""
    line, e = walk(batch), batch.episodes
    # One more part for the filler, which must not share the last turn.
    part = units.runs(line.episode, line.turn, line.mask.astype(jnp.int32))
    final = line.turn == jnp.sum(e.turn_exists, axis=1, dtype=jnp.int32)[line.episode] - 1
    found = turns.bi_level_gae(
        line.reward,
        line.lay(estimates.need("values", "bi_level_gae")),
        line.mask,
        part,
        discount=gamma,
        lam=lam,
        turn_discount=jnp.where(final, 0.0, turn_gamma),
        turn_lam=turn_lam,
        value_at=value_at,
    )
    counted = line.mask & e.in_stats[line.episode]
    return Credit(line.back(jnp.where(counted, found.advantages, 0.0)), line.back(found.returns))


def v_trace(
    batch: Batch,
    estimates: Estimates,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    bootstrap: bool = False,
) -> Credit:
    """V-trace (https://arxiv.org/abs/1802.01561) over the tokens that the policy wrote: GAE for those an older policy sampled."""
    line, e, tokens = walk(batch), batch.episodes, batch.tokens
    log_ratio = masked_log_ratio(estimates.need("proximal", "v_trace"), tokens.logprob, tokens.mask)
    value = line.lay(estimates.need("values", "v_trace"))
    cut, behind = cut_off(batch, estimates, line, bootstrap)
    found = vtrace.vtrace(
        line.lay(log_ratio),
        line.reward,
        value,
        line.mask,
        discount=jnp.where(line.last & ~cut, 0.0, gamma),
        lam=lam,
        clip_rho=clip_rho,
        clip_c=clip_c,
        truncated=cut,
        bootstrap_value=behind,
    )
    counted = line.mask & e.in_stats[line.episode]
    return Credit(line.back(jnp.where(counted, found.advantages, 0.0)), line.back(value + found.errors))
