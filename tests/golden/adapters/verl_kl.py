"""verl's KL estimators, KL in the reward and KL controllers."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.kernels.kl import adapted, kl, penalised
from tests.golden.adapter import adapter

ESTIMATORS: dict[str, dict[str, Any]] = {
    "kl": {"estimator": "k1"},
    "k1": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "mse": {"estimator": "k2"},
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "k3", "max_value": 10.0},
    "low_var_kl": {"estimator": "k3", "max_value": 10.0},
}


def estimate(log_ratio: Any, name: str) -> Any:
    """verl's name of an estimator; "+" is the straight-through gradient."""
    return kl(log_ratio, gradient="k2" if name.endswith("+") else "own", **ESTIMATORS[name.removesuffix("+")])


@adapter("verl.kl_penalty")
def kl_penalty(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    return {"kl": estimate(x["logprob"] - x["ref_logprob"], p["kl_penalty"])}


@adapter("verl.adaptive_kl_controller")
def adaptive_kl_controller(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    def update(coefficient: Any, now: Any) -> Any:
        observed, steps = now
        coefficient = adapted(coefficient, observed, target=p["target_kl"], horizon=p["horizon"], steps=steps)
        return coefficient, coefficient

    return {"values": jax.lax.scan(update, jnp.asarray(p["init_kl_coef"]), (x["current_kl"], x["n_steps"].astype(float)))[1]}
