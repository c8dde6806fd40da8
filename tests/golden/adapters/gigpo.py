"""verl-agent's GiGPO. A row is one step of a trajectory."""

import jax.numpy as jnp

from agentrl_jax.data.anchors import anchor_groups
from agentrl_jax.kernels.group import gigpo, group_relative, group_statistics, state_relative
from tests.golden.adapter import adapter
from tests.golden.adapters.verl_advantages import all_members, labels, on_tokens, scores


def first_of(keys):
    """Which rows are the first with their key."""
    seen = set()
    return jnp.asarray([not (key in seen or seen.add(key)) for key in keys])


def anchors(inputs, params):
    similar = params["enable_similarity"]
    return anchor_groups(
        inputs["anchor_obs"].tolist(),
        inputs["uid"].tolist(),
        similarity="difflib" if similar else "exact",
        threshold=params["similarity_thresh"] if similar else None,
    )


@adapter("gigpo.build_step_group")
def build_step_group(inputs, params):
    group = jnp.asarray(anchors(inputs, params))
    sizes = group_statistics(jnp.zeros(group.shape), group, all_members(group), groups=int(group.max()) + 1).members
    return {"step_group": group, "group_sizes": sizes}


@adapter("gigpo.episode_norm")
def episode_norm(inputs, params):
    group = labels(inputs["uid"])
    everyone = all_members(group)
    once = first_of(zip(inputs["uid"].tolist(), inputs["traj_uid"].tolist(), strict=True))
    std = "none" if params["remove_std"] else "sample"
    in_stats = everyone if params["compute_mean_std_cross_steps"] else once
    advantage = group_relative(scores(inputs), group, in_stats, in_loss=everyone, std=std, eps=params["epsilon"], singleton="raw")
    return on_tokens(advantage, inputs)


@adapter("gigpo.step_norm")
def step_norm(inputs, params):
    state = labels(inputs["step_group"])[:, None]
    std = "none" if params["remove_std"] else "sample"
    advantage = state_relative(jnp.asarray(inputs["step_rewards"])[:, None], state, all_members(state), std=std, eps=params["epsilon"])
    return on_tokens(advantage[:, 0], inputs)


@adapter("gigpo.joint")
def joint(inputs, params):
    group = labels(inputs["uid"])
    everyone = all_members(group)
    advantage = gigpo(
        scores(inputs),
        jnp.asarray(inputs["step_rewards"])[:, None],
        group,
        jnp.asarray(anchors(inputs, params))[:, None],
        everyone[:, None],
        everyone,
        omega=params["step_advantage_w"],
        std={"mean_norm": "none", "mean_std_norm": "sample"}[params["mode"]],
        eps=params["epsilon"],
        singleton="raw",
        stats="rows",
    )
    return on_tokens(advantage[:, 0], inputs)
