"""verl's estimators over time: observations are skipped, rewards on them dropped, results whitened over all tokens."""

from typing import Any

import jax.numpy as jnp

from agentrl_jax.kernels import gae, returns
from agentrl_jax.kernels.whiten import whiten
from tests.golden.adapter import adapter, unsupported


def whitened(x: Any, mask: Any) -> Any:
    return whiten(x, mask, divisor="sample", eps=1e-8, eps_in="variance")


def arguments(i: dict[str, Any]) -> tuple[Any, Any]:
    mask = jnp.asarray(i["response_mask"], bool)
    if mask.sum() < 2:
        raise ValueError("no variance of fewer than two tokens")
    return jnp.asarray(i["token_level_rewards"]), mask


@adapter("verl.gae")
def verl_gae(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    reward, mask = arguments(i)
    out = gae.gae(reward, jnp.asarray(i["values"]), mask, discount=p["gamma"], lam=p["lam"], off_step="drop")
    return {"advantages": whitened(out.advantages, mask), "returns": out.returns}


@adapter("verl.reinforce_plus_plus")
def reinforce_plus_plus(i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    reward, mask = arguments(i)
    out = returns.discounted_return(reward, mask, discount=p["gamma"], off_step="drop")
    return {"advantages": whitened(out, mask), "returns": out}


unsupported(
    "its mean divides by the number of tokens plus 1e-8, so equal returns whiten to 2e-6; to exactly 0 here",
    "verl.reinforce_plus_plus.05",
    output="advantages",
)
