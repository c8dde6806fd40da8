"""ROLL's aggregation, means over segments, and corrections between trainer and sampler."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import correction, policy_loss, reduce, units
from tests.golden.adapter import adapter

LEVELS: dict[str, correction.Level] = {"token": "token", "geometric": "mean", "sequence": "sum", "segment": "mean"}
MODES: dict[str, reduce.Reduction] = {
    "token-mean": "token",
    "seq-mean-token-mean": "episode",
    "seq-mean-token-sum": "episode_sum",
    "seq-mean-token-sum-norm": "sum",
}


@adapter("roll.agg_loss")
def agg_loss(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Token-mean takes its count from the mask and then adds up every token; the others divide by all rows."""
    mask, mode = jnp.asarray(inputs["loss_mask"]) != 0, params["loss_agg_mode"]
    tokens = params.get("batch_num_tokens") or reduce.counts(mask)["tokens"]
    weights = reduce.token_weights(
        jnp.ones_like(mask) if mode == "token-mean" else mask,
        reduction=MODES[mode],
        horizon=mask.shape[1] if MODES[mode] == "sum" else None,
        tokens=tokens,
        episodes=params.get("global_valid_samples") or mask.shape[0],
        scale=None if inputs["weights"] is None else jnp.asarray(inputs["weights"]),
    )
    return {"loss": reduce.weighted_sum(jnp.asarray(inputs["loss_mat"]), weights)}


@adapter("roll.segment_masked_mean")
def segment_masked_mean(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    del params
    mask = jnp.asarray(inputs["mask"]) != 0
    mean = units.unit_mean(jnp.asarray(inputs["tensor"]), mask, units.runs(mask.astype(int)))
    return {"out": mean}


@adapter("roll.train_infer_correction")
def train_infer_correction(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """At token level every token counts, whatever the mask; a segment is a run of the mask."""
    mask = jnp.asarray(inputs["response_mask"]) != 0
    every = jnp.ones_like(mask)
    train, rollout = jnp.asarray(inputs["old_log_probs"]), jnp.asarray(inputs["infer_log_probs"])

    def where(kind: str) -> tuple[Any, Any]:
        return (every if kind == "token" else mask), (units.runs(mask.astype(int)) if kind == "segment" else None)

    def ratio(kind: str, upper: float | None = None) -> Any:
        inside, unit = where(kind)
        log_ratio = policy_loss.masked_log_ratio(train, rollout, inside, clamp=None)
        return correction.importance_weight(log_ratio, inside, unit, level=LEVELS[kind], upper=upper, max_log_ratio=None, outside=True)

    kind, chosen = params["weight_type"], params["filter"]
    found = {"is_weight": ratio(kind, params["upper_bound"]) if params["is_weight_enabled"] else jnp.ones(mask.shape)}
    means = reduce.token_weights(mask, reduction="episode")
    for name in LEVELS:
        found[f"actor/train_infer_ratio_{name}_mean@sum"] = reduce.weighted_sum(ratio(name), means)
    kept, name = every, chosen["agg_type"]
    inside, unit = where(name)
    if chosen["ratio_enabled"]:
        log_ratio = policy_loss.masked_log_ratio(train, rollout, inside, clamp=None)
        low, high = chosen["ratio_low"], chosen["ratio_high"]
        by_ratio = correction.keep(log_ratio, inside, unit, level=LEVELS[name], lower=low, upper=high)
        fraction = reduce.token_weights(every, tokens=reduce.counts(mask)["tokens"])
        found[f"actor/train_infer_{name}_ratio_mask_mean@sum"] = reduce.weighted_sum(by_ratio.astype(float), fraction)
        kept &= by_ratio
    if chosen["diff_enabled"]:
        gap = correction.probability_gap(train, rollout, inside)
        kept &= correction.within(gap, inside, unit, level=LEVELS[name], lower=chosen["diff_low"], upper=chosen["diff_high"])
    return found | {"filter_mask": kept}
