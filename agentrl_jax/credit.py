"""Which tokens the reward is credited to. A credit rule is a pure function: `Batch, Estimates -> Credit`.

Use them with `functools.partial`, or write your own:

    def my_rule(batch, estimates):
        episodes = batch.episodes
        return Credit(on_tokens(batch, my_numbers_per_episode))

Rules over episodes and turns work on the table and lay their numbers on tokens by one gather. Rules over tokens walk the tokens that
the policy wrote, episode after episode (`walk`), so neither tool output nor packing nor a rewritten history can change them.
The kernels do the arithmetic; formulas and sources stand there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.data.batch import Batch
from agentrl_jax.kernels import baselines, returns, turns, units, vtrace
from agentrl_jax.kernels import gae as gae_kernels
from agentrl_jax.kernels import group as kernels
from agentrl_jax.kernels.gae import adaptive_lambda
from agentrl_jax.kernels.group import Baseline, Singleton, Stats, Std
from agentrl_jax.kernels.policy_loss import masked_log_ratio
from agentrl_jax.kernels.whiten import Divisor, whiten


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Estimates:
    """What a credit rule may look at besides the batch; each may be missing.

    reference:      log-probs of the tokens under the reference policy
    proximal:       log-probs under the weights before the update
    values:         critic's value of the state before each token
    bootstrap:      critic's value of the state in which each episode was cut off
    greedy_reward:  reward of the greedy episode on each episode's task
    sum_pi_squared: of the distribution that each token was drawn from
    """

    reference: Float[Array, "B T"] | None = None
    proximal: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None
    bootstrap: Float[Array, " E"] | None = None
    greedy_reward: Float[Array, " E"] | None = None
    sum_pi_squared: Float[Array, "B T"] | None = None

    def need(self, name: str, rule: str) -> Array:
        """The named estimate. Raises ValueError where it is missing."""
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"credit.{rule} needs Estimates.{name}, which nothing in this run makes")
        return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Credit:
    """advantages: what the log-prob of each token is multiplied with, 0 where the policy did not write it.
    returns: what a critic should say of each token, where the rule has one."""

    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"] | None = None


AdvantageFn = Callable[[Batch, Estimates], Credit]


# --- from the table to tokens ---------------------------------------------------------------------------------------------------


def on_tokens(batch: Batch, per_episode: Float[Array, " E"]) -> Float[Array, "B T"]:
    """Lay one number per episode on every token that the policy wrote in it."""
    return jnp.where(batch.tokens.mask, per_episode[batch.tokens.episode], 0.0)


def on_turns(batch: Batch, per_turn: Float[Array, "E K"]) -> Float[Array, "B T"]:
    """Lay one number per turn on every token that the policy wrote in it."""
    return jnp.where(batch.tokens.mask, per_turn[batch.tokens.episode, batch.tokens.turn], 0.0)


def actions(batch: Batch) -> Int[Array, " E"]:
    """Tokens that the policy wrote in each episode."""
    tokens = batch.tokens
    return jax.ops.segment_sum(tokens.mask.astype(jnp.int32).ravel(), tokens.episode.ravel(), batch.episodes.group.shape[0])


def turn_rewards(batch: Batch) -> Float[Array, "E K"]:
    """Reward of each turn; that of the episode arrives at its last."""
    e = batch.episodes
    last = e.turn_exists & (jnp.cumsum(e.turn_exists, axis=1) == jnp.sum(e.turn_exists, axis=1, keepdims=True))
    return e.turn_reward + jnp.where(last, e.reward[:, None], 0.0)


class Walk(NamedTuple):
    """The policy's tokens, one episode after the other, each in the order it was written: one row of N = B * T, filler at the end.

    place:   where each token of the batch is, N where the policy did not write it
    mask:    which places are taken
    episode: whose token it is
    turn:    of which turn
    last:    the last token of its episode
    reward:  that arrives with it: of the turn at its last token, of the episode at its last token
    """

    place: Int[Array, "B T"]
    mask: Bool[Array, "1 N"]
    episode: Int[Array, "1 N"]
    turn: Int[Array, "1 N"]
    last: Bool[Array, "1 N"]
    reward: Float[Array, "1 N"]

    def lay(self, x: Array) -> Array:
        """[B, T] to [1, N]."""
        return _laid(self.place, x)

    def back(self, x: Array) -> Array:
        """[1, N] to [B, T], 0 where the policy did not write."""
        return x[0].at[self.place].get(mode="fill", fill_value=0)


def walk(batch: Batch) -> Walk:
    """All tokens that the policy wrote, in order."""
    tokens, e = batch.tokens, batch.episodes
    count = actions(batch)
    n, total = tokens.mask.size, jnp.sum(count)
    place = jnp.where(tokens.mask, (jnp.cumsum(count) - count)[tokens.episode] + tokens.action, n)
    number = jnp.arange(n)[None]
    episode, turn = _laid(place, tokens.episode), _laid(place, tokens.turn)
    mask = number < total
    last = mask & ((number + 1 == total) | (jnp.roll(episode, -1) != episode))
    turn_end = last | mask & (jnp.roll(turn, -1) != turn)
    reward = jnp.where(turn_end, e.turn_reward[episode, turn], 0.0) + jnp.where(last, e.reward[episode], 0.0)
    return Walk(place, mask, episode, turn, last, reward)


def _laid(place: Int[Array, "B T"], x: Array) -> Array:
    return jnp.zeros((1, x.size), x.dtype).at[0, place.ravel()].set(x.ravel(), mode="drop")


# --- the reward of an episode against its group ---------------------------------------------------------------------------------


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


# --- over the batch -------------------------------------------------------------------------------------------------------------


def _whitened(batch: Batch, x: Float[Array, "B T"], divisor: Divisor, eps: float) -> Float[Array, "B T"]:
    """Over all tokens that the policy wrote in episodes that count."""
    mask = batch.tokens.mask & batch.episodes.in_stats[batch.tokens.episode]
    return whiten(x, mask, divisor=divisor, eps=eps, eps_in="variance")


def reinforce_pp(batch: Batch, estimates: Estimates, *, gamma: float = 1.0, divisor: Divisor = "population", eps: float = 1e-8) -> Credit:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): returns of tokens, whitened over the batch. Tool output costs no discount."""
    del estimates
    line = walk(batch)
    to_go = returns.discounted_return(line.reward, line.mask, discount=jnp.where(line.last, 0.0, gamma))
    return Credit(_whitened(batch, line.back(to_go), divisor, eps))


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


# --- turns ----------------------------------------------------------------------------------------------------------------------


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


# --- a critic -------------------------------------------------------------------------------------------------------------------


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
    cut, behind = _cut(batch, estimates, line, bootstrap)
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
    return Credit(_whitened(batch, advantages, "population", 1e-8) if normalise else advantages, line.back(found.returns))


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
    cut, behind = _cut(batch, estimates, line, bootstrap)
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


def _cut(batch: Batch, estimates: Estimates, line: Walk, bootstrap: bool) -> tuple[Bool[Array, "1 N"], Float[Array, "1 N"]]:
    """Where an episode was cut off and the value behind; nowhere without `bootstrap`."""
    if not bootstrap:
        return jnp.zeros_like(line.mask), jnp.zeros_like(line.reward)
    return line.last & batch.episodes.truncated[line.episode], estimates.need("bootstrap", "gae")[line.episode]
