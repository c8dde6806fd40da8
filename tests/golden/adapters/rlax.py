"""rlax's multistep returns and V-trace. There r_t, discount_t and v_t belong to the state after the action; v_tm1 to that before."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import gae, returns, vtrace
from tests.golden.adapter import adapter


def before(x: Any) -> Any:
    """From the state after each action to the state before; nobody asks what stands before the first."""
    return jnp.concatenate([jnp.zeros(1), x[:-1]])


def lam(i: dict[str, Any], p: dict[str, Any], name: str = "lambda_") -> Any:
    return jnp.asarray(p[name] if name in p else i[name])


def always(r: Any) -> dict[str, Any]:
    """Every step was taken."""
    return {"reward": r, "mask": jnp.ones(r.shape, bool), "truncated": jnp.array(True)}


@adapter("rlax.lambda_returns")
def lambda_returns(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    x = always(i["r_t"]) | {"value": before(i["v_t"]), "bootstrap_value": i["v_t"][-1]}
    return {"returns": returns.lambda_return(**x, discount=jnp.asarray(i["discount_t"]), lam=lam(i, p))}


@adapter("rlax.discounted_returns")
def discounted_returns(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    x = always(i["r_t"]) | {"bootstrap_value": i["v_t"][-1]}
    return {"returns": returns.discounted_return(**x, discount=jnp.asarray(i["discount_t"]))}


@adapter("rlax.n_step_returns")
def n_step_returns(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    x = always(i["r_t"]) | {"value": before(i["v_t"]), "bootstrap_value": i["v_t"][-1]}
    return {"returns": returns.n_step_return(**x, n=p["n"], discount=jnp.asarray(i["discount_t"]), lam=lam(i, p, "lambda_t"))}


@adapter("rlax.truncated_gae")
def truncated_gae(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    x = always(i["r_t"]) | {"value": i["values"][:-1], "bootstrap_value": i["values"][-1]}
    return {"advantages": gae.gae(**x, discount=jnp.asarray(i["discount_t"]), lam=lam(i, p)).advantages}


@adapter("rlax.importance_corrected_td_errors")
def importance_corrected_td_errors(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    x = always(i["r_t"]) | {"value": i["values"][:-1], "bootstrap_value": i["values"][-1], "log_ratio": jnp.log(i["rho_tm1"])}
    return {"errors": vtrace.vtrace(**x, discount=jnp.asarray(i["discount_t"]), lam=lam(i, p), clip_rho=None, clip_c=None).errors}


@adapter("rlax.vtrace", "rlax.vtrace_td_error_and_advantage", "rlax.leaky_vtrace")
def all_vtrace(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    mask = i.get("sample_mask")
    out = vtrace.vtrace(
        log_ratio=jnp.log(i["rho_tm1"]),
        reward=i["r_t"],
        value=i["v_tm1"],
        mask=jnp.ones(i["r_t"].shape, bool),
        steps=None if mask is None else jnp.asarray(mask, bool),
        next_value=jnp.asarray(i["v_t"]),
        discount=jnp.asarray(i["discount_t"]),
        lam=lam(i, p),
        clip_rho=p["clip_rho_threshold"],
        clip_pg=p.get("clip_pg_rho_threshold", 1.0),
        leak=1.0 - p.get("alpha", 1.0),
    )
    return {"errors": out.errors, "pg_advantage": out.advantages, "q_estimate": out.q}


@adapter("rlax.off_policy_returns_q_v")
def off_policy_returns(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    first = jnp.zeros(1)
    x = always(i["r_t"]) | {"value": before(i["v_t"]), "bootstrap_value": i["v_t"][-1]}
    q, trace = jnp.concatenate([first, i["q_t"]]), jnp.concatenate([first, i["c_t"]])
    return {"returns": vtrace.off_policy_return(**x, q=q, trace=trace, discount=jnp.asarray(i["discount_t"]))}
