"""TRL's importance ratio between vLLM and the trainer, and its off-policy mask."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import correction, policy_loss
from tests.golden.adapter import adapter


@adapter("trl.vllm_is_ratio")
def vllm_is_ratio(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(inputs["completion_mask"]) != 0
    if inputs["tool_mask"] is not None:
        mask &= jnp.asarray(inputs["tool_mask"]) != 0
    train, rollout = jnp.asarray(inputs["old_per_token_logps"]), jnp.asarray(inputs["sampling_per_token_logps"])
    level, mode = params["vllm_importance_sampling_mode"].split("_")
    weight = correction.importance_weight(
        policy_loss.masked_log_ratio(train, rollout, mask, clamp=None),
        mask,
        level="token" if level == "token" else "sum",
        mode="clamp" if mode == "truncate" else "mask",
        lower=params["vllm_importance_sampling_clip_min"],
        upper=params["vllm_importance_sampling_clip_max"],
        max_log_ratio=None,
        outside=True,
    )
    return {"importance_sampling_ratio": weight if level == "token" else weight[:, :1]}


@adapter("trl.off_policy_mask")
def off_policy_mask(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(inputs["mask"]) != 0
    train, rollout = jnp.asarray(inputs["per_token_logps"]), jnp.asarray(inputs["sampling_per_token_logps"])
    log_ratio = policy_loss.masked_log_ratio(train, rollout, mask, clamp=None)
    advantage = jnp.broadcast_to(jnp.asarray(inputs["advantages"]), mask.shape)
    return {"keep": correction.opsm(log_ratio, advantage, mask, delta=params["off_policy_threshold"])[:, :1]}
