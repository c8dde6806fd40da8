"""Which groups RAGEN and VAGEN keep."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import diagnostics, filters, units
from tests.golden.adapter import adapter, unsupported


def chosen(score: Any, params: dict[str, Any]) -> Any:
    """RAGEN's strategies. Without `include_zero`, groups of score 0 are not there to be chosen."""
    valid, value, order = jnp.ones(score.shape, bool), params["value"], params["filter_type"]
    if not params["include_zero"]:
        valid &= jnp.abs(score) > 1e-10
    match params["strategy"]:
        case "top_p":
            mode = params.get("top_p_prob_mode", "linear")
            exact = {"slack": params.get("selection_eps", 0.01), "positive": True, "at_least": 0, "flat": "none"}
            return filters.nucleus(score, valid, share=value, order=order, weights=mode, **(exact if mode == "linear" else {}))
        case "top_k":
            return filters.best(score, valid, fraction=value, of=params["num_groups"], order=order, rounding="floor")
        case "top_k_abs":
            return filters.best(score, valid, count=int(value), order=order)
        case "min_p":
            return filters.near_best(score, valid, share=value, order=order)
    raise ValueError(f"no strategy {params['strategy']!r}")


@adapter("ragen.select_groups", sets=("selected",))
def select_groups(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {"selected": jnp.flatnonzero(chosen(jnp.asarray(inputs["scores"]), params))}


@adapter("ragen.reward_filter")
def reward_filter(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """A row is an episode, or a turn that carries its episode's reward; episodes follow each other group by group."""
    rows = row_rewards(inputs["scores"])
    episode = np.arange(len(rows)) if inputs["episode_ids"] is None else first_seen(inputs["episode_ids"])
    group = jnp.asarray(episode // (len(set(episode.tolist())) // params["num_groups"]))
    once = jnp.zeros(len(rows), bool).at[np.unique(episode, return_index=True)[1]].set(True)
    kinds: dict[str, filters.Score] = {"reward": "mean", "reward_sum": "sum", "reward_variance": "std"}
    score = filters.group_score(rows, group, once, score=kinds[params["metric"]])[: params["num_groups"]]
    kept = chosen(score, params)[group]
    std = filters.group_score(rows, group, once)[group]
    return {"kept_rows": jnp.flatnonzero(kept), "reward_std": std[kept]}


def first_seen(labels: Any) -> Any:
    """Numbers for labels, in the order in which they first appear."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def row_rewards(scores: Any) -> Any:
    return units.unit_sum(jnp.asarray(scores))[:, 0]


def variances(inputs: dict[str, Any], params: dict[str, Any]) -> tuple[Any, Any, Any]:
    rewards, group = row_rewards(inputs["token_level_scores"]), jnp.asarray(first_seen(inputs["uid"]))
    everyone = jnp.ones(group.shape, bool)
    variance = filters.group_score(rewards, group, everyone, score="variance", divisor="sample" if params["ddof"] else "population")
    return variance, group, filters.group_exists(group, everyone)


def reported(name: str, variance: Any, kept: Any, there: Any, rows: Any) -> dict[str, Any]:
    of_kept, of_all = diagnostics.summary(variance, kept), diagnostics.summary(variance, there)
    found = {f"filter/train/{name}/{key}_variance": value for key, value in zip(("mean", "min", "max"), pick(of_kept), strict=True)}
    found |= {f"filter/train/original/{key}_variance": value for key, value in zip(("mean", "min", "max"), pick(of_all), strict=True)}
    return found | {"filter/train/original/batch_size": len(rows), "filter/train/filtered/batch_size": int(rows.sum())}


def pick(summary: diagnostics.Summary) -> tuple[Any, Any, Any]:
    return summary.mean, summary.minimum, summary.maximum


@adapter("vagen.reward_variance_top_p")
def reward_variance_top_p(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    variance, group, there = variances(inputs, params)
    kept = filters.nucleus(variance, there, share=params["top_p"])
    rows = kept[group]
    return reported("top_p", variance, kept, there, rows) | {
        "kept_rows": jnp.flatnonzero(rows),
        "advantages": filters.rescaled(jnp.asarray(inputs["advantages"]), kept, there)[rows],
        "filter/train/top_p/cumulative_variance_ratio": filters.kept_share(variance, kept, there),
        "filter/train/top_p/num_selected_groups": diagnostics.summary(variance, kept).number,
        "filter/train/top_p/num_total_groups": diagnostics.summary(variance, there).number,
        "filter/train/top_p/loss_scale": filters.rescaled(jnp.ones(()), kept, there),
    }


@adapter("vagen.reward_variance_topk")
def reward_variance_topk(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    variance, group, there = variances(inputs, params)
    kept = filters.best(variance, there, fraction=params["topk"])
    rows = kept[group]
    return reported("topk", variance, kept, there, rows) | {
        "kept_rows": jnp.flatnonzero(rows),
        "advantages": jnp.asarray(inputs["advantages"])[rows],
    }


unsupported("nothing at all is kept where scores of 0 come first", "ragen.select_groups.05")
unsupported(
    "which of equal scores are taken is up to torch.topk, the lower numbers here", "ragen.select_groups.19", "ragen.reward_filter.05"
)
