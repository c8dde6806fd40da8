"""Speed of a training step, and of transformers on PyTorch with the same weights, tokens, loss and optimizer.

    python -m experiments.bench_train [--torch PYTHON]

dense:  16 rows of 512 tokens, all of them trained
ragged: episodes of 120 to 450 tokens, two fifths of them actions; PyTorch pads them to the longest, this package packs them into rows

Both use all cores and f32: mean negative log-likelihood of the actions, gradients clipped to norm 1, AdamW. PyTorch runs Qwen3 with
sdpa attention, makes logits for actions alone, and its AdamW is the fused one. The two take turns of five steps, of which the first
is not counted: PyTorch's threads spin on for a while after a step, and would slow down the other. Counted are real tokens per second.
Before the clock starts both must find the same losses. Run nothing else. --torch names a Python with torch and transformers, default
this one. One minute.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl_jax import credit, objective
from agentrl_jax.config import Optimizer
from agentrl_jax.data.batch import Batch
from agentrl_jax.data.collate import collate
from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Span, Turn, digest
from agentrl_jax.learner.optimizer import make_optimizer
from agentrl_jax.learner.update import Learner, TrainState
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import ModelConfig, Params, init_params
from agentrl_jax.models.sharding import rows_mesh, split_cpu

CONFIG = ModelConfig(vocab_size=512, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256)
ROW = 512
ROUNDS, STEPS = 3, 4
LEARNING_RATE = 3e-5
HF_SIDE = Path(__file__).with_name("hf_train.py")

Measured = tuple[float, float, float]  # loss, wall seconds, CPU seconds


def episode(name: str, sizes: list[int], rng: np.random.Generator) -> Episode:
    """Spans of these sizes with random ids: an observation, an action, and so on."""
    spans: list[Span] = []
    before = np.zeros(0, np.int32)
    for i, n in enumerate(sizes):
        tokens = rng.integers(0, CONFIG.vocab_size, n).astype(np.int32)
        if i % 2:
            zeros, versions = np.zeros(n, np.float32), np.zeros(n, np.int32)
            spans.append(Span(Author.POLICY, i // 2, tokens, zeros, versions, digest(before), 1.0, "stop"))
        else:
            spans.append(Span(Author.ENVIRONMENT, i // 2, tokens))
        before = np.concatenate([before, tokens])
    turns = tuple(Turn() for _ in range(-(-len(sizes) // 2)))
    return Episode(name, name, name, 0, 0, (Segment(tuple(spans)),), turns, Ending.SUBMITTED, Outcome(1.0))


def make_episodes(rng: np.random.Generator) -> dict[str, list[Episode]]:
    lengths = rng.integers(120, 451, 32)
    return {
        "dense": [episode(f"dense{i}", [1, ROW - 1], rng) for i in range(16)],
        # Four turns, each three parts observation and two parts action.
        "ragged": [episode(f"ragged{i}", [3 * n // 20, 2 * n // 20] * 4, rng) for i, n in enumerate(lengths)],
    }


def padded(episodes: list[Episode]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Ids and actions, [episodes, longest]."""
    segments = [e.segments[0] for e in episodes]
    longest = max(map(len, segments))
    rows = [(np.pad(s.tokens, (0, longest - len(s))), np.pad(s.mask, (0, longest - len(s)))) for s in segments]
    return np.stack([ids for ids, _ in rows]), np.stack([mask for _, mask in rows])


def our_side(params: Params, batches: dict[str, Batch]) -> Callable[[str], Measured]:
    """A function that trains one step on the named batch."""
    settings = Optimizer(learning_rate=LEARNING_RATE, decay="constant", clip=1.0)
    learner = Learner(CONFIG, make_optimizer(settings, 1), credit.grpo, objective.supervised, mesh=rows_mesh())
    state: TrainState = learner.init(params)
    parts = {
        name: (objective.Signals(jnp.zeros(b.tokens.ids.shape)), np.arange(len(b.tokens.ids), dtype=np.int32))
        for name, b in batches.items()
    }
    placed, parts = learner.place((batches, parts))

    def step(name: str) -> Measured:
        nonlocal state
        signals, rows = parts[name]
        wall, cpu = time.perf_counter(), time.process_time()
        state, metrics = learner.update(state, placed[name], signals, rows)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        return loss, time.perf_counter() - wall, time.process_time() - cpu

    return step


def their_side(process: subprocess.Popen[str]) -> Callable[[str], Measured]:
    def step(name: str) -> Measured:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the PyTorch half ended; its message is above. --torch PYTHON names one that has torch and transformers")
        return tuple(json.loads(line))

    return step


def compare(name: str, tokens: int, fill: str, ours: Callable[[str], Measured], theirs: Callable[[str], Measured]) -> None:
    """Losses of the first two steps must agree; then both are timed in turn."""
    losses = [(ours(name)[0], theirs(name)[0]) for _ in range(2)]
    if np.ptp(losses, axis=1).max() > 1e-4:
        raise SystemExit(f"{name}: the losses differ, (here, PyTorch) = {losses}: no comparison")
    print(f"{name}: {tokens:,} tokens, {fill}; losses agree to {np.ptp(losses, axis=1).max():.0e}")
    sides = {"this package": ours, "PyTorch": theirs}
    measured: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, step in sides.items():
            measured[side] += [step(name) for _ in range(1 + STEPS)][1:]
    medians = []
    for side, steps in measured.items():
        _, wall, cpu = np.array(steps).T
        speed = tokens / wall
        print(
            f"  {side:13} {np.median(speed):9,.0f} tokens/s  (min {speed.min():,.0f}, max {speed.max():,.0f}, {len(steps)} steps)"
            f"  {np.median(cpu) * 1e3:6.0f} ms of CPU a step"
        )
        medians.append(np.median(wall))
    print(f"  ratio of medians: {medians[1] / medians[0]:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch and transformers")
    python = parser.parse_args().torch
    split_cpu()
    params = init_params(CONFIG, jax.random.key(0))
    episodes = make_episodes(np.random.default_rng(0))
    batches = {name: collate(e, row_length=ROW, row_multiple=jax.device_count())[0] for name, e in episodes.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder, arrays = Path(temporary) / "model", Path(temporary) / "batches.npz"
        words = Tokenizer(WordLevel({"<end>": 0, "<padding>": 1}, unk_token="<end>")).to_str()
        pretrained.write(folder, CONFIG, params, pretrained.Chat(words, "", end="<end>", padding="<padding>", context_limit=ROW))
        pads = {name: padded(e) for name, e in episodes.items()}
        parts: dict[str, Any] = {f"{n}/{part}": x for n, pad in pads.items() for part, x in zip(("ids", "action"), pad, strict=True)}
        np.savez(arrays, **parts)
        command = [python, str(HF_SIDE), str(folder), str(arrays), str(LEARNING_RATE)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            ours, theirs = our_side(params, batches), their_side(process)
            for name, batch in batches.items():
                tokens = sum(len(e.segments[0]) for e in episodes[name])
                shapes = f"packed {batch.tokens.ids.shape}, padded {pads[name][0].shape}"
                compare(name, tokens, shapes, ours, theirs)


if __name__ == "__main__":
    main()
