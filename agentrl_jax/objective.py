"""What is minimised. A loss is a pure function: `PolicyInputs -> PerToken`, both over tokens `[B, T]`.

    policy(term=...)   any loss of kernels/policy_loss.py or sequence_loss.py, times the correction's weight, plus KL, minus entropy
    ppo                the same with PPO's clip: what most runs want
    kl_cov, clip_cov   losses that single out a few tokens
    supervised         imitation

The weights that reduce a loss to one number are made in `kernels/reduce.py`; here nothing is summed.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels import covariance, policy_loss, units
from agentrl_jax.kernels import kl as kl_kernels
from agentrl_jax.kernels.policy_loss import MAX_LOG_RATIO

Old = Literal["behaviour", "proximal"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Signals:
    """What is fixed of every token before the first update of a step; all but the advantages may be missing.

    advantages: from the credit rule
    reference:  log-probs under the reference policy
    proximal:   log-probs under the weights before the update
    weight:     from the correction; multiplies the policy's part of the loss
    counted:    from the correction: tokens that are in the loss and in its denominators
    values:     critic's value of the state before each token, before the update
    returns:    from the credit rule: what the critic should say there
    """

    advantages: Float[Array, "B T"]
    reference: Float[Array, "B T"] | None = None
    proximal: Float[Array, "B T"] | None = None
    weight: Float[Array, "B T"] | None = None
    counted: Bool[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyInputs:
    """Log-probs of every token under each policy, and what it is credited with.

    new:       under the weights being trained; carries the gradient
    entropy:   of the distribution `new` comes from; carries a gradient too
    behaviour: under the weights that sampled the token, as the sampler reported it
    signals:   what was known before the update
    mask:      tokens in the loss; everything else may hold anything
    segment, turn: which segment of its row a token is in, and which turn of its episode
    """

    new: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    behaviour: Float[Array, "B T"]
    signals: Signals
    mask: Bool[Array, "B T"]
    segment: Int[Array, "B T"]
    turn: Int[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerToken:
    """loss: to be weighted, summed and minimised. metrics: to be weighted and summed for people."""

    loss: Float[Array, "B T"]
    metrics: dict[str, Float[Array, "B T"]] = field(default_factory=dict)


LossFn = Callable[[PolicyInputs], PerToken]
Term = Callable[..., Float[Array, "B T"]]
"""A loss of kernels/policy_loss.py or sequence_loss.py, or one like them: what its parameters are called says what it is given."""


def policy(
    inputs: PolicyInputs,
    *,
    term: Term = policy_loss.ppo_clip,
    old: Old = "behaviour",
    unit: Literal["segment", "turn"] = "segment",
    max_log_ratio: float | None = MAX_LOG_RATIO,
    kl: float = 0.0,
    kl_estimator: kl_kernels.Estimator = "k2",
    entropy: float = 0.0,
) -> PerToken:
    """A policy loss, plus `kl` times the KL to the reference, minus `entropy` times the entropy.

    Args:
        term: `partial(policy_loss.cispo, max_ratio=5.0)`, `sequence_loss.gspo`, ... It is called with those of these that it has a
            parameter for: logprob, log_ratio, advantage, mask, unit, old_logprob, positive (the advantage is above 0).
        old: log-probs that the ratio is taken to. "proximal" is decoupled PPO (AReaL, https://arxiv.org/abs/2505.24298): the
            correction's weight stands for proximal / behaviour.
        unit: what losses over sequences take for a sequence: a segment (the whole episode, if its history was never rewritten) or a turn.
        max_log_ratio: clamp of the token's log-ratio.
        kl_estimator: see `kernels.kl`; "k2" has the right gradient.
    """
    mask, signals = inputs.mask, inputs.signals
    before = inputs.behaviour if old == "behaviour" else signals.proximal
    if before is None:
        raise ValueError('objective.policy(old="proximal") needs the log-probs before the update, Signals.proximal')
    log_ratio = policy_loss.masked_log_ratio(inputs.new, before, mask, clamp=max_log_ratio)
    advantage = jnp.where(mask, signals.advantages, 0.0)
    labels = (inputs.segment,) if unit == "segment" else (inputs.segment, inputs.turn)
    loss = _called(
        term,
        logprob=lambda: jnp.where(mask, inputs.new, 0.0),
        log_ratio=lambda: log_ratio,
        advantage=lambda: advantage,
        mask=lambda: mask,
        unit=lambda: units.runs(*labels),
        old_logprob=lambda: jnp.where(mask, before, 0.0),
        positive=lambda: advantage > 0,
    )
    metrics = {"ratio": jnp.exp(log_ratio), "kl": kl_kernels.kl(-log_ratio, estimator="k3")}
    if signals.weight is not None:
        weight = jnp.where(mask, signals.weight, 0.0)
        loss, metrics["weight"] = policy_loss.weighted(loss, weight), weight
    return _regularised(inputs, PerToken(loss, metrics), kl, kl_estimator, entropy)


def ppo(
    inputs: PolicyInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    old: Old = "behaviour",
    kl: float = 0.0,
    kl_estimator: kl_kernels.Estimator = "k2",
    entropy: float = 0.0,
) -> PerToken:
    """`policy` with PPO's clip (`kernels.policy_loss.ppo_clip`), and the share of tokens that it holds back."""
    term = partial(policy_loss.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    found = policy(inputs, term=term, old=old, kl=kl, kl_estimator=kl_estimator, entropy=entropy)
    log_ratio = jnp.log(found.metrics["ratio"])
    clipped = policy_loss.clipped(log_ratio, inputs.signals.advantages, clip_low=clip_low, clip_high=clip_high)
    return PerToken(found.loss, found.metrics | {"clip_fraction": clipped.astype(found.loss.dtype)})


def kl_cov(inputs: PolicyInputs, *, fraction: float = 2e-4, coefficient: float = 1.0, entropy: float = 0.0) -> PerToken:
    """KL-Cov (`kernels.covariance.kl_cov`). The tokens are chosen among those of one call: a minibatch in one piece on one device."""

    def term(logprob: Array, log_ratio: Array, advantage: Array, mask: Array) -> Array:
        value = covariance.covariance(logprob, advantage, mask)
        top = covariance.most_covariant(value, mask, covariance.share(mask, fraction))
        return covariance.kl_cov(log_ratio, advantage, top, coefficient=coefficient)

    return policy(inputs, term=term, max_log_ratio=None, entropy=entropy)


def clip_cov(
    inputs: PolicyInputs,
    *,
    fraction: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy: float = 0.0,
) -> PerToken:
    """Clip-Cov (`kernels.covariance.clip_cov`). The tokens are drawn among those of one call, by a key that their log-probs make."""

    def term(logprob: Array, log_ratio: Array, advantage: Array, mask: Array) -> Array:
        bounds = {"lower": lower, "upper": upper, "clip_low": clip_low, "clip_high": clip_high}
        candidates = covariance.clip_cov_candidates(log_ratio, logprob, advantage, mask, **bounds)
        bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(logprob).astype(jnp.float32), jnp.uint32)
        dropped = covariance.choose(candidates, covariance.share(mask, fraction), jax.random.key(jnp.sum(bits, dtype=jnp.uint32)))
        return covariance.clip_cov(log_ratio, advantage, dropped, clip_low=clip_low, clip_high=clip_high)

    return policy(inputs, term=term, entropy=entropy)


def supervised(inputs: PolicyInputs) -> PerToken:
    """Negative log-likelihood of the tokens in the loss: imitation of whoever wrote them."""
    return PerToken(-inputs.new, {"entropy": inputs.entropy})


def _regularised(inputs: PolicyInputs, found: PerToken, kl: float, estimator: kl_kernels.Estimator, entropy: float) -> PerToken:
    """With the KL to the reference and the entropy in loss and metrics."""
    of_tokens = jnp.where(inputs.mask, inputs.entropy, 0.0)
    loss, metrics = found.loss - entropy * of_tokens, found.metrics | {"entropy": of_tokens}
    if inputs.signals.reference is not None:
        apart = policy_loss.masked_log_ratio(inputs.new, inputs.signals.reference, inputs.mask)
        loss = loss + kl * kl_kernels.kl(apart, estimator=estimator)
        metrics["kl_reference"] = kl_kernels.kl(apart, estimator="k3")
    elif kl:
        raise ValueError("a loss with a KL needs the reference's log-probs: set reference=held in the experiment")
    return PerToken(loss, metrics)


def _called(term: Term, **offered: Callable[[], Any]) -> Float[Array, "B T"]:
    """`term` with the arrays that its parameters without a default are named after."""
    needed = [p.name for p in inspect.signature(term).parameters.values() if p.default is inspect.Parameter.empty]
    if unknown := [name for name in needed if name not in offered]:
        raise ValueError(f"objective.policy: the loss asks for {', '.join(unknown)}; there are {', '.join(offered)}")
    return term(**{name: offered[name]() for name in needed})
