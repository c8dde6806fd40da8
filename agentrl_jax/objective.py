"""What is minimised. A loss is a pure function: `PolicyInputs -> PerToken`, both over tokens `[B, T]`.

The weights that reduce it to one number are made in `kernels/reduce.py`; here nothing is summed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.kernels import kl as kl_kernels
from agentrl_jax.kernels import policy_loss


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyInputs:
    """Log-probs of every token under each policy, and what it is credited with.

    new:       under the weights being trained; carries the gradient
    entropy:   of the distribution `new` comes from; carries a gradient too
    behaviour: under the weights that sampled the token, as the sampler reported it
    reference: under the reference policy, or None
    advantage: from the credit rule
    mask:      tokens in the loss; everything else may hold anything
    """

    new: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    behaviour: Float[Array, "B T"]
    reference: Float[Array, "B T"] | None
    advantage: Float[Array, "B T"]
    mask: Bool[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerToken:
    """loss: to be weighted, summed and minimised. metrics: to be weighted and summed for people."""

    loss: Float[Array, "B T"]
    metrics: dict[str, Float[Array, "B T"]] = field(default_factory=dict)


LossFn = Callable[[PolicyInputs], PerToken]


def ppo(
    inputs: PolicyInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    kl_estimator: kl_kernels.Estimator = "k2",
    entropy: float = 0.0,
) -> PerToken:
    """Clipped policy gradient, plus `kl` times the KL to the reference, minus `entropy` times the entropy."""
    log_ratio = policy_loss.masked_log_ratio(inputs.new, inputs.behaviour, inputs.mask)
    advantage = jnp.where(inputs.mask, inputs.advantage, 0.0)
    loss = policy_loss.ppo_clip(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    token_entropy = jnp.where(inputs.mask, inputs.entropy, 0.0)
    metrics = {
        "ratio": jnp.exp(log_ratio),
        "clip_fraction": policy_loss.clipped(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high).astype(loss.dtype),
        "entropy": token_entropy,
        "kl": kl_kernels.kl(-log_ratio, estimator="k3"),
    }
    if inputs.reference is not None:
        to_reference = policy_loss.masked_log_ratio(inputs.new, inputs.reference, inputs.mask)
        metrics["kl_reference"] = kl_kernels.kl(to_reference, estimator="k3")
        loss = loss + kl * kl_kernels.kl(to_reference, estimator=kl_estimator)
    return PerToken(loss - entropy * token_entropy, metrics)


def supervised(inputs: PolicyInputs) -> PerToken:
    """Negative log-likelihood of the tokens in the loss: imitation of whoever wrote them."""
    return PerToken(-inputs.new, {"entropy": inputs.entropy})
