"""The jitted learner: credit, loss, gradient and optimizer step of one minibatch. Pure functions of state and batch; nothing is
fetched to the host inside, and buffers of the old state are donated.

Log-probs come from one code path (`token_logprobs_of`), for the gradient as for every comparison. Two calls of `logprobs` agree bit for
bit; the program of the gradient, which XLA fuses in its own way, agrees to rounding (1e-6).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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
from agentrl_jax.models.decoder import FLOAT32, Compute, Decoder, ModelConfig, Params, unembed
from agentrl_jax.models.lora import Trained, attached, frozen
from agentrl_jax.models.sharding import ROWS, everywhere, rows_mesh
from agentrl_jax.objective import LossFn, PolicyInputs, Signals

LOGITS = 2048  # tokens whose logits exist at the same time


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
    mesh:       devices; each computes its share of the rows, whose number must be a multiple of `accumulate` times the devices
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
        copied: Any = jax.tree.map(jnp.copy, params)
        return self.place(TrainState(copied, self.optimizer.init(copied), jnp.int32(0)))

    def place(self, tree: Any) -> Any:
        """Copies of all arrays on all devices: what the other methods take, the rows of batches included."""
        return jax.device_put(tree, everywhere(self.mesh))

    @partial(jax.jit, static_argnums=0)
    def logprobs(self, params: Trained, tokens: Tokens, base: Params | None = None) -> Float[Array, "B T"]:
        """Log-prob of every token of `predict` under `params`, 0 elsewhere. base: what is adapted, where `params` are an adapter."""
        of_rows = self._on_rows(
            lambda both, tokens: token_logprobs_of(self.model, both[0], tokens, both[1], self.compute)[0], PartitionSpec(ROWS)
        )
        return of_rows((params, base), tokens)

    @partial(jax.jit, static_argnums=0)
    def signals(self, batch: Batch, proximal: Float[Array, "B T"] | None = None, reference: Float[Array, "B T"] | None = None) -> Signals:
        """Credit and correction of the whole batch. proximal: log-probs under the weights before the update, needed by a correction."""
        advantages = self.advantage(batch, Estimates(reference=reference, proximal=proximal)).advantages
        if self.correction is None:
            return Signals(advantages, reference, proximal)
        if proximal is None:
            raise ValueError("a correction needs the log-probs under the weights before the update")
        found = self.correction(batch.tokens, proximal, advantages)
        return Signals(advantages, reference, proximal, found.weight, found.counted)

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
        tokens, signals = jax.tree.map(lambda x: x[rows], (batch.tokens, signals))
        table = batch.episodes
        mask = tokens.mask & tokens.in_loss & table.in_loss[tokens.episode] & table.turn_in_loss[tokens.episode, tokens.turn]
        mask = mask if signals.counted is None else mask & signals.counted
        weights = token_weights(mask, tokens.episode, table.group, reduction=self.reduction, horizon=self.horizon)
        of_rows = self._on_rows(self._gradient, PartitionSpec())
        (loss, metrics), gradient = of_rows((state.params, base), tokens, signals, mask, weights)

        norm = optax.tree.norm(gradient)
        params: Any = state.params
        change, opt_state = self.optimizer.update(gradient, state.opt_state, params)
        params = optax.apply_updates(params, change)
        stepped = TrainState(params, opt_state, state.updates + 1)
        good = jnp.any(mask) & jnp.isfinite(norm)
        state = jax.tree.map(lambda new, old: jnp.where(good, new, old), stepped, state)
        return state, metrics | {
            "loss": loss,
            "gradient_norm": norm,
            "update_norm": optax.tree.norm(change),
            "tokens": jnp.sum(mask).astype(jnp.float32),
            "skipped": 1.0 - good.astype(jnp.float32),
        }

    def _on_rows(self, function: Callable[..., Any], out: PartitionSpec) -> Callable[..., Any]:
        """`function(params, *rows)` on every device's share of the rows."""

        def split(params: Any, *rows: Any) -> Any:
            specs = (PartitionSpec(), *[PartitionSpec(ROWS)] * len(rows))
            return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(params, *rows)

        return split

    def _gradient(self, both: tuple[Trained, Params | None], *rows: Any) -> Any:
        """((loss, metrics), gradient), summed over the pieces of a device's rows and over the devices."""
        params, base = both
        pieces = jax.tree.map(lambda x: x.reshape(self.accumulate, -1, *x.shape[1:]), rows)
        gradient_of = jax.value_and_grad(partial(_weighted_loss, self, base=base), has_aux=True)

        def add(total: Any, piece: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient_of(params, *piece)), None

        total = gradient_of(params, *jax.tree.map(lambda x: x[0], pieces))
        if self.accumulate > 1:
            total, _ = jax.lax.scan(add, total, jax.tree.map(lambda x: x[1:], pieces))
        return jax.lax.psum(total, ROWS)


def _weighted_loss(
    learner: Learner,
    params: Trained,
    tokens: Tokens,
    signals: Signals,
    mask: Bool[Array, "b T"],
    weights: Float[Array, "b T"],
    base: Params | None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    new, entropy = token_logprobs_of(learner.model, params, tokens, base, learner.compute)
    per_token = learner.loss(PolicyInputs(new, entropy, tokens.logprob, signals, mask, tokens.segment, tokens.turn))

    def total(x: Float[Array, "b T"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(mask, weights * x, 0.0))

    return total(per_token.loss), {name: total(x) for name, x in per_token.metrics.items()}


def token_logprobs_of(
    model: ModelConfig, trained: Trained, tokens: Tokens, base: Params | None = None, compute: Compute = FLOAT32
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each token of `predict` given those before it in its segment, and the entropy there; 0 elsewhere.

    Logits are made at these positions alone and for `LOGITS` tokens at a time.
    """
    params = frozen(trained, base)
    with attached(trained):
        hidden = Decoder(model, compute).apply({"params": params}, tokens.ids, tokens.position, tokens.segment)
    assert isinstance(hidden, jax.Array)
    width = tokens.ids.shape[1]
    at = jnp.minimum(tokens.predict, width - 1)

    def pick(x: Float[Array, "B T"] | Int[Array, "B T"]) -> Array:
        return jnp.take_along_axis(x, at, axis=1)

    before = jnp.take_along_axis(hidden, jnp.maximum(at - 1, 0)[..., None], axis=1)
    targets = jnp.where((tokens.predict < width) & (pick(tokens.position) > 0), pick(tokens.ids), -1)
    found = token_logprobs(
        before.reshape(-1, before.shape[-1]), unembed(params), targets.ravel(), pick(tokens.temperature).ravel(), chunk=LOGITS
    )
    row = jnp.arange(len(at), dtype=jnp.int32)[:, None]
    # Filler of `predict` points past the row and is dropped.
    logprob, entropy = (jnp.zeros(tokens.ids.shape).at[row, tokens.predict].set(x.reshape(at.shape), mode="drop") for x in found)
    return logprob, entropy
