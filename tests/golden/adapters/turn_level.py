"""Credit for turns in RAGEN, VAGEN and verl-agent."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import returns, turns
from agentrl_jax.kernels.gae import gae
from agentrl_jax.kernels.scan import time_order
from agentrl_jax.kernels.whiten import moments, standardise
from tests.golden.adapter import adapter
from tests.golden.adapters.verl_returns import whitened


@adapter("ragen.bi_level_gae")
def ragen(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """A turn ends where there is a reward."""
    mask, ends = jnp.asarray(i["loss_mask"], bool), np.asarray(i["token_level_rewards"]) != 0
    turn = jnp.asarray(np.cumsum(ends, 1) - ends)
    out = turns.bi_level_gae(
        jnp.asarray(i["token_level_rewards"]),
        jnp.asarray(i["values"]),
        mask,
        turn,
        discount=p["gamma"],
        lam=p["lam"],
        turn_discount=p["high_level_gamma"],
        turn_lam=p["lam"],
    )
    return {"advantages": whitened(out.advantages, mask), "returns": out.returns}


def vagen(i: dict[str, Any], p: dict[str, Any], at: returns.At) -> dict[str, Any]:
    """A row is a turn. A turn that is there twice counts once."""
    names = [f"{g} {t}" for g, t in zip(i["group_idx"], i["traj_idx"], strict=True)]
    episode, turn = np.unique(names, return_inverse=True)[1], np.asarray(i["turn_idx"])
    first = np.unique(np.stack([episode, turn]), axis=1, return_index=True)[1]
    shape = (int(episode.max()) + 1, int(turn.max()) + 1)
    exists = jnp.zeros(shape, bool).at[episode, turn].set(True)
    mask = jnp.asarray(i["response_mask"], bool)
    unique = mask & jnp.zeros(len(turn), bool).at[first].set(True)[:, None]
    where = [jnp.broadcast_to(jnp.asarray(x)[:, None], mask.shape) for x in (episode, turn)]
    reward = turns.to_turns(jnp.asarray(i["token_level_scores"]), unique, *where, shape=shape)
    value = turns.to_turns(jnp.asarray(i["values"]), unique, *where, shape=shape, take=at)
    out = gae(reward, value, exists, discount=p["gamma"], lam=p["lam"])
    advantage = turns.to_tokens(out.advantages, mask, *where)
    anchor = returns.edge(mask, jnp.zeros(mask.shape, int), at)
    whole = standardise(advantage, *moments(advantage, unique, divisor="sample"), eps=1e-8, eps_in="variance")
    target = turns.to_tokens(out.returns, mask, *where, at=at)
    return {"advantages": whole, "returns": jnp.where(anchor, target, p["ignore_value"])}


@adapter("vagen.no_concat_gae_last")
def vagen_last(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    return vagen(i, p, "last")


@adapter("vagen.no_concat_gae_first")
def vagen_first(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    return vagen(i, p, "first")


@adapter("gigpo.step_returns")
def step_returns(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """Rows of a trajectory stand in time order, those of different ones are mixed."""
    reward, episode = jnp.asarray(i["rewards"]), jnp.asarray(np.unique(i["traj_uid"], return_inverse=True)[1])
    order, last = time_order(episode, jnp.arange(len(reward)))
    sorted_ = returns.discounted_return(reward[order], jnp.ones(len(reward), bool), discount=jnp.where(last, 0.0, p["gamma"]))
    return {"step_rewards": jnp.zeros_like(reward).at[order].set(sorted_)}
