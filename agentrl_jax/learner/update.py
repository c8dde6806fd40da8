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
from agentrl_jax.data.batch import Batch, Tokens
from agentrl_jax.kernels.logprob import token_logprobs
from agentrl_jax.kernels.reduce import Reduction, token_weights
from agentrl_jax.learner import devices
from agentrl_jax.models.decoder import FLOAT32, Compute, Decoder, ModelConfig, Params, unembed
from agentrl_jax.models.lora import Trained, attached, frozen
from agentrl_jax.models.sharding import ROWS, constrain, everywhere, place, rows_mesh
from agentrl_jax.models.spread import joined, padded, share
from agentrl_jax.objective import LossFn, PolicyInputs, Signals

LOGITS = 2048  # tokens whose logits exist at the same time
_BY_ROW = (Tokens, Signals)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What training changes. params: all weights, or an adapter; updates: optimizer steps done, i32."""

    params: Trained
    opt_state: optax.OptState
    updates: Int[Array, ""]


@dataclass(frozen=True)
class Learner:
    """The fixed half of training: a model, an optimizer and the functions that make a loss. Hashable, so a jit key.

    reduction:  which tokens count the same, see `kernels.reduce.token_weights`
    horizon:    tokens, for the reductions that have one
    correction: what is done about tokens that other weights sampled
    accumulate: pieces a minibatch is computed in, one after the other; changes memory, not the gradient
    compute:    how the decoder computes
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
    mesh: Mesh = field(default_factory=partial(rows_mesh, 1))

    def init(self, params: Trained) -> TrainState:
        """The state before the first update. The parameters are copied: updates donate their buffers."""
        return self._first(self.place(params))

    @partial(jax.jit, static_argnums=0)
    def _first(self, params: Trained) -> TrainState:
        """In a jit, so that no device ever holds whole moments."""
        copied: Any = jax.tree.map(jnp.copy, params)
        return constrain(self.mesh, TrainState(copied, self.optimizer.init(copied), jnp.int32(0)))

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
    def signals(self, batch: Batch, proximal: Float[Array, "B T"] | None = None, reference: Float[Array, "B T"] | None = None) -> Signals:
        """Credit and correction of the whole batch. proximal: log-probs under the weights before the update, needed by a correction."""
        advantages = self.advantage(batch, Estimates(reference=reference, proximal=proximal)).advantages
        found = Signals(advantages, reference, proximal)
        if self.correction is not None:
            if proximal is None:
                raise ValueError("a correction needs the log-probs under the weights before the update")
            corrected = self.correction(batch.tokens, proximal, advantages)
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
        mask = tokens.mask & tokens.in_loss & table.in_loss[tokens.episode] & table.turn_in_loss[tokens.episode, tokens.turn]
        mask = mask if signals.counted is None else mask & signals.counted
        weights = token_weights(mask, tokens.episode, table.group, reduction=self.reduction, horizon=self.horizon)
        (loss, metrics), gradient = devices.on_rows(
            self.mesh,
            self._gradient,
            (state.params, base),
            tokens,
            signals,
            mask,
            weights,
            out=lambda split: (PartitionSpec(), split[0]),
        )

        norm = optax.tree.norm(gradient)
        params: Any = state.params
        change, opt_state = self.optimizer.update(gradient, state.opt_state, params)
        params = optax.apply_updates(params, change)
        stepped = TrainState(params, opt_state, state.updates + 1)
        good = jnp.any(mask) & jnp.isfinite(norm)
        state = constrain(self.mesh, jax.tree.map(lambda new, old: jnp.where(good, new, old), stepped, state))
        return state, metrics | {
            "loss": loss,
            "gradient_norm": norm,
            "update_norm": optax.tree.norm(change),
            "tokens": jnp.sum(mask).astype(jnp.float32),
            "skipped": 1.0 - good.astype(jnp.float32),
        }

    def _logprobs(self, split: Any, both: Any, tokens: Tokens) -> Float[Array, "b T"]:
        params, base = devices.gathered(both, split)
        return token_logprobs_of(self.model, params, tokens, base, self.compute, self.mesh.shape["sequence"])[0]

    def _gradient(self, split: Any, both: tuple[Trained, Params | None], *rows: Any) -> Any:
        """((loss, metrics), gradient), summed over the pieces of a device's rows and over the devices."""
        pieces = jax.tree.map(lambda x: x.reshape(self.accumulate, -1, *x.shape[1:]), rows)

        def loss(params: Any, *piece: Any) -> Any:
            params, base = devices.gathered((params, both[1]), split)
            return _weighted_loss(self, params, *piece, base=base)

        gradient_of = jax.value_and_grad(loss, has_aux=True)

        def add(total: Any, piece: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient_of(both[0], *piece)), None

        total = gradient_of(both[0], *jax.tree.map(lambda x: x[0], pieces))
        if self.accumulate > 1:
            total, _ = jax.lax.scan(add, total, jax.tree.map(lambda x: x[1:], pieces))
        values, gradient = total
        return devices.summed(values, gradient, split[0])


def _weighted_loss(
    learner: Learner,
    params: Trained,
    tokens: Tokens,
    signals: Signals,
    mask: Bool[Array, "b T"],
    weights: Float[Array, "b T"],
    base: Params | None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    parts = learner.mesh.shape["sequence"]
    new, entropy = token_logprobs_of(learner.model, params, tokens, base, learner.compute, parts)
    per_token = learner.loss(PolicyInputs(new, entropy, tokens.logprob, signals, mask, tokens.segment, tokens.turn))

    def total(x: Float[Array, "b T"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(mask, weights * x, 0.0)) / parts  # each of them sums the same

    return total(per_token.loss), {name: total(x) for name, x in per_token.metrics.items()}


def token_logprobs_of(
    model: ModelConfig, trained: Trained, tokens: Tokens, base: Params | None = None, compute: Compute = FLOAT32, parts: int = 1
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each token of `predict` given those before it in its segment, and the entropy there; 0 elsewhere.

    Logits are made at these positions alone and for `LOGITS` tokens at a time.

    parts: devices along the axis `sequence` of the mesh that this runs under; each does as much of the layers' tokens and of the logits
    """
    params = frozen(trained, base)
    with attached(trained):
        ids, position = (share(x, parts) for x in (tokens.ids, tokens.position))
        hidden = Decoder(model, compute).apply({"params": params}, ids, position, tokens.segment)
    assert isinstance(hidden, jax.Array)
    hidden, width = joined(hidden, parts), tokens.ids.shape[1]
    all_of_them = padded(tokens.predict, parts, width)
    predict = share(all_of_them, parts)
    at = jnp.minimum(predict, width - 1)

    def pick(x: Float[Array, "B T"] | Int[Array, "B T"]) -> Array:
        return jnp.take_along_axis(x, at, axis=1)

    before = jnp.take_along_axis(hidden, jnp.maximum(at - 1, 0)[..., None], axis=1)
    targets = jnp.where((predict < width) & (pick(tokens.position) > 0), pick(tokens.ids), -1)
    found = token_logprobs(
        before.reshape(-1, before.shape[-1]), unembed(params), targets.ravel(), pick(tokens.temperature).ravel(), chunk=LOGITS
    )
    row = jnp.arange(len(at), dtype=jnp.int32)[:, None]
    laid = (joined(x.reshape(at.shape), parts) for x in found)
    # Filler of `predict` points past the row and is dropped.
    logprob, entropy = (jnp.zeros(tokens.ids.shape).at[row, all_of_them].set(x, mode="drop") for x in laid)
    return logprob, entropy
