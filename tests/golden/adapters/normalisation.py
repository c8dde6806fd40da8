"""Normalisation of rewards and advantages: AReaL, ROLL, RAGEN, verl's masked statistics."""

import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels.group import group_relative, group_statistics, turn_returns
from agentrl_jax.kernels.whiten import moments, standardise
from tests.golden.adapter import adapter
from tests.golden.adapters.gigpo import first_of
from tests.golden.adapters.trl_advantages import blocks
from tests.golden.adapters.verl_advantages import all_members, boolean, labels, on_tokens, scores


@adapter("areal.normalization")
def areal_normalization(inputs, params):
    x = jnp.asarray(inputs["x"])
    mask = all_members(x) if inputs["loss_mask"] is None else boolean(inputs["loss_mask"])
    row = blocks(len(x), params["group_size"])
    group = jnp.broadcast_to(row.reshape(-1, *[1] * (x.ndim - 1)), x.shape).ravel()
    batch = jnp.zeros_like(group)
    loo = "leave_one_out" if params["mean_leave1out"] else "mean"
    advantage = group_relative(
        x.ravel(),
        batch if params["mean_level"] == "batch" else group,
        mask.ravel(),
        baseline="none" if params["mean_level"] is None else loo,
        std="none" if params["std_level"] is None else "sample" if params["std_unbiased"] else "population",
        std_about="baseline",
        scale_group=batch if params["std_level"] == "batch" else group,
        eps=params["eps"],
        singleton="raw",
    )
    return {"y": advantage.reshape(x.shape)}


@adapter("areal.masked_normalization")
def areal_masked_normalization(inputs, params):
    x, mask = jnp.asarray(inputs["x"]), boolean(inputs["mask"])
    mean, variance = moments(x, mask, divisor="sample" if params["unbiased"] else "population")
    return {"y": standardise(jnp.where(mask, x, 0.0), mean, variance, eps=params["eps"])}


def roll(reward, group, mean_over, std_over):
    """ROLL's normalisation: mean and sample std each over the group, over the batch, or not at all."""
    batch = jnp.zeros_like(group)
    return group_relative(
        reward,
        batch if mean_over == "batch" else group,
        all_members(group),
        baseline="none" if mean_over is None else "mean",
        std="none" if std_over is None else "sample",
        scale_group=batch if std_over == "batch" else group,
        eps=1e-6,
    )


@adapter("roll.reward_norm")
def roll_reward_norm(inputs, params):
    group = blocks(len(inputs["rewards"]), params["n_sample"])
    return {"normalized": roll(jnp.asarray(inputs["rewards"]), group, params["norm_mean_type"], params["norm_std_type"])}


@adapter("roll.gigpo_rewards")
def roll_gigpo_rewards(inputs, params):
    trajectory, step = np.unique(inputs["traj_id"], return_inverse=True)[1], inputs["step"]
    table = np.zeros((trajectory.max() + 1, step.max() + 1))
    exists = np.zeros(table.shape, bool)
    table[trajectory, step], exists[trajectory, step] = inputs["step_scores"], True
    returns = turn_returns(jnp.asarray(table), jnp.asarray(exists), gamma=params["gamma"])[trajectory, step]
    group = labels(inputs["traj_group_id"])
    group = jnp.zeros_like(group) if params["grouping"] == "batch" else group
    episode = roll(jnp.asarray(inputs["episode_scores"]), group, params["norm_mean_type"], params["norm_std_type"])
    turn = roll(returns, labels(inputs["state_hash"]), params["step_norm_mean_type"], params["step_norm_std_type"])
    total = params["episode_reward_weight"] * episode + params["step_reward_weight"] * turn
    if params["reward_clip"]:
        total = jnp.clip(total, -params["reward_clip"], params["reward_clip"])
    return {"step_rewards": returns, "episode_rewards_norm": episode, "step_rewards_norm": turn, "response_level_rewards": total}


@adapter("ragen.grpo_episode")
def ragen_grpo_episode(inputs, params):
    group = labels(inputs["uid"])
    everyone, episodes = all_members(group), inputs["episode_ids"]
    in_stats = everyone if episodes is None else first_of(zip(inputs["uid"].tolist(), episodes.tolist(), strict=True))
    std = "sample" if params["norm_adv_by_std_in_grpo"] else "none"
    reward = scores(inputs)
    advantage = group_relative(reward, group, in_stats, in_loss=everyone, std=std, eps=params["epsilon"], singleton="raw")
    deviation = group_statistics(reward, group, in_stats, std="sample", singleton="raw").std[group]
    return {"advantages": on_tokens(advantage, inputs)["advantages"], "group_std": deviation}


@adapter("verl.masked_stats")
def verl_masked_stats(inputs, params):
    x, mask = jnp.asarray(inputs["values"]), boolean(inputs["mask"])
    mean, unbiased = moments(x, mask, divisor="sample")
    options = {"eps": 1e-8, "eps_in": "variance"}
    return {
        "mean": mean,
        "var_unbiased": unbiased,
        "var_biased": moments(x, mask).variance,
        "row_mean": moments(x, mask, axis=-1).mean,
        "whiten": standardise(x, mean, unbiased, **options),
        "whiten_noshift": standardise(x, mean, unbiased, **options, shift=False),
    }


@adapter("verl.group_mean_std")
def verl_group_mean_std(inputs, params):
    index = inputs["index"]
    numeric = index.dtype.kind in "iu" or all(label.isdigit() for label in index.tolist())
    group = jnp.asarray(index.astype(int)) if numeric else labels(index)
    options = {"std": "sample", "eps": params["eps"], "eps_in": "floor", "singleton": "raw"}
    found = group_statistics(jnp.asarray(inputs["scores"]), group, all_members(group), groups=int(group.max()) + 1, **options)
    return {"gidx": group, "mean": found.mean, "std": found.std, "count": found.members}
