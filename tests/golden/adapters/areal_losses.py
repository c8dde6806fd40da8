"""AReaL's losses, KL estimator and approximations of the proximal policy."""

from typing import Any

from agentrl_jax.kernels.kl import kl
from agentrl_jax.kernels.proximal import proximal_log_prob
from tests.golden.adapter import adapter


@adapter("areal.kl_estimator")
def kl_estimator(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    limit = 10.0 if p["apply_clamp"] else None
    return {"kl": kl(x["log_probs"] - x["log_probs_base"], estimator=p["kl_estimator"], max_log_ratio=None, max_value=limit)}


@adapter("areal.prox_logp_approx")
def prox_logp_approx(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    where = (x["logprobs"], x["old_logp"], x["versions"], p["current_version"])
    return {
        "loglinear": proximal_log_prob(*where, interpolation="log"),
        "linear": proximal_log_prob(*where, interpolation="linear", floor=1e-10),
        "rollout": proximal_log_prob(*where, interpolation="behaviour"),
    }
