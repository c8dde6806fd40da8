"""TRL's advantages. Groups are consecutive blocks of rows; a reward that is NaN was not given."""

import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import baselines
from agentrl_jax.kernels.group import group_relative, group_statistics
from agentrl_jax.kernels.kl import kl
from agentrl_jax.kernels.units import unit_sum
from agentrl_jax.kernels.whiten import whiten
from tests.golden.adapter import adapter

EPS = 1e-4


def blocks(n, size):
    return jnp.asarray(np.arange(n) // size)


def parts(inputs):
    rewards = jnp.asarray(inputs["rewards_per_func"])
    return rewards, jnp.asarray(inputs["reward_weights"]), ~jnp.isnan(rewards)


@adapter("trl.grpo_advantages")
def grpo_advantages(inputs, params):
    rewards, weights, present = parts(inputs)
    group = blocks(len(rewards), params["num_generations"])
    batch = jnp.zeros_like(group)
    scale = params["scale_rewards"]
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        options = {"std": "sample", "eps": EPS}
        advantage = baselines.gdpo(rewards, weights, group, present, **options, divisor="sample", whiten_eps=EPS)
        columns = [group_relative(rewards[:, c], group, present[:, c], **options) for c in range(rewards.shape[1])]
        total, scorable = baselines.weighted_sum(jnp.stack(columns, axis=1), weights, present)
        over = batch
    else:
        total, scorable = baselines.weighted_sum(rewards, weights, present)
        over = batch if scale == "batch" else group
        std = "none" if scale == "none" else "sample"
        advantage = group_relative(total, group, scorable, std=std, eps=EPS, scale_group=over)
    found = group_statistics(total, over, scorable, std="sample")
    deviation = jnp.where(found.members < 2, jnp.nan, found.std)[over]  # what TRL reports where there is none
    return {"advantages": advantage, "std_rewards": deviation, "is_std_zero": deviation == 0}


@adapter("trl.rloo_advantages")
def rloo_advantages(inputs, params):
    rewards, weights, present = parts(inputs)
    total, scorable = baselines.weighted_sum(rewards, weights, present)
    if params["reward_clip_range"] is not None:
        total = jnp.clip(total, *params["reward_clip_range"])
    mask = jnp.asarray(inputs["completion_mask"]) != 0
    log_ratio = jnp.where(mask, jnp.asarray(inputs["old_per_token_logps"]) - jnp.asarray(inputs["ref_per_token_logps"]), 0.0)
    total = total - params["beta"] * unit_sum(kl(log_ratio, estimator="k1"))[:, 0]
    advantage = group_relative(total, blocks(len(rewards), params["num_generations"]), scorable, std="none", baseline="leave_one_out")
    if params["normalize_advantages"]:
        advantage = whiten(advantage, scorable, divisor="sample", eps=EPS)
    return {"advantages": advantage}
