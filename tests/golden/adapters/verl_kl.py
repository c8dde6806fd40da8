"""verl's KL estimators, KL in the reward and KL controllers."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.kernels import reduce
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


def controller(p: dict[str, Any]) -> tuple[float, Any]:
    """First coefficient, and how an update changes it, of `fixed(0.05)` or `adaptive(init=0.2,target=0.1,horizon=1000)`."""
    kind, text = p["controller"].removesuffix(")").split("(")
    if kind == "fixed":
        return float(text), lambda coefficient, observed, steps: coefficient
    options = {name: float(value) for name, value in (part.split("=") for part in text.split(","))}
    return options.pop("init"), lambda coefficient, observed, steps: adapted(coefficient, observed, steps=steps, **options)


@adapter("verl.apply_kl_penalty")
def apply_kl_penalty(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask = jnp.asarray(x["response_mask"]) != 0
    coefficient, update = controller(p)
    estimates = estimate(jnp.asarray(x["old_log_probs"] - x["ref_log_prob"]), p["kl_penalty"])
    observed = reduce.weighted_sum(estimates, reduce.token_weights(mask, reduction="episode", episodes=mask.shape[0]))
    return {
        "token_level_rewards": penalised(jnp.asarray(x["token_level_scores"]), estimates, mask, coefficient),
        "beta_used": coefficient,
        "beta_after": update(jnp.asarray(coefficient), observed, mask.shape[0]),
        "current_kl": observed,
    }


@adapter("verl.adaptive_kl_controller")
def adaptive_kl_controller(x: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    def update(coefficient: Any, now: Any) -> Any:
        observed, steps = now
        coefficient = adapted(coefficient, observed, target=p["target_kl"], horizon=p["horizon"], steps=steps)
        return coefficient, coefficient

    return {"values": jax.lax.scan(update, jnp.asarray(p["init_kl_coef"]), (x["current_kl"], x["n_steps"].astype(float)))[1]}
