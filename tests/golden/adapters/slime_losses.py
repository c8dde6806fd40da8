"""slime's policy losses, per token."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import policy_loss, sequence_loss
from tests.golden.adapter import adapter

GRADIENT = {"grad_log_probs": ("log_probs", "pg_losses")}


def log_ratio(inputs: dict[str, Any]) -> Any:
    """slime's `ppo_kl` is the negative of this; it clamps nothing."""
    new, old = jnp.asarray(inputs["log_probs"]), jnp.asarray(inputs["old_log_probs"])
    return policy_loss.masked_log_ratio(new, old, jnp.ones(new.shape, bool), clamp=None)


@adapter("slime.policy_loss", gradients=GRADIENT)
def ppo(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    advantage, clips = jnp.asarray(inputs["advantages"]), {"clip_low": params["eps_clip"], "clip_high": params["eps_clip_high"]}
    return {
        "pg_losses": policy_loss.ppo_clip(log_ratio(inputs), advantage, dual_clip=params.get("eps_clip_c"), **clips),
        "clipfrac": policy_loss.clipped(log_ratio(inputs), advantage, **clips),
    }


@adapter("slime.cispo_loss", gradients=GRADIENT)
def cispo(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """eps_clip of 1 is no lower bound."""
    bounds = {"min_ratio": 1.0 - params["eps_clip"], "max_ratio": 1.0 + params["eps_clip_high"]}
    new, advantage = jnp.asarray(inputs["log_probs"]), jnp.asarray(inputs["advantages"])
    return {
        "pg_losses": policy_loss.cispo(new, log_ratio(inputs), advantage, **bounds),
        "clipfrac": policy_loss.outside(log_ratio(inputs), **bounds),
    }


@adapter("slime.gspo_kl")
def gspo_kl(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(inputs["loss_mask"]) != 0
    ratio = policy_loss.masked_log_ratio(jnp.asarray(inputs["log_probs"]), jnp.asarray(inputs["old_log_probs"]), mask, clamp=None)
    rows, width = mask.shape
    return {"ppo_kl": -sequence_loss.sequence_log_ratio(ratio, mask, None)}
