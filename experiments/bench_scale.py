"""How the learner scales: programs over ragged batches, time against tokens, and one update on one device and on eight.

    python -m experiments.bench_scale

programs: batches of ragged episodes, collated as a run does it, each no smaller than the ones before. Compiled programs of `update`
          against the different shapes of batches (the bound), and against the different sizes the episodes had
time:     updates of batches of more and more full rows, on as many devices as there are cores; the line through them
devices:  the same update on one device and on meshes of eight fake ones: the largest differences of loss, gradient norm, log-probs and
          gradients (the change of the weights under plain descent at rate 1)

Eight fake devices share the cores: what they show is that the numbers agree, not speed. Run nothing else. Three minutes.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from agentrl_jax import credit, objective
from agentrl_jax.config import SMALL, Optimizer
from agentrl_jax.data.batch import Batch
from agentrl_jax.data.collate import Shape, collate
from agentrl_jax.data.episode import Episode, Outcome
from agentrl_jax.learner.optimizer import make_optimizer
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.sharding import make_mesh, row_parts, rows_mesh
from experiments.ragged import dense, episode

DEVICES = 8
TINY = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64)
ROW = 512
GROUP = 4


def grouped(episodes: Sequence[Episode]) -> list[Episode]:
    """In groups, every other one rewarded: so that credit is not 0."""
    return [replace(e, group=f"g{i // GROUP}", outcome=Outcome(float(i % 2))) for i, e in enumerate(episodes)]


class Programs(NamedTuple):
    """batches: updates made; programs: compiled for them; shapes: of the batches; sizes: different (episodes, tokens) of the batches."""

    batches: int
    programs: int
    shapes: int
    sizes: int


def programs(batches: int, *, row: int, most: int, seed: int = 0) -> Programs:
    """Update on `batches` ragged batches of up to `most` episodes each."""
    learner = Learner(TINY, optax.sgd(0.1), credit.grpo, objective.ppo)
    state, rng = learner.init(init_params(TINY, jax.random.key(0))), np.random.default_rng(seed)
    update: Any = Learner.update
    before, shape, shapes, sizes = update._cache_size(), Shape(), set[Shape](), set[tuple[int, int]]()
    for number in range(batches):
        spans = [rng.integers(2, 1 + row // 8, 2 * rng.integers(1, 5)).tolist() for _ in range(rng.integers(2, most + 1))]
        made = grouped([episode(f"{number}-{i}", sizes, TINY.vocab_size, rng) for i, sizes in enumerate(spans)])
        host, packing = collate(made, row_length=row, at_least=shape)
        shape = packing.shape
        shapes.add(shape)
        sizes.add((len(made), packing.tokens))
        batch, rows = learner.place((host, np.arange(shape.rows, dtype=np.int32)))
        state, _ = learner.update(state, batch, learner.signals(batch), rows)
    return Programs(batches, update._cache_size() - before, len(shapes), len(sizes))


class Line(NamedTuple):
    """seconds = start + slope x tokens, by least squares; r2: share of the variance of the seconds that it explains."""

    start: float
    slope: float
    r2: float


def line(tokens: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line through the points."""
    slope, start = np.polyfit(tokens, seconds, 1)
    rest = np.asarray(seconds) - (start + slope * np.asarray(tokens))
    return Line(float(start), float(slope), float(1 - np.var(rest) / np.var(seconds)))


def seconds_of(model: ModelConfig, rows: int, row: int, mesh: Mesh, *, steps: int) -> float:
    """Wall-clock of an update of full rows, the shortest of `steps`."""
    learner = Learner(model, make_optimizer(Optimizer(), 1), credit.grpo, objective.ppo, mesh=mesh)
    host, _ = collate(grouped(dense(rows, row, model.vocab_size)), row_length=row, row_multiple=row_parts(mesh))
    batch, at = learner.place((host, np.arange(rows, dtype=np.int32)))
    state, signals, found = learner.init(init_params(model, jax.random.key(0))), learner.signals(batch), []
    for _ in range(1 + steps):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(learner.update(state, batch, signals, at))
        found.append(time.perf_counter() - began)
    return min(found[1:])


class Apart(NamedTuple):
    """Largest absolute differences from the update on one device."""

    loss: float
    gradient_norm: float
    logprobs: float
    gradients: float


def updated(mesh: Mesh, host: Batch) -> dict[str, Any]:
    """What one update gives: by name, arrays on the host."""
    learner = Learner(TINY, optax.sgd(1.0), credit.grpo, objective.ppo, mesh=mesh)
    batch, rows = learner.place((host, np.arange(len(host.tokens.ids), dtype=np.int32)))
    state = learner.init(init_params(TINY, jax.random.key(0)))
    logprobs = learner.logprobs(state.params, batch.tokens)
    state, metrics = learner.update(state, batch, learner.signals(batch), rows)
    found = {"loss": metrics["loss"], "gradient_norm": metrics["gradient_norm"], "logprobs": logprobs, "gradients": state.params}
    return jax.device_get(found)


def apart(meshes: Sequence[Mesh], *, row: int, episodes: int) -> list[Apart]:
    """How far an update of dense rows on each mesh is from that on one device."""
    host, _ = collate(grouped(dense(episodes, row, TINY.vocab_size)), row_length=row, row_multiple=max(map(row_parts, meshes)))
    one = updated(rows_mesh(1), host)

    def largest(found: dict[str, Any]) -> dict[str, float]:
        return {n: max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), found[n], one[n]))) for n in one}

    return [Apart(**largest(updated(mesh, host))) for mesh in meshes]


class Setting(NamedTuple):
    """batches: ragged ones; rows, steps: full rows that are timed, and how often; model: whose updates; meshes: (fsdp, tensor)."""

    batches: int
    rows: tuple[int, ...]
    steps: int
    model: ModelConfig
    meshes: tuple[tuple[int, int], ...]


FULL = Setting(batches=200, rows=(8, 16, 24, 32, 48), steps=5, model=SMALL, meshes=((1, 1), (4, 1), (2, 2)))


def run(setting: Setting) -> None:
    """Measure on all devices of this process, and print."""
    found = programs(setting.batches, row=128, most=24)
    print(f"programs   {found.batches} batches of {found.sizes} sizes: {found.shapes} shapes, {found.programs} programs", flush=True)

    cores = rows_mesh(math.gcd(os.cpu_count() or 1, *setting.rows))
    print(f"\ntime       {cores.size} devices\n{'tokens':>10}  {'ms':>8}  {'tokens/s':>8}")
    counts = [ROW * rows for rows in setting.rows]
    measured = [seconds_of(setting.model, rows, ROW, cores, steps=setting.steps) for rows in setting.rows]
    for tokens, seconds in zip(counts, measured, strict=True):
        print(f"{tokens:>10,}  {seconds * 1e3:>8,.0f}  {tokens / seconds:>8,.0f}")
    fit = line(counts, measured)
    print(f"line       {fit.start * 1e3:.0f} ms + {fit.slope * 1e6:.1f} us a token, R^2 {fit.r2:.4f}", flush=True)

    print(f"\ndevices    {'loss':>9}  {'norm':>9}  {'logprobs':>9}  {'gradients':>9}   largest difference from one device")
    meshes = [make_mesh(fsdp=fsdp, tensor=tensor) for fsdp, tensor in setting.meshes]
    for mesh, differences in zip(meshes, apart(meshes, row=64, episodes=16), strict=True):
        sizes = "x".join(str(n) for n in mesh.shape.values())
        print(f"{sizes:9}  " + "  ".join(f"{x:>9.1e}" for x in differences), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    run(FULL)
