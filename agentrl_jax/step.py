"""One step of learning: episodes in, new state, metrics and the credit of every token out."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from agentrl_jax.config import ConfigError, Experiment
from agentrl_jax.credit import Estimates, actions
from agentrl_jax.data.batch import Batch, Tokens, trained
from agentrl_jax.data.collate import Shape, collate, minibatch_rows, unpack
from agentrl_jax.data.episode import Episode
from agentrl_jax.inference.runner import Stats
from agentrl_jax.kernels import diagnostics
from agentrl_jax.learner.critic import CriticLearner
from agentrl_jax.learner.optimizer import make_optimizer, schedule
from agentrl_jax.learner.reference import Reference
from agentrl_jax.learner.update import Learner, TrainState
from agentrl_jax.models.decoder import ModelConfig, Params
from agentrl_jax.models.lora import Trained
from agentrl_jax.models.lora import init as init_adapter
from agentrl_jax.models.sharding import make_mesh, row_parts
from agentrl_jax.objective import Signals

CreditOf = dict[str, tuple[NDArray[np.float32], ...]]
"""Advantage of every token, by episode and segment."""


def mesh_of(experiment: Experiment) -> Mesh:
    """The devices of an experiment's learner. Raises ConfigError where there are others than it asks for."""
    try:
        return make_mesh(**asdict(experiment.mesh))
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from error


def learner_of(experiment: Experiment, model: ModelConfig) -> Learner:
    """The learner of an experiment's whole run. Raises ConfigError where the mesh does not fit the devices or the model."""
    settings, critic, mesh = experiment.optimizer, experiment.critic, experiment.mesh
    if model.num_kv_heads % (mesh.tensor * mesh.sequence):
        raise ConfigError(
            f"mesh.tensor={mesh.tensor} x mesh.sequence={mesh.sequence} must divide the {model.num_kv_heads} key-value heads of the model: "
            "a head is not split"
        )
    if experiment.row_length % mesh.sequence:
        raise ConfigError(f"mesh.sequence={mesh.sequence} must divide row_length={experiment.row_length}")
    if critic and mesh.sequence > 1:
        raise ConfigError(f"critic: its values are not split along a sequence yet; set mesh.sequence=1, got {mesh.sequence}")
    return Learner(
        model,
        make_optimizer(settings, experiment.updates - (critic.warmup if critic else 0)),
        experiment.advantage,
        experiment.loss,
        experiment.reduction,
        settings.accumulate,
        experiment.correction,
        experiment.horizon,
        experiment.compute,
        CriticLearner(critic, make_optimizer(replace(settings, learning_rate=critic.learning_rate), experiment.updates))
        if critic
        else None,
        mesh_of(experiment),
    )


def check_credit(experiment: Experiment) -> None:
    """Raises ConfigError where the credit rule needs what the run does not estimate, or has no returns for the critic to learn.

    The rule is traced with empty arrays; nothing is computed.
    """
    shape = first_shape(experiment)
    host, _ = collate([], row_length=experiment.row_length, components=experiment.components, at_least=shape)
    tokens, per_episode = jnp.zeros(host.tokens.ids.shape), jnp.zeros(host.episodes.group.shape)
    estimates = Estimates(reference=None if experiment.reference == "none" else tokens, proximal=tokens)
    if experiment.critic:
        estimates = replace(estimates, values=tokens, bootstrap=per_episode)
    try:
        found = jax.eval_shape(experiment.advantage, host, estimates)
    except ValueError as error:
        raise ConfigError(f"advantage: {error}") from error
    if experiment.critic and found.returns is None:
        raise ConfigError("critic: the rule of `advantage` gives no returns to learn from; choose one of credit.critic, or critic=none")


def trained_of(experiment: Experiment, params: Params) -> Trained:
    """What the run trains: all weights, or a new adapter of them."""
    if experiment.lora is None:
        return params
    lora = experiment.lora
    return init_adapter(params, jax.random.key(experiment.seed), rank=lora.rank, alpha=lora.alpha, projections=lora.projections)


