"""What a credit rule is, and how its numbers get from episodes and turns to tokens and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.data.batch import Batch
from agentrl_jax.kernels.whiten import Divisor, whiten

_CRITIC = "set critic=Critic() in the experiment"
_REMEDIES = {"values": _CRITIC, "bootstrap": _CRITIC, "reference": "set reference=held in the experiment"}


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
            remedy = _REMEDIES.get(name, "hand it in from a rule of your own")
            raise ValueError(f"credit.{rule} needs Estimates.{name}, which nothing in this run makes; {remedy}")
        return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Credit:
    """advantages: what the log-prob of each token is multiplied with, 0 where the policy did not write it.
    returns: what a critic should say of each token, where the rule has one."""

    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"] | None = None


AdvantageFn = Callable[[Batch, Estimates], Credit]


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


def whitened(batch: Batch, x: Float[Array, "B T"], divisor: Divisor, eps: float) -> Float[Array, "B T"]:
    """Over all tokens that the policy wrote in episodes that count."""
    mask = batch.tokens.mask & batch.episodes.in_stats[batch.tokens.episode]
    return whiten(x, mask, divisor=divisor, eps=eps, eps_in="variance")


def cut_off(batch: Batch, estimates: Estimates, line: Walk, bootstrap: bool) -> tuple[Bool[Array, "1 N"], Float[Array, "1 N"]]:
    """Where an episode was cut off and the value behind; nowhere without `bootstrap`."""
    if not bootstrap:
        return jnp.zeros_like(line.mask), jnp.zeros_like(line.reward)
    return line.last & batch.episodes.truncated[line.episode], estimates.need("bootstrap", "gae")[line.episode]
