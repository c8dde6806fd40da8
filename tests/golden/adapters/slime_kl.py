"""slime's KL estimators."""

from typing import Any

from agentrl_jax.kernels.kl import kl
from tests.golden.adapter import adapter

ESTIMATORS: dict[str, dict[str, Any]] = {
    "k1": {"estimator": "k1"},
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "k3", "max_log_ratio": None},
    "low_var_kl": {"estimator": "k3", "max_log_ratio": None, "max_value": 10.0},
}


@adapter("slime.approx_kl")
def approx_kl(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    return {"kl": kl(x["log_probs"] - x["log_probs_base"], ratio=x["importance_ratio"], **ESTIMATORS[p["kl_loss_type"]])}
