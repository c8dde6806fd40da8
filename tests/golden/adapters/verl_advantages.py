"""verl's advantage estimators."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import baselines
from agentrl_jax.kernels.group import group_relative
from agentrl_jax.kernels.scan import discounted_sum
from agentrl_jax.kernels.units import unit_count, unit_sum
from agentrl_jax.kernels.whiten import whiten
from tests.golden.adapter import adapter


def labels(uid: Any) -> Any:
    """Numbers for group labels."""
    return jnp.asarray(np.unique(uid, return_inverse=True)[1])


def boolean(mask: Any) -> Any:
    return jnp.asarray(mask) != 0


def scores(inputs: dict[str, Any]) -> Any:
    """One reward per row: the sum over all its tokens, masked or not."""
    reward = jnp.asarray(inputs["token_level_rewards"])
    return unit_sum(reward)[:, 0]


def lengths(mask: Any) -> Any:
    return unit_count(boolean(mask), None, jnp.dtype("float64"))[:, 0]


def all_members(group: Any) -> Any:
    return jnp.ones(group.shape, bool)


def on_tokens(per_row: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    advantage = jnp.where(boolean(inputs["response_mask"]), per_row[:, None], 0.0)
    return {"advantages": advantage, "returns": advantage}


def relative(inputs: dict[str, Any], params: dict[str, Any], **options: Any) -> dict[str, Any]:
    group = labels(inputs["uid"])
    return on_tokens(group_relative(scores(inputs), group, all_members(group), **options), inputs)


@adapter("verl.grpo", "verl.grpo_vectorized")
def grpo(inputs, params):
    std = "sample" if params["norm_adv_by_std_in_grpo"] else "none"
    return relative(inputs, params, std=std, eps=params["epsilon"], singleton="raw")


@adapter("verl.rloo")
def rloo(inputs, params):
    return relative(inputs, params, std="none", baseline="leave_one_out", singleton="raw")


@adapter("verl.rloo_vectorized")
def rloo_vectorized(inputs, params):
    return relative(inputs, params, std="none", baseline="leave_one_out")


@adapter("verl.opo")
def opo(inputs, params):
    return relative(inputs, params, std="none", baseline="length", length=lengths(inputs["response_mask"]), singleton="raw")


@adapter("verl.gpg")
def gpg(inputs, params):
    reward, group = scores(inputs), labels(inputs["uid"])
    everyone = all_members(group)
    scale = baselines.gpg_scale(reward, group, everyone, informative="nonzero") / params["f_norm"]
    return on_tokens(scale * group_relative(reward, group, everyone, std="none", singleton="raw"), inputs)


@adapter("verl.reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs, params):
    group = labels(inputs["uid"])
    centred = group_relative(scores(inputs), group, all_members(group), std="none", singleton="raw")
    tokens = lengths(inputs["response_mask"])
    return on_tokens(whiten(centred, all_members(group), count=tokens, divisor="sample", eps=1e-8, eps_in="variance"), inputs)


@adapter("verl.grpo_passk")
def pass_at_k(inputs, params):
    group = labels(inputs["uid"])
    std = "sample" if params["norm_adv_by_std_in_grpo"] else "none"
    return on_tokens(baselines.pass_at_k(scores(inputs), group, all_members(group), std=std, eps=params["epsilon"]), inputs)


@adapter("verl.gdpo")
def gdpo(inputs, params):
    group = labels(inputs["uid"])
    names = params.get("gdpo_reward_keys") or []
    parts = jnp.stack([jnp.asarray(inputs[f"reward_{name}"]) for name in names] or [scores(inputs)], axis=1)
    weights = jnp.asarray(params.get("gdpo_reward_weights") or [1.0] * parts.shape[1])
    advantage = baselines.gdpo(
        parts,
        weights,
        group,
        jnp.ones(parts.shape, bool),
        std="sample" if params["norm_adv_by_std_in_grpo"] else "none",
        eps=params["epsilon"],
        singleton="raw",
        count=lengths(inputs["response_mask"]),
        divisor="sample",
        whiten_eps=1e-8,
        whiten_eps_in="variance",
    )
    return on_tokens(advantage, inputs)


def rewards_to_go(inputs: dict[str, Any]) -> Any:
    reward = jnp.where(boolean(inputs["response_mask"]), inputs["token_level_rewards"], 0.0)
    return discounted_sum(reward, jnp.ones_like(reward))


@adapter("verl.remax")
def remax(inputs, params):
    greedy = jnp.asarray(inputs["reward_baselines"])
    advantage = baselines.remax(jnp.asarray(inputs["token_level_rewards"]), boolean(inputs["response_mask"]), greedy)
    return {"advantages": advantage, "returns": rewards_to_go(inputs)}


def token_baseline(inputs: dict[str, Any], params: dict[str, Any], align: str) -> dict[str, Any]:
    returns = rewards_to_go(inputs)
    energy = baselines.score_energy(jnp.asarray(inputs["old_log_probs"]), jnp.asarray(inputs["sum_pi_squared"]))
    weights = inputs.get("rollout_is_weights")
    advantage = baselines.optimal_token_baseline(
        returns,
        energy if weights is None else energy * jnp.square(weights),
        boolean(inputs["response_mask"]),
        labels(inputs["uid"]),
        align=align,
        tail="raw_by_count" if params["handle_zero_tail"] else "zero",
        singleton="raw",
        eps=params["epsilon"],
    )
    return {"advantages": advantage, "returns": returns}


@adapter("verl.optimal_token_baseline")
def optimal_token_baseline(inputs, params):
    return token_baseline(inputs, params, "position")


@adapter("verl.tir_optimal_token_baseline")
def tir_optimal_token_baseline(inputs, params):
    return token_baseline(inputs, params, "action")
