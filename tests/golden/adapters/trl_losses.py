"""TRL's GRPO losses. Advantages are one for each row; the loss mask is `completion_mask` without tool output."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.kernels import correction, diagnostics, entropy, policy_loss, reduce, sequence_loss, units
from agentrl_jax.kernels.kl import kl
from tests.golden.adapter import adapter

REDUCTION: dict[str, reduce.Reduction] = {
    "grpo": "episode",
    "sapo": "episode",
    "bnpo": "token",
    "dapo": "token",
    "cispo": "token",
    "vespo": "token",
    "dr_grpo": "constant",
    "luspo": "episode_sum",
}
"""Loss type -> our reduction; all rows count, the empty ones too."""


class Tokens:
    """A case's arrays, 0 where not in the loss."""

    def __init__(self, x: dict[str, Any], p: dict[str, Any]) -> None:
        mask = jnp.asarray(x["completion_mask"]) != 0
        self.mask = mask if x["tool_mask"] is None else mask & (x["tool_mask"] != 0)
        self.rows = mask.shape[0]
        self.new = jnp.where(self.mask, x["per_token_logps"], 0.0)
        self.old = jax.lax.stop_gradient(self.new) if x["old_per_token_logps"] is None else x["old_per_token_logps"]
        self.advantage = jnp.where(self.mask, x["advantages"][:, None], 0.0)
        self.log_ratio = self.log_ratio_to(self.old)
        weight = x["importance_sampling_ratio"]
        self.weight = None if weight is None else jnp.broadcast_to(weight, mask.shape)
        self.by_sequence = p["importance_sampling_level"] == "sequence"

    def log_ratio_to(self, other: Any) -> Any:
        return policy_loss.masked_log_ratio(self.new, jnp.asarray(other), self.mask, clamp=None)

    def ratio(self) -> Any:
        """Log-ratio of the token or of its row."""
        return sequence_loss.sequence_log_ratio(self.log_ratio, self.mask, None) if self.by_sequence else self.log_ratio

    def mean(self, x: Any) -> Any:
        """Over tokens, or over rows of what is one number for each row."""
        how: dict[str, Any] = {"reduction": "episode", "episodes": self.rows} if self.by_sequence else {"reduction": "token"}
        return reduce.weighted_sum(x * 1.0, reduce.token_weights(self.mask, **how))


def clips(p: dict[str, Any]) -> dict[str, float]:
    return {"clip_low": p["epsilon_low"], "clip_high": p["epsilon_high"]}


def finished(t: Tokens, per_token: Any, x: dict[str, Any], p: dict[str, Any], weighted: bool = True) -> dict[str, Any]:
    """What all loss types share: rejected rows, tokens of high entropy, importance weights, KL, reduction, entropy bonus."""
    found, chosen = {}, t.mask
    if p["off_policy_mask_threshold"] is not None:
        sampled = t.old if x["sampling_per_token_logps"] is None else x["sampling_per_token_logps"]
        keep = correction.opsm(t.log_ratio_to(sampled), t.advantage, t.mask, delta=p["off_policy_mask_threshold"])
        per_token = jnp.where(keep, per_token, 0.0)
    if p["top_entropy_quantile"] < 1.0:
        chosen = entropy.highest(jnp.asarray(x["entropies"]), t.mask, share=p["top_entropy_quantile"])
        per_token = jnp.where(chosen, per_token, 0.0)
    if weighted and t.weight is not None:
        per_token = policy_loss.weighted(per_token, t.weight)
    if p["beta"]:
        ratio = jnp.exp(t.ratio()) if p["use_bias_correction_kl"] else None
        estimate = kl(t.log_ratio_to(x["ref_per_token_logps"]), estimator="k3", ratio=ratio, max_log_ratio=None)
        per_token = per_token + p["beta"] * estimate
        found["kl"] = diagnostics.summary(estimate, t.mask).mean
    weights = reduce.token_weights(
        t.mask,
        reduction=REDUCTION[p["loss_type"]],
        horizon=p["max_completion_length"] if p["loss_type"] == "dr_grpo" else None,
        tokens=p["num_items_in_batch"],
        episodes=t.rows,
    )
    loss = reduce.weighted_sum(per_token, weights)
    found |= {"policy_loss": loss, "entropy_coef": p["entropy_coef"]}
    if p["entropy_coef"]:
        bonus = reduce.weighted_sum(jnp.asarray(x["entropies"]), reduce.token_weights(chosen))
        loss = loss - p["entropy_coef"] * bonus
    return found | {"loss": loss}


CLIPPED = ("trl.loss_grpo", "trl.loss_bnpo", "trl.loss_dr_grpo", "trl.loss_dapo", "trl.loss_luspo")
GRADIENTS = {"grad": ("per_token_logps", "loss")}


@adapter(*CLIPPED, gradients=GRADIENTS)
def clipped(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    t = Tokens(x, p)
    per_token = policy_loss.ppo_clip(t.ratio(), t.advantage, max_ratio=p["delta"], **clips(p))
    out = policy_loss.clipped(t.ratio(), t.advantage, **clips(p))
    low, high = out & (t.advantage < 0), out & (t.advantage > 0)
    of_row = [diagnostics.summary(units.unit_mean(side * 1.0, t.mask), t.mask) for side in (low, high)]
    return finished(t, per_token, x, p) | {
        "clip_ratio/low_mean": t.mean(low),
        "clip_ratio/high_mean": t.mean(high),
        "clip_ratio/region_mean": t.mean(out),
        "clip_ratio/low_min": of_row[0].minimum,
        "clip_ratio/high_max": of_row[1].maximum,
    }


@adapter("trl.loss_sapo", gradients=GRADIENTS)
def sapo(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    t = Tokens(x, p)
    temperatures = {"tau_positive": p["sapo_temperature_pos"], "tau_negative": p["sapo_temperature_neg"]}
    return finished(t, policy_loss.sapo(t.ratio(), t.advantage, **temperatures), x, p)


@adapter("trl.loss_cispo", gradients=GRADIENTS)
def cispo(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """`epsilon_high` is the largest ratio itself, and there is no smallest."""
    t, cap = Tokens(x, p), p["epsilon_high"]
    above = policy_loss.outside(t.ratio(), min_ratio=0.0, max_ratio=cap) & (t.advantage > 0)
    return finished(t, policy_loss.cispo(t.new, t.ratio(), t.advantage, max_ratio=cap), x, p) | {"cispo_clip_ratio": t.mean(above)}


@adapter("trl.loss_vespo", gradients=GRADIENTS)
def vespo(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """The importance weights are part of the sequence's ratio, those of tokens outside the loss included."""
    t = Tokens(x, p)
    everywhere = jnp.ones_like(t.mask)
    log_ratio = policy_loss.masked_log_ratio(t.new, jnp.asarray(t.old), t.mask)
    phi = sequence_loss.vespo_weight(log_ratio, t.advantage, everywhere, None, weight=t.weight)
    per_token = sequence_loss.vespo(t.new, log_ratio, t.advantage, everywhere, None, weight=t.weight)
    t.by_sequence = True
    return finished(t, per_token, x, p, weighted=False) | {"vespo/phi_seq_mean": t.mean(phi)}
