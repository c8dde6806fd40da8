"""ROLL's policy losses, per token."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import policy_loss
from tests.golden.adapter import adapter

GRADIENT = {"grad_log_probs": ("log_probs", "loss_mat")}


def tokens(inputs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """log-prob, log-ratio and advantage; ROLL's losses know no mask and no clamp."""
    new, old = jnp.asarray(inputs["log_probs"]), jnp.asarray(inputs["old_log_probs"])
    return new, policy_loss.masked_log_ratio(new, old, jnp.ones(new.shape, bool), clamp=None), jnp.asarray(inputs["advantages"])


@adapter("roll.pg_vanilla", gradients=GRADIENT)
def vanilla(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    new, _, advantage = tokens(inputs)
    return {"loss_mat": policy_loss.reinforce(new, advantage)}


@adapter("roll.pg_ppo", gradients=GRADIENT)
def ppo(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Its dual clip is at 1 + 2 clip."""
    _, log_ratio, advantage = tokens(inputs)
    clip = params["pg_clip"]
    low, high = (params["pg_clip_low"], params["pg_clip_high"]) if params["use_pg_clip_range"] else (clip, clip)
    dual = 1.0 + 2.0 * clip if params["dual_clip_loss"] else None
    return {"loss_mat": policy_loss.ppo_clip(log_ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual)}


@adapter("roll.pg_tis", gradients=GRADIENT)
def tis(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    bounds = {"min_ratio": params["tis_lower_bound"], "max_ratio": params["tis_upper_bound"]}
    return {"loss_mat": policy_loss.cispo(*tokens(inputs), **bounds)}


@adapter("roll.pg_cispo", gradients=GRADIENT)
def cispo(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    bounds = {"min_ratio": 1.0 - params["cispo_epsilon_low"], "max_ratio": 1.0 + params["cispo_epsilon_high"]}
    return {"loss_mat": policy_loss.cispo(*tokens(inputs), **bounds, drop_clipped=params["cispo_use_unified_mask"])}


@adapter("roll.pg_topr", gradients=GRADIENT)
def topr(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """A row is positive where its score is above 0."""
    new, log_ratio, advantage = tokens(inputs)
    positive = jnp.broadcast_to(jnp.asarray(inputs["episode_scores"])[:, None] > 0, new.shape)
    weights = {"positive_weight": params["topr_positive_weight"], "negative_weight": params["topr_negative_weight"]}
    return {"loss_mat": policy_loss.topr(new, log_ratio, advantage, positive, **weights)}


@adapter("roll.pg_kimi15", gradients=GRADIENT)
def kimi15(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {"loss_mat": policy_loss.dro(*tokens(inputs), beta=params["kimi15_tau"])}
