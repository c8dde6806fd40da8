"""verl's value loss and functions of logits."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import entropy, reduce
from agentrl_jax.kernels.value_loss import value_clipped, value_loss
from tests.golden.adapter import adapter
from tests.golden.adapters.verl_agg_loss import verl_weights


@adapter("verl.value_loss")
def loss(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(x["response_mask"]) != 0
    value, target, old = (jnp.asarray(x[name]) for name in ("vpreds", "returns", "values"))
    per_token = value_loss(value, target, mask, old=old, clip=p["cliprange_value"])
    clipped = value_clipped(value, target, mask, old=old, clip=p["cliprange_value"])
    return {
        "loss": reduce.weighted_sum(per_token, verl_weights(mask, p)),
        "vf_clipfrac": reduce.weighted_sum(clipped * 1.0, reduce.token_weights(mask)),
    }


@adapter("verl.logits_ops", gradients={"grad_entropy": ("logits", "entropy"), "grad_logprobs": ("logits", "logprobs")})
def logits_ops(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    return {
        "entropy": entropy.entropy(x["logits"]),
        "logprobs": entropy.log_prob(x["logits"], x["labels"]),
        "sum_pi_squared": entropy.collision(x["logits"]),
        "logprobs_at_temperature": entropy.log_prob(x["logits"], x["labels"], temperature=p["temperature"]),
    }
