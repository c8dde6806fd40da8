"""verl's rollout correction: weights, rejection, and what it reports about them.

Its k1 statistics are log(rollout / train), ours are of train / rollout: "lo_hi" becomes [1/hi, 1/lo], and its low is our high.
"""

import math
from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import correction, diagnostics, policy_loss, units
from tests.golden.adapter import adapter, unsupported

LEVELS: dict[str, correction.Level] = {"token": "token", "sequence": "sum", "geometric": "mean"}
RS_LEVELS: dict[str, correction.Level] = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


def bounds(spec: Any) -> tuple[float | None, float]:
    """ "lo_hi" is both bounds, a number the upper."""
    low, _, high = str(spec).rpartition("_")
    return (float(low) if low else None), float(high)


def log_ratio(inputs: dict[str, Any], *, clamp: float | None) -> tuple[Any, Any]:
    mask = jnp.asarray(inputs["response_mask"]) != 0
    train, rollout = jnp.asarray(inputs["old_log_prob"]), jnp.asarray(inputs["rollout_log_prob"])
    return policy_loss.masked_log_ratio(train, rollout, mask, clamp=clamp), mask


def of_rows(x: Any, mask: Any) -> Any:
    """One number for each row: the mean over its tokens of `mask`."""
    return units.unit_mean(x, mask)[:, 0]


