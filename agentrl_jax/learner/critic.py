"""The critic of a run: a value head on a decoder of its own or on the policy's, what it is trained to say, and its optimizer.

Values are those of the state before each token, at the same hidden states that log-probs come from. They are read once before the updates
of a step; credit makes advantages and returns of them, and the critic is trained towards the returns in the minibatches of the policy.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from agentrl_jax.config import Critic
from agentrl_jax.credit import actions
from agentrl_jax.data.batch import Batch
from agentrl_jax.kernels.value_loss import value_clipped, value_loss
from agentrl_jax.models.heads import ValueHead, init_value_head, values_at_end, values_before
from agentrl_jax.models.lora import Trained
from agentrl_jax.objective import PerToken, Signals


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CriticWeights:
    """head: of `models.heads`; trunk: what its decoder is trained to, as the policy is; None: the head reads the policy's."""

    head: ValueHead
    trunk: Trained | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CriticState:
    """What training changes of a critic."""

    weights: CriticWeights
    opt_state: optax.OptState


class Values(NamedTuple):
    """before: of the state before each token; at_end: of that in which each episode was left."""

    before: Float[Array, "B T"]
    at_end: Float[Array, " E"]


@dataclass(frozen=True)
class CriticLearner:
    """The fixed half of a critic. Hashable, so a jit key."""

    settings: Critic
    optimizer: optax.GradientTransformation

    def init(self, hidden_size: int, params: Trained) -> CriticState:
        """A critic that says 0 of everything, on a copy of the policy's weights where its trunk is its own."""
        trunk: Any = jax.tree.map(jnp.copy, params) if self.settings.trunk == "separate" else None
        weights: Any = CriticWeights(init_value_head(hidden_size), trunk)
        return CriticState(weights, self.optimizer.init(weights))

    def shared(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The policy's hidden states as the head reads them: the gradient goes back through them by a share of `coefficient`."""
        fixed = jax.lax.stop_gradient(hidden)
        return fixed + self.settings.coefficient * (hidden - fixed)

    def loss(self, value: Float[Array, "B T"], signals: Signals, mask: Bool[Array, "B T"]) -> PerToken:
        """Value loss of each token (`kernels.value_loss`) and what people see of it."""
        assert signals.values is not None
        assert signals.returns is not None
        settings = self.settings
        held: dict[str, Any] = {} if settings.clip is None else {"old": signals.values, "clip": settings.clip}
        loss = value_loss(value, signals.returns, mask, **held, huber=settings.huber)
        metrics = {"value_loss": loss, "value": jnp.where(mask, value, 0.0)}
        if held:
            metrics["value_clip_fraction"] = value_clipped(value, signals.returns, mask, **held).astype(loss.dtype)
        return PerToken(loss, metrics)

    def stepped(self, state: CriticState, gradient: CriticWeights) -> CriticState:
        """After one step of the optimizer."""
        weights: Any = state.weights
        change, opt_state = self.optimizer.update(gradient, state.opt_state, weights)  # pyright: ignore[reportArgumentType]
        weights = optax.apply_updates(weights, change)
        return CriticState(weights, opt_state)


def values_of(behind: Float[Array, "B T"], batch: Batch) -> Values:
    """Values of a batch from those of the states behind all its tokens."""
    tokens = batch.tokens
    last = tokens.mask & (tokens.action == actions(batch)[tokens.episode] - 1)
    at_end = values_at_end(behind, tokens.segment, tokens.episode, last, episodes=len(batch.episodes.group))
    return Values(values_before(behind, tokens.position), at_end)