def first_shape(experiment: Experiment) -> Shape:
    """A batch of episodes that fill half their context, a third of it sampled: what a run compiles for before it knows better."""
    episodes = experiment.rollout.groups * experiment.rollout.group_size
    rows = -(-episodes * experiment.rollout.context // (2 * experiment.row_length))
    return Shape(rows, experiment.row_length, experiment.row_length * 3 // 8, episodes, experiment.rollout.turns)


def learn(
    experiment: Experiment,
    learner: Learner,
    state: TrainState,
    base: Params | None,
    reference: Reference | None,
    episodes: Sequence[Episode],
    step: int,
    shape: Shape,
) -> tuple[TrainState, Shape, dict[str, float], CreditOf]:
    """All updates of one step.

    base:      the weights that adapters are trained of, placed by the learner
    reference: of `reference_of`
    shape:     of the largest batch so far

    Between the two transfers, of the batch to the device and of the metrics back, nothing crosses.
    """
    settings = experiment.optimizer
    host, packing = collate(
        episodes,
        row_length=experiment.row_length,
        limits=experiment.limits.handling,
        dropped_in_stats=experiment.limits.dropped_in_stats,
        components=experiment.components,
        anchors=experiment.anchors,
        row_multiple=settings.minibatches * settings.accumulate * row_parts(learner.mesh),
        at_least=shape,
    )
    parts = minibatch_rows(host, settings.minibatches, seed=(experiment.seed << 24) + step)
    batch, rows, now = learner.place((host, list(parts), np.int32(step)))
    with jax.transfer_guard("disallow"):
        proximal = learner.logprobs(state.params, batch.tokens, base)
        differences = difference(proximal, batch.tokens)
        if experiment.rewrite is not None:
            batch = experiment.rewrite(batch, lambda tokens: learner.logprobs(state.params, tokens, base))
        estimated = learner.values(state, batch, base)
        signals = learner.signals(batch, proximal, reference(batch.tokens) if reference else None, estimated)
        before = diagnose(batch, signals, now)
        found = []
        for part in rows:
            state, metrics = learner.update(state, batch, signals, part, base)
            found.append(metrics)
        fetched = learner.whole((signals.advantages, before, found, differences, state.updates))
    advantages, before, found, differences, updates = jax.device_get(fetched)
    values = {f"train/{name}": float(np.mean([metrics[name] for metrics in found])) for name in found[0]}
    values |= {f"train/{name}": float(value) for name, value in differences.items()}
    values |= {name: float(value) for name, value in before.items()}
    values["train/learning_rate"] = learning_rate(experiment, int(updates))
    values["rollout/degenerate_groups"] = degenerate(episodes)
    credit = {episode.id: segments for episode, segments in zip(episodes, unpack(np.asarray(advantages), packing), strict=True) if segments}
    return state, packing.shape, values, credit


def learning_rate(experiment: Experiment, updates: int) -> float:
    """That of the last of so many updates."""
    waited = experiment.critic.warmup if experiment.critic else 0
    rate = schedule(experiment.optimizer, experiment.updates - waited)
    return float(np.asarray(rate(max(updates - waited - 1, 0))))


@jax.jit
def difference(trainer: Float[Array, "B T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
    """How far the trainer's log-probs are from the sampler's, over the tokens that the policy sampled."""
    apart = jnp.where(tokens.mask, jnp.abs(trainer - tokens.logprob), 0.0)
    count = jnp.maximum(jnp.sum(tokens.mask), 1).astype(jnp.float32)
    return {"logprob_difference": jnp.sum(apart) / count, "logprob_difference_max": jnp.max(apart)}


@jax.jit
def diagnose(batch: Batch, signals: Signals, now: Int[Array, ""]) -> dict[str, Float[Array, ""]]:
    """What the tokens in the loss are like before the update to version `now` + 1 of the weights."""
    tokens, table = batch.tokens, batch.episodes
    mask = trained(tokens, table)
    advantage = diagnostics.summary(signals.advantages, mask)
    lag = diagnostics.summary(diagnostics.policy_lag(tokens.version, now).astype(jnp.float32), mask)
    found = {
        "train/advantage_mean": advantage.mean,
        "train/advantage_std": advantage.std,
        "rollout/staleness": lag.mean,
        "rollout/staleness_max": lag.maximum,
        "rollout/dropped": jnp.sum((actions(batch) > 0) & ~table.in_loss, dtype=jnp.float32),
        "rollout/repetition": diagnostics.summary(diagnostics.repetition(tokens.ids, mask, tokens.segment), mask).mean,
    }
    if signals.weight is not None:
        found["train/effective_sample_size"] = diagnostics.effective_sample_size(signals.weight, mask)
    if signals.values is not None and signals.returns is not None:
        found["train/explained_variance"] = diagnostics.explained_variance(signals.values, signals.returns, mask)
    return found


def degenerate(episodes: Sequence[Episode]) -> float:
    """Share of the groups whose usable members all earned the same."""
    rewards: dict[str, set[float]] = {}
    for episode in episodes:
        members = rewards.setdefault(episode.group, set())
        if episode.usable and episode.reward is not None:
            members.add(episode.reward)
    return float(np.mean([len(members) < 2 for members in rewards.values()])) if rewards else 0.0


class Clock:
    """Where the wall-clock of a step went. While episodes are collected, what the engine was not busy for is the sandboxes'."""

    def __init__(self, engine: Stats) -> None:
        self._engine, self._busy, self._generated = engine, engine.seconds, 0.0
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now, busy = time.perf_counter(), self._engine.seconds
        self._laps[name] = now - self._last
        if name == "collect":
            self._generated = busy - self._busy
        self._last, self._busy = now, busy

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """`time/*` and rates of the step that ends now."""
        collect, train = self._laps["collect"], self._laps["train"]
        generate = min(self._generated, collect)
        total = time.perf_counter() - self._began
        rest = total - sum(self._laps.values())
        times = {"generate": generate, "sandbox": collect - generate, "train": train, "rest": rest}
        times |= {name: seconds for name, seconds in self._laps.items() if name not in ("collect", "train")}
        sampled = sum(episode.policy_tokens for episode in episodes)
        tokens = sum(map(len, (segment for episode in episodes for segment in episode.segments)))
        return {f"time/{name}": seconds for name, seconds in times.items()} | {
            "rollout/tokens_per_second": sampled / collect,
            "rollout/episodes_per_second": len(episodes) / collect,
            "train/tokens_per_second": tokens / train,
            "rollout/programs": float(self._engine.programs),
            "train/programs": float(Learner.update._cache_size()),  # pyright: ignore[reportAttributeAccessIssue] - of jax.jit
        }
