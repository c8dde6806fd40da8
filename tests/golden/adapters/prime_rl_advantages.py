"""prime-rl's advantages. A case is one group."""

import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import baselines
from agentrl_jax.kernels.group import group_relative
from tests.golden.adapter import adapter


def one_group(inputs):
    reward = jnp.asarray(inputs["rewards"])
    return reward, jnp.zeros(reward.shape, int), jnp.ones(reward.shape, bool)


@adapter("prime_rl.adv_grpo")
def grpo(inputs, params):
    reward, group, everyone = one_group(inputs)
    penalty = params["length_penalty"]
    if penalty is not None:
        out, total, turns = (jnp.asarray(inputs[k], float) for k in ("num_output_tokens", "num_total_tokens", "num_turns"))
        weights = jnp.asarray([penalty[f"num_{name}_weight"] for name in ("output_tokens", "input_tokens", "turns")])
        reward = baselines.cost_penalty(reward, jnp.stack([out, total - out, turns], axis=1), weights, group, everyone)
    return {"advantages": group_relative(reward, group, everyone, std="none")}


@adapter("prime_rl.adv_max_rl")
def max_rl(inputs, params):
    return {"advantages": baselines.max_rl(*one_group(inputs))}


@adapter("prime_rl.adv_rae")
def rae(inputs, params):
    reward, _, everyone = one_group(inputs)
    names, role = np.unique(inputs["agent"], return_inverse=True)
    advantage, after = baselines.running_baseline(reward, jnp.asarray(role), everyone, jnp.zeros(len(names)), decay=params["decay"])
    return {"advantages": advantage} | {f"baseline_{name}": after[i] for i, name in enumerate(names)}
