"""The jitted learner: credit, loss, gradient and optimizer step of one minibatch. Pure functions of state and batch; nothing is
fetched to the host inside, and buffers of the old state are donated.

Log-probs come from one code path (`token_logprobs_of`), for the gradient as for every comparison. Two calls of `logprobs` agree bit for
bit; the program of the gradient, which XLA fuses in its own way, agrees to rounding (1e-6).
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.correction import CorrectionFn
from agentrl_jax.credit import AdvantageFn, Estimates
from agentrl_jax.data.batch import Batch, Tokens, trained
from agentrl_jax.kernels.reduce import Reduction, token_weights
from agentrl_jax.learner import devices
from agentrl_jax.learner.critic import CriticLearner, CriticState, CriticWeights, Values, values_of
from agentrl_jax.learner.forward import hidden_of, logprobs_at, token_logprobs_of
from agentrl_jax.models.decoder import FLOAT32, Compute, ModelConfig, Params, unembed
from agentrl_jax.models.heads import values_before, values_behind
from agentrl_jax.models.lora import Trained, frozen
from agentrl_jax.models.sharding import ROWS, constrain, everywhere, place, rows_mesh
from agentrl_jax.objective import LossFn, PolicyInputs, Signals

_BY_ROW = (Tokens, Signals)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What training changes. params: all weights, or an adapter; updates: optimizer steps done, i32, those of the critic alone too."""

    params: Trained
    opt_state: optax.OptState
    updates: Int[Array, ""]
    critic: CriticState | None = None


