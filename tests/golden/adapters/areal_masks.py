"""AReaL's second-moment mask and its penalty for long episodes."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import correction, filters, policy_loss, reduce
from tests.golden.adapter import adapter


@adapter("areal.m2po_mask")
def m2po_mask(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(inputs["loss_mask"]) != 0
    log_ratio = policy_loss.masked_log_ratio(jnp.asarray(inputs["prox_logp"]), jnp.asarray(inputs["old_logp"]), mask, clamp=None)
    return {"mask": correction.m2po(log_ratio, mask, threshold=params["m2_threshold"])}


@adapter("areal.overlong_penalty")
def overlong_penalty(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The length is that of the tokens in the loss."""
    length = reduce.counts(jnp.asarray(inputs["loss_mask"]) != 0)["tokens_of_episode"]
    penalty = filters.overlong_penalty(
        length,
        limit=params["max_response_length"],
        margin=params["overlong_tokens"],
        scale=params["overlong_penalty_factor"],
        bounded=False,
    )
    return {"rewards": jnp.asarray(inputs["rewards"]) + penalty}
