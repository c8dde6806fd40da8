"""prime-rl's losses. A sequence is one row; what is stored beyond its length is in no loss."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import correction, diagnostics, policy_loss, reduce
from agentrl_jax.kernels.kl import kl, penalised
from tests.golden.adapter import adapter


class Tokens:
    """A case's arrays as rows, 0 where not in the mask."""

    def __init__(self, inputs: dict[str, Any], mask: Any = None) -> None:
        self.mask = jnp.atleast_2d(inputs["loss_mask"] if mask is None else mask)
        self.new, self.rollout, self.reference, self.advantage = (
            jnp.where(self.mask, jnp.atleast_2d(inputs[name]), 0.0)
            for name in ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages")
        )
        self.log_ratio = policy_loss.masked_log_ratio(self.new, self.rollout, self.mask, clamp=None)

    def mean(self, x: Any, part: Any = True) -> Any:
        return diagnostics.summary(x, self.mask & part).mean

    def total(self, per_token: Any, weight: Any) -> Any:
        """Sum over the mask, with a weight for each token if there are any."""
        if weight is not None:
            per_token = policy_loss.weighted(per_token, jnp.atleast_2d(weight))
        return reduce.weighted_sum(per_token, reduce.token_weights(self.mask, reduction="sum"))

    def toward_reference(self) -> Any:
        """Minus the KL to the reference as the only reward."""
        return penalised(jnp.zeros_like(self.new), kl(self.new - self.reference, estimator="k1"), self.mask, 1.0)

    def dppo(self, advantage: Any, *, low: float, high: float, two_sided: bool, tau: float, penalty: float) -> tuple[Any, Any]:
        """Loss of each token, and whether its gradient is kept."""
        keep = policy_loss.in_trust_region(self.new, self.rollout, advantage, low=low, high=high, two_sided=two_sided)
        return policy_loss.dppo(self.new, self.log_ratio, tau * advantage, keep, through="ratio", penalty=penalty), keep

    def mismatch(self, keep: Any) -> dict[str, Any]:
        divergence = correction.divergence(self.log_ratio, statistic="k3")
        return {
            "masked_mismatch_kl": self.mean(divergence, ~keep),
            "unmasked_mismatch_kl": self.mean(divergence, keep),
            "is_masked": self.mean(~keep),
        }


def default_options(p: dict[str, Any]) -> dict[str, Any]:
    return {"low": p["dppo_mask_low"], "high": p["dppo_mask_high"], "two_sided": False, "tau": p["adv_tau"], "penalty": p["kl_tau"]}


REF_KL: dict[str, Any] = {"low": 0.2, "high": 0.2, "two_sided": True, "tau": 1.0, "penalty": 1e-3}


@adapter("prime_rl.loss_default")
def default(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    t = Tokens(x)
    per_token, keep = t.dppo(t.advantage, **default_options(p))
    positive, negative = t.advantage > 0, t.advantage < 0
    return t.mismatch(keep) | {
        "loss": t.total(per_token, x["loss_weights"]),
        "is_masked_low": t.mean(~keep & negative),
        "is_masked_high": t.mean(~keep & positive),
        "masked_advantage_positive": t.mean(positive, ~keep),
        "masked_advantage_negative": t.mean(negative, ~keep),
    }


@adapter("prime_rl.loss_ipo")
def ipo(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    t, threshold = Tokens(x), p["ipo_threshold"]
    per_token, keep = t.dppo(t.advantage, low=threshold, high=threshold, two_sided=True, tau=p["adv_tau"], penalty=p["kl_tau"])
    return t.mismatch(keep) | {"loss": t.total(per_token, x["loss_weights"])}


@adapter("prime_rl.loss_ref_kl")
def ref_kl(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    t = Tokens(x)
    per_token, keep = t.dppo(t.toward_reference(), **REF_KL)
    found = {f"ref_kl/{name}": value for name, value in t.mismatch(keep).items()}
    return found | {"loss": t.total(per_token, x["loss_weights"]), "ref_kl": t.mean(t.toward_reference())}


@adapter("prime_rl.loss_ce")
def ce(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    t = Tokens(x)
    return {"loss": t.total(policy_loss.reinforce(t.new, jnp.ones_like(t.new)), x["loss_weights"]), "nll": t.mean(-t.new)}


@adapter("prime_rl.compute_loss")
def compute_loss(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """Up to three losses over the same rows, each with its own weights, which are also its mask, and its own denominator."""
    exists = jnp.arange(x["loss_mask"].shape[1]) < jnp.asarray(x["lengths"])[:, None]

    def part(name: str, mask: Any) -> Any:
        weight = x[f"{name}_weights"]
        t = Tokens(x, mask & exists if weight is None else mask & exists & (weight != 0))
        if name == "rl":
            per_token, _ = t.dppo(t.advantage, **default_options(p))
        elif name == "ce":
            per_token = policy_loss.reinforce(t.new, jnp.ones_like(t.new))
        else:
            per_token, _ = t.dppo(t.toward_reference(), **REF_KL)
        if weight is not None:
            per_token = policy_loss.weighted(per_token, weight)
        return per_token, reduce.token_weights(t.mask, tokens=p[f"{name}_scale"])

    parts = [part("rl", x["loss_mask"])]
    parts += [part(name, jnp.ones(exists.shape, bool)) for name in ("ce", "ref_kl") if x[f"{name}_weights"] is not None]
    losses, weights = (jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"loss": reduce.weighted_sum(losses, weights)}
