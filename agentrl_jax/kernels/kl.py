"""KL divergence to a reference policy, estimated from the log-probs of tokens that the policy sampled.

With `d = log pi - log ref` at a sampled token (http://joschu.net/blog/kl-approx.html): k1 = d and k3 = exp(-d) + d - 1 are unbiased
values of KL(pi || ref), k2 = d^2 / 2 is biased. *Gradients* are another matter. Of tokens sampled from pi, only the gradient of k2
is that of KL(pi || ref) in expectation: that of k1 is 0, that of k3 belongs to KL(ref || pi). So as a term of the loss use k2, or
another value with `gradient="k2"`, or give `ratio`; in the reward (`penalised`) any unbiased value will do.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.kernels.policy_loss import MAX_LOG_RATIO

Estimator = Literal["k1", "abs", "k2", "k3"]
Gradient = Literal["own", "k2"]


def kl(
    log_ratio: Float[Array, "*S"],
    *,
    estimator: Estimator = "k2",
    gradient: Gradient = "own",
    ratio: Float[Array, "*S"] | None = None,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    max_value: float | None = None,
) -> Float[Array, "*S"]:
    """Estimate for each token from `d = log_ratio = log pi - log ref`, masked tokens already 0 (`policy_loss.masked_log_ratio`).

    Args:
        log_ratio: the gradient is with respect to this one and to `ratio`.
        estimator: "k1" d | "abs" |d| | "k2" d^2 / 2 | "k3" exp(-d) + d - 1.
        gradient: "own", of the value as it stands; "k2", straight through: the value of `estimator` and the gradient d of k2, both times
            `ratio` if there is one. Neither clamp stops that gradient.
        ratio: pi / behaviour of the token, differentiable. It makes value and gradient of k1 and k3 unbiased for tokens that an older
            policy sampled (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1). On policy it is
            `exp(log pi - stop_gradient(log pi))`, 1 with the gradient of the score. Times it, k3 has exactly the gradient `ratio * d`.
        max_log_ratio: clamp of d in k3, whose exp overflows otherwise; no gradient beyond. None for no clamp.
        max_value: clamp of the result, `ratio` included, to +-max_value; no gradient beyond. None for no clamp.

    Example:
        >>> kl(jnp.array([0.5]), estimator="k3")  # doctest: +SKIP
        Array([0.10653066])
    """
    d = log_ratio
    if estimator == "k1":
        value = d
    elif estimator == "abs":
        value = jnp.abs(d)
    elif estimator == "k2":
        value = 0.5 * jnp.square(d)
    elif estimator == "k3":
        bounded = d if max_log_ratio is None else jnp.clip(d, -max_log_ratio, max_log_ratio)
        value = jnp.expm1(-bounded) + bounded
    else:
        raise ValueError(f"KL estimator {estimator!r}: choose k1, abs, k2 or k3")
    if ratio is not None:
        value = ratio * value
    if max_value is not None:
        value = jnp.clip(value, -max_value, max_value)
    if gradient == "own":
        return value
    if gradient == "k2":
        constant = jax.lax.stop_gradient(d if ratio is None else ratio * d)
        return jax.lax.stop_gradient(value) + constant * (d - jax.lax.stop_gradient(d))
    raise ValueError(f"gradient {gradient!r}: choose own or k2")


def penalised(
    reward: Float[Array, "*S"], estimate: Float[Array, "*S"], mask: Bool[Array, "*S"], coefficient: float | Float[Array, ""]
) -> Float[Array, "*S"]:
    """KL in the reward: `reward - coefficient * estimate` at the tokens of `mask`, `reward` elsewhere.

    Source: https://arxiv.org/abs/1909.08593, Eq. 2. No gradient flows through it: a reward is a number. Rewards on tokens outside
    `mask` stay where they are.
    """
    return reward - coefficient * jax.lax.stop_gradient(jnp.where(mask, estimate, 0.0))


def adapted(
    coefficient: Float[Array, ""],
    observed: Float[Array, ""],
    *,
    target: float,
    horizon: float,
    steps: float | Float[Array, ""],
    max_error: float = 0.2,
) -> Float[Array, ""]:
    """KL coefficient after an update that observed a KL: `coefficient * (1 + clip(observed / target - 1, +-max_error) * steps / horizon)`.

    The proportional controller in log space of https://arxiv.org/abs/1909.08593, section 2.2; `steps / horizon` is its K_beta. The
    coefficient is the whole state.

    Args:
        coefficient: before the update.
        observed: mean KL of the update's samples.
        target: KL at which the coefficient stays.
        horizon: number of steps over which an error at the clip changes the coefficient by about `max_error`.
        steps: what the update counts for, in the unit of `horizon`: samples (PPO of that paper) or 1 for each update.
        max_error: clip of the relative error.
    """
    error = jnp.clip(observed / target - 1.0, -max_error, max_error)
    return coefficient * (1.0 + error * steps / horizon)
