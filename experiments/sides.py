"""The two sides of a benchmark of training: a step of this package, and the same step of transformers on PyTorch in another process."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl_jax import credit, objective
from agentrl_jax.config import Optimizer
from agentrl_jax.data.batch import Batch
from agentrl_jax.learner.optimizer import make_optimizer
from agentrl_jax.learner.update import Learner, TrainState
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import FLOAT32, Compute, ModelConfig, Params
from experiments.ragged import Piece

LEARNING_RATE = 3e-5
HF_SIDE = Path(__file__).with_name("hf_learner.py")


class Measured(NamedTuple):
    """One step.

    loss, norm: the loss before the step, and the norm of its gradient
    wall, cpu:  seconds by the clock, and of CPUs
    peak:       the most bytes of the device that the side has used so far; 0 where the device does not count them
    """

    loss: float
    norm: float
    wall: float
    cpu: float
    peak: int


Side = Callable[[], Measured]


def our_side(
    model: ModelConfig, params: Params, batches: Mapping[str, Batch], mesh: Mesh, compute: Compute = FLOAT32, at_once: int | None = None
) -> Callable[[str], Measured]:
    """A function that trains one step on the batch of that name. at_once: rows that a device computes at the same time, default all."""
    settings = Optimizer(learning_rate=LEARNING_RATE, decay="constant", clip=1.0)
    learner = Learner(model, make_optimizer(settings, 1), credit.grpo, objective.supervised, compute=compute, mesh=mesh)
    state: TrainState = learner.init(params)
    placed, learners = {}, {}
    for name, batch in batches.items():
        shape = batch.tokens.ids.shape
        learners[name] = replace(learner, accumulate=shape[0] // (mesh.size * at_once) if at_once else 1)
        placed[name] = learner.place((batch, objective.Signals(jnp.zeros(shape)), np.arange(shape[0], dtype=np.int32)))

    def step(name: str) -> Measured:
        nonlocal state
        wall, cpu = perf_counter(), process_time()
        state, metrics = learners[name].update(state, *placed[name])
        loss, norm = float(metrics["loss"]), float(metrics["gradient_norm"])
        jax.block_until_ready(state)
        seconds = perf_counter() - wall, process_time() - cpu
        memory: Any = mesh.devices.flat[0].memory_stats() or {}
        return Measured(loss, norm, *seconds, memory.get("peak_bytes_in_use", 0))

    return step


def torch_half(
    python: str, folder: Path, model: ModelConfig, params: Params, batches: Mapping[str, Sequence[Piece]], device: str = "cpu"
) -> subprocess.Popen[str]:
    """The process of hf_learner.py that has these weights and batches, through files in this folder."""
    words = Tokenizer(WordLevel({"<end>": 0, "<padding>": 1}, unk_token="<end>")).to_str()
    longest = max(int(piece["positions"].max()) for pieces in batches.values() for piece in pieces) + 1
    pretrained.write(folder / "model", model, params, pretrained.Chat(words, "", end="<end>", padding="<padding>", context_limit=longest))
    parts: dict[str, Any] = {
        f"{name}/{i}/{part}": x for name, pieces in batches.items() for i, piece in enumerate(pieces) for part, x in piece.items()
    }
    np.savez(folder / "batches.npz", **parts)
    command = [python, str(HF_SIDE), str(folder / "model"), str(folder / "batches.npz"), str(LEARNING_RATE), device]
    environment = {"OMP_NUM_THREADS": str(os.cpu_count())} | os.environ
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def their_side(process: subprocess.Popen[str], line: str) -> Measured:
    """What the PyTorch half answers to this line."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit("the PyTorch half ended; its message is above. --torch PYTHON names one that has torch and transformers")
    return Measured(*json.loads(answer))


def check(ours: Measured, theirs: Mapping[str, Measured], loss: float = 1e-4, norm: float = 1e-3) -> None:
    """Raises SystemExit where a loss is not ours, or the norm of a gradient. norm: as a share of it."""
    for name, found in theirs.items():
        if not (abs(found.loss - ours.loss) < loss and abs(found.norm / ours.norm - 1) < norm):  # NaN included
            here, there = (f"loss {x.loss:.6f}, gradient norm {x.norm:.6f}" for x in (ours, found))
            raise SystemExit(f"no comparison: {here} here, {there} there ({name})")
