"""slime's importance weights and masks."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import correction, policy_loss, reduce
from tests.golden.adapter import adapter

MODES: dict[str, correction.Mode] = {"truncate": "truncate", "clip": "clamp", "mask": "raw"}
LEVELS: dict[str, correction.Level] = {"token": "token", "sequence": "sum", "geometric": "mean"}


def log_ratio(train: Any, rollout: Any, mask: Any) -> Any:
    return policy_loss.masked_log_ratio(jnp.asarray(train), jnp.asarray(rollout), mask, clamp=None)


@adapter("slime.opsm_mask")
def opsm_mask(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(inputs["loss_mask"]) != 0
    kept = correction.opsm(
        log_ratio(inputs["log_probs"], inputs["old_log_probs"], mask),
        jnp.asarray(inputs["advantages"]),
        mask,
        delta=params["opsm_delta"],
    )
    # What is called a fraction sums over rows, and counts tokens of every kind over those in the loss.
    lengths = reduce.counts(mask)["tokens_of_episode"]
    weights = reduce.token_weights(~kept, reduction="episode", episodes=1, tokens_of_episode=lengths)
    return {"opsm_mask": kept, "opsm_clipfrac": reduce.weighted_sum(jnp.ones_like(weights), weights)}


@adapter("slime.tis")
def tis(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return weighted(inputs, params, "clamp")


@adapter("slime.icepop")
def icepop(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return weighted(inputs, params, "mask")


def weighted(inputs: dict[str, Any], params: dict[str, Any], mode: correction.Mode) -> dict[str, Any]:
    low, high = params["tis_clip_low"], params["tis_clip"]
    mask = jnp.ones(inputs["pg_loss"].shape, bool)
    ratio = log_ratio(inputs["train_log_probs"], inputs["rollout_log_probs"], mask)
    weight = correction.importance_weight(ratio, mask, mode=mode, lower=low, upper=high, max_log_ratio=None)
    return {
        "pg_loss": policy_loss.weighted(jnp.asarray(inputs["pg_loss"]), weight),
        "tis_clipfrac": policy_loss.outside(ratio, min_ratio=low, max_ratio=high),
    }


@adapter("slime.mis_weights")
def mis_weights(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Mode "mask" rejects by the weight's own bounds, and so does what is called rejection, by bounds that default to those."""
    mask = jnp.asarray(inputs["loss_mask"]) != 0
    ratio = log_ratio(inputs["train_log_probs"], inputs["rollout_log_probs"], mask)
    upper, level, mode = params["tis_upper_bound"], LEVELS[params["tis_level"]], params["tis_mode"]
    lower = params["tis_lower_bound"] or 1 / upper
    weight = correction.importance_weight(
        ratio,
        mask,
        level=level,
        mode=MODES[mode],
        lower=lower if mode == "clip" else None,
        upper=upper,
    )
    if params["tis_batch_normalize"]:
        weight = correction.normalised(weight, mask, over="unit" if params["tis_level"] == "sequence" else "token")
    kept = mask
    if mode == "mask":
        kept &= correction.keep(ratio, mask, level=level, lower=lower, upper=upper)
    if params["use_rs"]:
        low = lower if params["rs_lower_bound"] is None else params["rs_lower_bound"]
        high = upper if params["rs_upper_bound"] is None else params["rs_upper_bound"]
        kept &= correction.keep(ratio, mask, level=LEVELS[params["rs_level"]], lower=low, upper=high)
        if params["rs_veto_threshold"] is not None:
            kept &= correction.keep(ratio, mask, level="min", lower=params["rs_veto_threshold"])
    return {"weights": weight, "modified_mask": kept}
