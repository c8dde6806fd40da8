"""AReaL's losses, KL estimator and approximations of the proximal policy."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import correction, diagnostics, policy_loss, reduce, sequence_loss, units
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
    mask = jnp.asarray(x["loss_mask"])
    advantage = jnp.where(mask, x["advantages"], 0.0)
    log_ratio = policy_loss.masked_log_ratio(jnp.asarray(x["logprobs"]), jnp.asarray(x["old_logprobs"]), mask, clamp=None)
    if p["importance_sampling_level"] == "sequence":
        log_ratio = sequence_loss.sequence_log_ratio(log_ratio, mask, None)
        advantage = units.unit_mean(advantage, mask)
    per_token = policy_loss.sapo(log_ratio, advantage, tau_positive=p["tau_pos"], tau_negative=p["tau_neg"])
    return {"loss": reduce.weighted_sum(per_token, reduce.token_weights(mask))}


@adapter("areal.ppo_actor_loss")
def ppo_actor_loss(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(x["loss_mask"])
    new, proximal, behaviour, advantage = (
        jnp.where(mask, x[name], 0.0) for name in ("logprobs", "proximal_logprobs", "old_logprobs", "advantages")
    )
    staleness = policy_loss.masked_log_ratio(proximal, behaviour, mask, clamp=None)
    found, weight, kept = {}, jnp.ones_like(new), mask
    if p["rejection_sampling"]:
        weight, kept, changed = rejection(staleness, mask, **p["rejection_sampling"])
        weight = jnp.where(kept, weight, 0.0)
        found = {"behave_imp_weight": weight, "filtered_fraction": diagnostics.summary(changed, mask).mean}
    log_ratio = policy_loss.masked_log_ratio(new, proximal, kept, clamp=None)
    if p["importance_sampling_level"] == "sequence":
        log_ratio = sequence_loss.sequence_log_ratio(log_ratio, kept, None)
        advantage = units.unit_mean(advantage, kept)
    low, high = p["eps_clip"], p["eps_clip"] if p["eps_clip_higher"] is None else p["eps_clip_higher"]
    per_token = policy_loss.decoupled_ppo(log_ratio, advantage, weight, clip_low=low, clip_high=high, dual_clip=p["c_clip"])
    clipped = policy_loss.clipped(log_ratio, advantage, clip_low=low, clip_high=high)
    dual = policy_loss.dual_clipped(log_ratio, advantage, dual_clip=p["c_clip"] or jnp.inf)
    return found | {
        "loss": reduce.weighted_sum(per_token, reduce.token_weights(mask, keep=kept)),
        "n_clipped": diagnostics.summary(clipped, kept).total,
        "n_dual_clipped": diagnostics.summary(dual, kept).total,
    }


def rejection(
    log_ratio: Any, mask: Any, *, level: str, action: str, metric: str, upper: float, lower: float | None = None, agg: str = ""
) -> tuple[Any, Any, Any]:
    """Weights, what is kept, and what is rejected or has a clamped weight. The weight of a ratio by sequence is its geometric mean."""
    over: Any = agg if level == "sequence" else "token"
    of_weight: correction.Level = "mean" if level == "sequence" and metric == "ratio" else "token"
    raw = correction.importance_weight(log_ratio, mask, level=of_weight, mode="raw", max_log_ratio=None)
    if action == "clamp":
        weight = correction.importance_weight(log_ratio, mask, level=of_weight, mode="clamp", lower=lower, upper=upper, max_log_ratio=None)
        return weight, mask, weight != raw
    if metric == "ratio":
        inside = correction.keep(log_ratio, mask, level=over, lower=lower, upper=upper)
    else:
        estimate = kl(log_ratio, estimator=metric.removeprefix("kl_"), max_log_ratio=None)  # pyright: ignore[reportArgumentType]
        inside = correction.within(estimate, mask, level=over, lower=lower, upper=upper)
    return raw, mask & inside, ~inside
