"""AReaL's losses, KL estimator and approximations of the proximal policy."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import policy_loss, reduce, sequence_loss, units
from agentrl_jax.kernels.kl import kl
from agentrl_jax.kernels.proximal import proximal_log_prob
from agentrl_jax.kernels.value_loss import value_loss
from tests.golden.adapter import adapter


@adapter("areal.kl_estimator")
def kl_estimator(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    limit = 10.0 if p["apply_clamp"] else None
    return {"kl": kl(x["log_probs"] - x["log_probs_base"], estimator=p["kl_estimator"], max_log_ratio=None, max_value=limit)}


@adapter("areal.prox_logp_approx")
def prox_logp_approx(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    where = (x["logprobs"], x["old_logp"], x["versions"], p["current_version"])
    return {
        "loglinear": proximal_log_prob(*where, interpolation="log"),
        "linear": proximal_log_prob(*where, interpolation="linear", floor=1e-10),
        "rollout": proximal_log_prob(*where, interpolation="behaviour"),
    }


@adapter("areal.critic_loss")
def critic_loss(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(x["loss_mask"])
    value, target, old = (jnp.asarray(x[name]) for name in ("value", "target_value", "old_value"))
    huber = 10.0 if p["loss_fn_type"] == "huber" else None
    per_token = value_loss(value, target, mask, old=old, clip=p["value_eps_clip"], huber=huber)
    return {"loss": reduce.weighted_sum(per_token, reduce.token_weights(mask))}


@adapter("areal.sapo_loss")
def sapo_loss(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask, unit = jnp.asarray(x["loss_mask"]), units.rows(x["loss_mask"].shape)
    advantage = jnp.where(mask, x["advantages"], 0.0)
    log_ratio = policy_loss.masked_log_ratio(jnp.asarray(x["logprobs"]), jnp.asarray(x["old_logprobs"]), mask, clamp=None)
    if p["importance_sampling_level"] == "sequence":
        log_ratio = sequence_loss.sequence_log_ratio(log_ratio, mask, unit)
        advantage = units.unit_mean(advantage, mask, unit)
    per_token = policy_loss.sapo(log_ratio, advantage, tau_positive=p["tau_pos"], tau_negative=p["tau_neg"])
    return {"loss": reduce.weighted_sum(per_token, reduce.token_weights(mask))}