def weights(inputs: dict[str, Any], params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    ratio, mask = log_ratio(inputs, clamp=None)
    low, high = bounds(params["rollout_is_threshold"])
    level = LEVELS[params["rollout_is"]]
    weight = correction.importance_weight(ratio, mask, level=level, mode="truncate" if low is None else "mask", lower=low, upper=high)
    raw = correction.importance_weight(ratio, mask, level=level, mode="raw")
    whole = diagnostics.summary(weight, mask)
    rows = jnp.ones(mask.shape[0], bool)  # those without a token count here, with weight 0
    by_row = diagnostics.summary(of_rows(weight, mask), rows, divisor="sample")
    distance = diagnostics.summary(jnp.abs(of_rows(weight, mask) - 1), rows)
    lower = 1 / high if low is None else low
    below, above = diagnostics.fractions_outside(raw, mask, lower=lower, upper=high)
    rows_below, rows_above = diagnostics.fractions_outside(of_rows(raw, mask), rows, lower=lower, upper=high)
    found = {
        "mean": whole.mean,
        "std": whole.std,
        "max": whole.maximum,
        "min": whole.minimum,
        "eff_sample_size": diagnostics.effective_sample_size(weight, mask),
        "ratio_fraction_high": above,
        "ratio_fraction_low": below,
        "seq_mean": by_row.mean,
        "seq_std": by_row.std,
        "seq_max": by_row.maximum,
        "seq_min": by_row.minimum,
        "seq_max_deviation": distance.maximum,
        "seq_fraction_high": rows_above,
        "seq_fraction_low": rows_below,
    }
    if params["rollout_is"] == "sequence":
        products = jnp.exp(correction.over_unit(ratio, mask, level="sum")[:, 0])
        clamped = correction.importance_weight(ratio, mask, level="sum", mode="raw", outside=True)[:, 0]
        below, above = diagnostics.fractions_outside(products, rows, lower=lower, upper=high)
        extremes = {"max": diagnostics.summary(clamped, rows).maximum, "min": diagnostics.summary(products, rows).minimum}
        found |= extremes | {"ratio_fraction_high": above, "ratio_fraction_low": below}
    if low is not None:
        found["oob_ratio"] = diagnostics.summary(~correction.within(raw, mask, lower=low, upper=high), mask).mean
    if params.get("rollout_is_batch_normalize"):
        over = "unit" if params["rollout_is"] == "sequence" else "token"
        found["batch_norm_factor"] = correction.mean_weight(weight, mask, over=over)
        weight = correction.normalised(weight, mask, over=over)
    return weight, {f"rollout_is_{name}": value for name, value in found.items()}


@adapter("verl.rollout_is_weights")
def rollout_is_weights(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    weight, metrics = weights(inputs, params)
    return {"rollout_is_weights": weight} | metrics


def rejection(inputs: dict[str, Any], params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    ratio, mask = log_ratio(inputs, clamp=20.0)
    options = [option.strip() for option in params["rollout_rs"].split(",")]
    if params["rollout_rs_threshold"] is None:
        raise ValueError("a threshold is needed")
    specs = [spec.strip() for spec in str(params["rollout_rs_threshold"]).split(",")]
    metrics, kept = {}, mask
    for option, spec in zip(options, specs * len(options) if len(specs) == 1 else specs, strict=True):
        name, _, statistic = option.rpartition("_")
        if name not in RS_LEVELS or statistic not in ("k1", "k2", "k3"):
            raise ValueError(f"no option {option!r}")
        level = RS_LEVELS[name]
        low, high = bounds(spec)
        if statistic == "k1":
            low = 1 / high if low is None else low
            keep = correction.keep(ratio, mask, level=level, lower=1 / high, upper=1 / low)
        else:
            low = None
            keep = correction.keep(ratio, mask, statistic=statistic, level=level, upper=high)
        metrics |= {f"rollout_rs_{option}_{key}": value for key, value in rejected(ratio, mask, keep, level, statistic, low, high).items()}
        kept &= keep
    rows = jnp.ones(mask.shape[0], bool)
    return kept, metrics | {
        "rollout_rs_masked_fraction": diagnostics.summary(~kept, mask).mean,
        "rollout_rs_seq_masked_fraction": diagnostics.summary(any_of_row(~kept, mask), rows).mean,
    }


def any_of_row(condition: Any, mask: Any) -> Any:
    return correction.over_unit(condition.astype(float), mask, level="max")[:, 0] > 0


def rejected(ratio: Any, mask: Any, keep: Any, level: Any, statistic: Any, low: float | None, high: float) -> dict[str, Any]:
    """What verl reports of one statistic. Of k1, all of it is log(rollout / train)."""
    if statistic == "k1" and low is not None:
        low, high = math.log(low), math.log(high)
    rows = jnp.any(mask, axis=1)
    value = correction.over_unit(correction.divergence(ratio, statistic=statistic), mask, level=level)
    whole, row_values = diagnostics.summary(value, mask), of_rows(value, mask)
    by_row = diagnostics.summary(row_values, rows, divisor="sample")
    clamped = diagnostics.summary(value, mask, lower=0.0 if low is None else low, upper=high)
    below, above = diagnostics.fractions_outside(value, mask, lower=low, upper=high)
    rows_below, rows_above = diagnostics.fractions_outside(row_values, rows, lower=low, upper=high)
    extreme = whole if level == "token" else by_row
    return {
        "mean": whole.mean,
        "max": extreme.maximum,
        "min": extreme.minimum,
        "fraction_high": above if level == "token" else rows_above,
        "fraction_low": below if level == "token" else rows_below,
        "std": clamped.std,
        "seq_mean": by_row.mean,
        "seq_std": by_row.std,
        "seq_max": by_row.maximum,
        "seq_min": by_row.minimum,
        "seq_max_deviation": diagnostics.summary(jnp.abs(row_values), rows).maximum,
        "seq_fraction_high": rows_above,
        "seq_fraction_low": rows_below,
        "masked_fraction": diagnostics.summary(~keep, mask).mean,
        "seq_masked_fraction": diagnostics.summary(any_of_row(~keep, mask), rows).mean,
    }


@adapter("verl.rollout_rs_mask")
def rollout_rs_mask(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    kept, metrics = rejection(inputs, params)
    return {"modified_response_mask": kept} | metrics


@adapter("verl.rollout_correction")
def rollout_correction(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    ratio, mask = log_ratio(inputs, clamp=None)
    found, metrics = {"modified_response_mask": mask}, mismatch(inputs, ratio, mask)
    if params.get("rollout_is") is not None:
        found["rollout_is_weights"], more = weights(inputs, params)
        metrics |= more
    if params.get("rollout_rs") is not None:
        found["modified_response_mask"], more = rejection(inputs, params)
        metrics |= more
    return found | {f"rollout_corr/{name}": value for name, value in metrics.items()}


def mismatch(inputs: dict[str, Any], ratio: Any, mask: Any) -> dict[str, Any]:
    """How far trainer and sampler are apart. Rows without a token count, with perplexity 1."""
    rows = jnp.ones(mask.shape[0], bool)
    train, rollout = jnp.asarray(inputs["old_log_prob"]), jnp.asarray(inputs["rollout_log_prob"])

    def over_rows(x: Any) -> Any:
        return diagnostics.summary(x, rows)

    difference = over_rows(of_rows(-ratio, mask))
    products = correction.over_unit(ratio, mask, level="sum")[:, 0]
    return {
        "training_ppl": over_rows(diagnostics.perplexity(train, mask)[:, 0]).mean,
        "training_log_ppl": over_rows(of_rows(-train, mask)).mean,
        "rollout_ppl": over_rows(diagnostics.perplexity(rollout, mask)[:, 0]).mean,
        "rollout_log_ppl": over_rows(of_rows(-rollout, mask)).mean,
        "ppl_ratio": over_rows(diagnostics.perplexity(ratio, mask)[:, 0]).mean,
        "log_ppl_diff": difference.mean,
        "log_ppl_diff_max": difference.maximum,
        "log_ppl_diff_min": difference.minimum,
        "log_ppl_abs_diff": over_rows(jnp.abs(of_rows(-ratio, mask))).mean,
        "kl": diagnostics.summary(correction.divergence(ratio, statistic="k1"), mask).mean,
        "k3_kl": diagnostics.summary(correction.divergence(ratio, statistic="k3"), mask).mean,
        "chi2_token": diagnostics.summary(diagnostics.chi_square(ratio), mask).mean,
        "chi2_seq": over_rows(diagnostics.chi_square(products)).mean,
    }


@adapter("verl_old.geometric_rs")
def geometric_rs(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The older interface bounds train / rollout, as we do, and drops a row with one token below the veto."""
    ratio, mask = log_ratio(inputs, clamp=None)
    rows = jnp.ones(mask.shape[0], bool)
    upper, level = params["rollout_rs_threshold"], LEVELS[params["rollout_rs"]]
    lower = params["rollout_rs_threshold_lower"] or 1 / upper
    kept = mask & correction.keep(ratio, mask, level=level, lower=lower, upper=upper)
    vetoed = ~jnp.ones(mask.shape, bool)
    if params["rollout_token_veto_threshold"] is not None:
        vetoed = ~correction.keep(ratio, mask, level="min", lower=params["rollout_token_veto_threshold"])
    found = {} if params["rollout_is"] is None else {"rollout_is_weights": weights(inputs, params)[0]}
    value = correction.importance_weight(ratio, mask, level=level, mode="raw")
    return found | {
        "modified_response_mask": kept & ~vetoed,
        "rollout_corr/rollout_rs_mean": diagnostics.summary(value, mask).mean,
        "rollout_corr/rollout_rs_masked_fraction": diagnostics.summary(~kept, mask).mean,
        "rollout_corr/rollout_rs_seq_masked_fraction": diagnostics.summary(any_of_row(~kept, mask), rows).mean,
        "rollout_corr/rollout_is_veto_fraction": diagnostics.summary(vetoed[:, 0], rows).mean,
    }


unsupported("all weights masked: the reference divides by zero in a metric, ours are 0", "verl.rollout_is_weights.11")
unsupported(
    "1e-8 in two denominators and E[x^2] - E[x]^2 put a std over 5 tokens 1.5e-8 off", "verl.rollout_is_weights.05", output="rollout_is_std"
)