@dataclass(frozen=True)
class Learner:
    """The fixed half of training: a model, an optimizer and the functions that make a loss. Hashable, so a jit key.

    reduction:  which tokens count the same, see `kernels.reduce.token_weights`
    horizon:    tokens, for the reductions that have one
    correction: what is done about tokens that other weights sampled
    accumulate: pieces a minibatch is computed in, one after the other; changes memory, not the gradient. With pieces of a thousand tokens
                a device CPUs are faster, as the system clears a program's memory at every call
    compute:    how the decoder computes
    critic:     for credit rules that need values; trained in the same updates
    mesh:       devices; those along data and fsdp hold and compute a share of the rows each: the rows of a batch must be a multiple of
                these devices, those of an update a multiple of `accumulate` times these devices
    """

    model: ModelConfig
    optimizer: optax.GradientTransformation
    advantage: AdvantageFn
    loss: LossFn
    reduction: Reduction = "token"
    accumulate: int = 1
    correction: CorrectionFn | None = None
    horizon: float | None = None
    compute: Compute = FLOAT32
    critic: CriticLearner | None = None
    mesh: Mesh = field(default_factory=partial(rows_mesh, 1))

    def init(self, params: Trained) -> TrainState:
        """The state before the first update. The parameters are copied: updates donate their buffers."""
        return self._first(self.place(params))

    @partial(jax.jit, static_argnums=0)
    def _first(self, params: Trained) -> TrainState:
        """In a jit, so that no device ever holds whole moments."""
        copied: Any = jax.tree.map(jnp.copy, params)
        critic = self.critic.init(self.model.hidden_size, params) if self.critic else None
        return constrain(self.mesh, TrainState(copied, self.optimizer.init(copied), jnp.int32(0), critic))

    def place(self, tree: Any) -> Any:
        """What the other methods take: weights and moments split as `models.sharding` says, tokens and signals by rows, all else whole.

        Raises ValueError where the devices do not divide the rows.
        """
        return place(self.mesh, tree, _BY_ROW)

    @partial(jax.jit, static_argnums=0)
    def whole(self, tree: Any) -> Any:
        """All arrays whole on every device, so that every process can fetch them."""
        return jax.lax.with_sharding_constraint(tree, everywhere(self.mesh))

    @partial(jax.jit, static_argnums=0)
    def logprobs(self, params: Trained, tokens: Tokens, base: Params | None = None) -> Float[Array, "B T"]:
        """Log-prob of every token of `predict` under `params`, 0 elsewhere. base: what is adapted, where `params` are an adapter."""
        return devices.on_rows(self.mesh, self._logprobs, (params, base), tokens, out=lambda _: PartitionSpec(ROWS))

    @partial(jax.jit, static_argnums=0)
    def values(self, state: TrainState, batch: Batch, base: Params | None = None) -> Values | None:
        """What the critic says of the states of a batch; None without a critic."""
        if state.critic is None:
            return None
        weights = state.critic.weights
        trunk = state.params if weights.trunk is None else weights.trunk
        of_critic = weights.head, trunk, base
        return values_of(devices.on_rows(self.mesh, self._behind, of_critic, batch.tokens, out=lambda _: PartitionSpec(ROWS)), batch)

    @partial(jax.jit, static_argnums=0)
    def signals(
        self,
        batch: Batch,
        proximal: Float[Array, "B T"] | None = None,
        reference: Float[Array, "B T"] | None = None,
        values: Values | None = None,
    ) -> Signals:
        """Credit and correction of the whole batch. proximal: log-probs under the weights before the update, needed by a correction."""
        before, at_end = values or (None, None)
        credit = self.advantage(batch, Estimates(reference, proximal, before, at_end))
        if self.critic and (before is None or credit.returns is None):
            raise ValueError("a critic needs its values before the update, and a credit rule that gives it returns")
        found = Signals(credit.advantages, reference, proximal, values=before, returns=credit.returns)
        if self.correction is not None:
            if proximal is None:
                raise ValueError("a correction needs the log-probs under the weights before the update")
            corrected = self.correction(batch.tokens, proximal, credit.advantages)
            found = replace(found, weight=corrected.weight, counted=corrected.counted)
        return constrain(self.mesh, found, _BY_ROW)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def update(
        self,
        state: TrainState,
        batch: Batch,
        signals: Signals,
        rows: Int[Array, " b"],
        base: Params | None = None,
    ) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        """One optimizer step on some `rows` of the batch. Returns the new state and metrics, all still on the device.

        Where no token of the rows is in the loss, or the gradient is not finite, the state stays and `skipped` is 1.
        """
        tokens, signals = constrain(self.mesh, jax.tree.map(lambda x: x[rows], (batch.tokens, signals)), _BY_ROW)
        table = batch.episodes
        mask = trained(tokens, table)
        mask = mask if signals.counted is None else mask & signals.counted
        weights = token_weights(mask, tokens.episode, table.group, reduction=self.reduction, horizon=self.horizon)
        changing = state.params, state.critic and state.critic.weights
        (loss, metrics), gradient = devices.on_rows(
            self.mesh,
            self._gradient,
            (changing, base),
            tokens,
            signals,
            mask,
            weights,
            out=lambda split: (PartitionSpec(), split[0]),
        )

        of_policy, of_critic = gradient
        params: Any = state.params
        change, opt_state = self.optimizer.update(of_policy, state.opt_state, params)
        good = moves = jnp.any(mask) & jnp.isfinite(optax.tree.norm(gradient))
        critic = state.critic
        if self.critic and critic:
            moves = good & (state.updates >= self.critic.settings.warmup)
            critic = _where(good, self.critic.stepped(critic, of_critic), critic)
            metrics |= {"value_gradient_norm": optax.tree.norm(of_critic)}
        params, opt_state = _where(moves, (optax.apply_updates(params, change), opt_state), (params, state.opt_state))
        state = constrain(self.mesh, TrainState(params, opt_state, state.updates + good.astype(jnp.int32), critic))
        return state, metrics | {
            "loss": loss,
            "gradient_norm": optax.tree.norm(of_policy),
            "update_norm": jnp.where(moves, optax.tree.norm(change), 0.0),
            "tokens": jnp.sum(mask).astype(jnp.float32),
            "skipped": 1.0 - good.astype(jnp.float32),
        }

    def _logprobs(self, split: Any, both: Any, tokens: Tokens) -> Float[Array, "b T"]:
        params, base = devices.gathered(both, split)
        return token_logprobs_of(self.model, params, tokens, base, self.compute, self.mesh.shape["sequence"])[0]

    def _behind(self, split: Any, of_critic: Any, tokens: Tokens) -> Float[Array, "b T"]:
        head, trunk, base = devices.gathered(of_critic, split)
        return values_behind(head, hidden_of(self.model, trunk, tokens, base, self.compute, self.mesh.shape["sequence"]))

    def _gradient(self, split: Any, both: tuple[Any, Params | None], *rows: Any) -> Any:
        """((loss, metrics), gradient), summed over the pieces of a device's rows and over the devices."""

        def loss(changing: Any, *piece: Any) -> Any:
            changing, base = devices.gathered((changing, both[1]), split)
            return _weighted_loss(self, changing, *piece, base=base)

        gradient_of = partial(jax.value_and_grad(loss, has_aux=True), both[0])
        if self.accumulate == 1:
            total = gradient_of(*rows)
        else:
            pieces = jax.tree.map(lambda x: x.reshape(self.accumulate, -1, *x.shape[1:]), rows)
            shapes = jax.eval_shape(gradient_of, *jax.tree.map(lambda x: x[0], pieces))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            total, _ = jax.lax.scan(lambda total, piece: (jax.tree.map(jnp.add, total, gradient_of(*piece)), None), zeros, pieces)
        values, gradient = total
        return devices.summed(values, gradient, split[0])


def _weighted_loss(
    learner: Learner,
    changing: tuple[Trained, CriticWeights | None],
    tokens: Tokens,
    signals: Signals,
    mask: Bool[Array, "b T"],
    weights: Float[Array, "b T"],
    base: Params | None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Of the policy, plus that of the critic: no weight gets a gradient that is not its own."""

    parts = learner.mesh.shape["sequence"]

    def total(x: Float[Array, "b T"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(mask, weights * x, 0.0)) / parts  # each of them sums the same

    params, critic = changing
    states_of = partial(hidden_of, learner.model, tokens=tokens, base=base, compute=learner.compute, parts=parts)
    hidden = states_of(params)
    logprob, entropy = logprobs_at(hidden, unembed(frozen(params, base)), tokens, parts)
    found = learner.loss(PolicyInputs(logprob, entropy, tokens.logprob, signals, mask, tokens.segment, tokens.turn))
    loss, metrics = total(found.loss), {name: total(x) for name, x in found.metrics.items()}
    if critic is None or learner.critic is None:
        return loss, metrics
    read = learner.critic.shared(hidden) if critic.trunk is None else states_of(critic.trunk)
    of_values = learner.critic.loss(values_before(values_behind(critic.head, read), tokens.position), signals, mask)
    metrics |= {"policy_loss": loss} | {name: total(x) for name, x in of_values.metrics.items()}
    return loss + total(of_values.loss), metrics


def _where(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)
