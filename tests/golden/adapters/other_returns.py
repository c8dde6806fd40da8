"""GAE and returns of AReaL, slime and ROLL."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import returns
from agentrl_jax.kernels.gae import gae
from agentrl_jax.kernels.kl import kl, penalised
from agentrl_jax.kernels.policy_loss import masked_log_ratio
from agentrl_jax.kernels.units import runs
from agentrl_jax.kernels.whiten import whiten
from tests.golden.adapter import adapter


@adapter("areal.compute_advantages")
def areal(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """Position t predicts token t + 1; a row without padding counts as cut off at its last token, and that token's value is behind it."""
    attended, shape = jnp.asarray(i["attention_mask"], bool), i["loss_mask"].shape
    mask = jnp.roll(jnp.asarray(i["loss_mask"], bool), -1, 1)
    logprob = jnp.where(mask, jnp.roll(i["logprobs"], -1, 1), 0.0)
    value = jnp.zeros(shape) if i["values"] is None else jnp.asarray(i["values"])
    cut = attended.all(1)
    outcome = returns.reshaped_outcome(jnp.asarray(i["rewards"]), bias=p["reward_bias"], scale=p["reward_scaling"], limit=p["reward_clip"])
    if p["mask_no_eos_with_zero"]:
        outcome = jnp.where(cut, 0.0, outcome)
    ratio = masked_log_ratio(logprob, jnp.asarray(i["ref_logp"]), mask, clamp=None)
    estimate = kl(ratio, estimator=p["kl_estimator"], max_log_ratio=None, max_value=10.0)
    last = jnp.roll(returns.edge(attended, None, "last"), -1, 1)
    kl_rewards = penalised(jnp.zeros(shape), estimate, mask, p["kl_ctl"])
    reward = penalised(jnp.where(last, outcome[:, None], 0.0), estimate, mask, p["kl_ctl"])
    out = gae(
        reward,
        value,
        jnp.ones(shape, bool),
        steps=mask,
        discount=p["discount"],
        lam=p["gae_lambda"],
        truncated=cut,
        bootstrap_value=value[:, -1],
        off_step="drop",
    )
    advantages = whiten(out.advantages, mask, divisor="sample", eps=1e-5) if p["adv_norm"] else out.advantages
    return {
        "advantages": advantages,
        "returns": out.returns,
        "tot_rewards": reward,
        "kl_rewards": kl_rewards,
        "loss_mask_shifted": mask,
        "logprobs_shifted": logprob,
    }


@adapter("slime.gae")
def slime_gae(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """Every token is a step. Padding holds 0."""
    reward = jnp.asarray(i["rewards"])
    out = gae(reward, jnp.asarray(i["values"]), jnp.ones(reward.shape, bool), discount=p["gamma"], lam=p["lambd"])
    return {f"{name}_{how}": x for name, x in out._asdict().items() for how in ("vanilla", "chunked")}


@adapter("slime.reinforce_pp")
def slime_reinforce(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask, estimate = jnp.asarray(i["loss_mask"], bool), jnp.asarray(i["kl"])
    everywhere = jnp.ones(mask.shape, bool)
    outcome = jnp.broadcast_to(jnp.asarray(i["rewards"])[:, None], mask.shape)
    at_end = jnp.where(returns.edge(mask, None, "last"), outcome, 0.0)
    reward = penalised(at_end, estimate, mask, p["kl_coef"])
    return {
        "returns": returns.discounted_return(reward, everywhere, discount=p["gamma"]),
        "baseline_advantages": penalised(outcome, estimate, everywhere, p["kl_coef"]),
        "grpo_returns": outcome,
    }


@adapter("roll.gae_reinforce")
def roll_gae(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    reward = jnp.asarray(i["token_level_rewards"])
    everywhere = jnp.ones(reward.shape, bool)
    out = gae(reward, jnp.asarray(i["values"]), everywhere, discount=p["gamma"], lam=p["lambd"])
    plain = returns.discounted_return(reward, everywhere, discount=p["gamma"])
    return {"gae_advantages": out.advantages, "gae_returns": out.returns, "reinforce_returns": plain}


@adapter("roll.agentic_reinforce_return")
def roll_agentic(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(i["mask"], bool)
    reward = jnp.asarray(i["token_level_rewards"])
    return {"returns": returns.part_return(reward, mask, runs(mask.astype(int)), discount=p["gamma"], take="last")}
