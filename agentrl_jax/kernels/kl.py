"""Estimators of the KL divergence to a reference policy, from log-probs of tokens that the policy sampled.

With `d = log pi - log ref` at sampled tokens (http://joschu.net/blog/kl-approx.html): k1 = d and k3 = exp(-d) + d - 1 are
unbiased values of KL(pi || ref), k2 = d^2 / 2 is biased. *As a loss* only k2 has the right gradient in expectation: that of
k1 is 0, that of k3 belongs to KL(ref || pi).
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.kernels.policy_loss import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def kl(log_ratio: Float[Array, "*S"], *, estimator: Estimator = "k2") -> Float[Array, "*S"]:
    """Per-token estimate from `log_ratio = log pi - log ref`, masked tokens already 0 (`policy_loss.masked_log_ratio`)."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio)
    if estimator == "k3":
        return jnp.exp(-jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)) + log_ratio - 1.0
    raise ValueError(f"KL estimator {estimator!r}: choose k1, k2 or k3")
