"""Speed of a training step, and of transformers on PyTorch with the same weights, tokens, loss and optimizer; memory of log-probs.

    python -m experiments.bench_learner [--sizes 0.5M,15M,135M,logprob] [--torch PYTHON]

ragged: episodes of log-normal length (fixed seed), nine parts context and one part action over eight turns. This package packs them into
        rows. PyTorch is given them in each of these ways: padded to the longest; sorted by length and padded in four pieces; packed into
        the same rows, with a mask; flat, in one row without padding, where attention goes segment by segment
dense:  rows of 512 tokens, all of them trained, the same for both

Both use all cores and f32: mean negative log-likelihood of the actions, gradients clipped to norm 1, AdamW (PyTorch's is the fused one),
logits for actions alone. Each of PyTorch's layouts runs with the faster of sdpa and eager attention, as first tries show. Sides take turns
of a few steps, of which the first is not counted where steps are short: PyTorch's threads spin on for a while after a step, and would
slow down the other.
Counted are real tokens per second, context and action. Before the clock starts all must find the same losses and gradient norms, before
and after a step. Run nothing else.

logprob: log-prob and gradient of 8,192 tokens over 151,936 words, against all logits at once: see `bench_logprob`.
--torch names a Python with torch and transformers, default this one. Six minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl_jax import credit, objective
from agentrl_jax.config import Optimizer
from agentrl_jax.data.batch import Batch
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.optimizer import make_optimizer
from agentrl_jax.learner.update import Learner, TrainState
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import ModelConfig, Params, init_params
from agentrl_jax.models.rope import Rope
from agentrl_jax.models.sharding import rows_mesh, split_cpu
from experiments import bench_logprob
from experiments.ragged import Piece, dense, layouts, packed, ragged

MEDIAN, DENSE = 220, 512  # tokens of an episode
LEARNING_RATE = 3e-5
LOGPROB = "logprob"
HF_SIDE = Path(__file__).with_name("hf_learner.py")


class Size(NamedTuple):
    """A model, and what a step of it is timed on.

    episodes, row: ragged episodes, and the length of the rows that they are packed into, which none exceeds
    dense:         dense rows
    rounds:        in each, every side takes `skipped` steps and then `steps` that are timed
    """

    model: ModelConfig
    episodes: int
    row: int
    dense: int
    rounds: int
    steps: int
    skipped: int = 1


SIZES = {
    "tiny": Size(ModelConfig(64, 32, 1, 2, 1, 16, 64), episodes=3, row=512, dense=2, rounds=1, steps=1),
    "0.5M": Size(ModelConfig(512, 128, 3, 4, 2, 32, 256), episodes=64, row=768, dense=16, rounds=3, steps=3),
    "15M": Size(ModelConfig(4096, 384, 8, 6, 2, 64, 1024), episodes=24, row=512, dense=8, rounds=2, steps=1),
    # The shape of SmolLM2-135M. One step takes ten seconds.
    "135M": Size(
        ModelConfig(49152, 576, 30, 9, 3, 64, 1536, rope=Rope(theta=1e5), rms_norm_eps=1e-5, qk_norm=False),
        episodes=7,
        row=512,
        dense=2,
        rounds=1,
        steps=1,
        skipped=0,
    ),
}


class Measured(NamedTuple):
    """One step: the loss and the norm of its gradient before it, seconds it took by the clock and of CPUs."""

    loss: float
    norm: float
    wall: float
    cpu: float


Side = Callable[[], Measured]


def our_side(model: ModelConfig, params: Params, batches: Mapping[str, Batch]) -> Callable[[str], Measured]:
    """A function that trains one step on the batch of that name."""
    settings = Optimizer(learning_rate=LEARNING_RATE, decay="constant", clip=1.0)
    learner = Learner(model, make_optimizer(settings, 1), credit.grpo, objective.supervised, mesh=rows_mesh())
    state: TrainState = learner.init(params)
    placed = {}
    for name, batch in batches.items():
        shape = batch.tokens.ids.shape
        placed[name] = learner.place((batch, objective.Signals(jnp.zeros(shape)), np.arange(shape[0], dtype=np.int32)))

    def step(name: str) -> Measured:
        nonlocal state
        wall, cpu = perf_counter(), process_time()
        state, metrics = learner.update(state, *placed[name])
        loss, norm = float(metrics["loss"]), float(metrics["gradient_norm"])
        jax.block_until_ready(state)
        return Measured(loss, norm, perf_counter() - wall, process_time() - cpu)

    return step


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


def check(ours: Measured, theirs: Mapping[str, Measured]) -> None:
    """Raises SystemExit where a loss or the norm of a gradient is not ours."""
    for name, found in theirs.items():
        if not (abs(found.loss - ours.loss) < 1e-4 and abs(found.norm / ours.norm - 1) < 1e-3):  # NaN included
            here, there = (f"loss {x.loss:.6f}, gradient norm {x.norm:.6f}" for x in (ours, found))
            raise SystemExit(f"no comparison: {here} here, {there} there ({name})")


def fastest(kind: str, names: Sequence[str], ours: Callable[[str], Measured], theirs: Callable[[str], Measured]) -> dict[str, Side]:
    """The sides of this kind of batch: this package, and each of PyTorch's layouts with the faster attention, after one step of both.

    Raises SystemExit where two find another loss or gradient: with a second kind, also where the step on the first was not the same.
    """
    options = {name: ("by_segment",) if name == "flat" else ("sdpa", "eager") for name in names}
    tries = {(name, attention): theirs(f"gradient {kind}-{name} {attention}") for name in names for attention in options[name]}
    check(ours(kind), {", ".join((kind, *key)): found for key, found in tries.items()})
    theirs(f"train {kind}-{names[0]} sdpa")
    sides = {"this package": partial(ours, kind)}
    for name in names:
        best = min(options[name], key=lambda attention: tries[name, attention].wall)
        sides[f"PyTorch {name}, {best}"] = partial(theirs, f"train {kind}-{name} {best}")
    return sides


def race(sides: Mapping[str, Side], tokens: int, size: Size) -> None:
    """Time all sides in turn and print a line for each. tokens: real ones of a step."""
    measured: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(size.rounds):
        for side, step in sides.items():
            measured[side] += [step() for _ in range(size.skipped + size.steps)][size.skipped :]
    base = np.median([step.wall for step in measured["this package"]])
    for side, found in measured.items():
        wall = np.array([step.wall for step in found])
        cpu = np.median([step.cpu for step in found])
        ratio = "" if side == "this package" else f"  ratio {np.median(wall) / base:.2f}"
        speed = tokens / wall
        print(
            f"  {side:24} {np.median(speed):8,.0f} tokens/s ({speed.min():,.0f}-{speed.max():,.0f}, {len(found)} steps, "
            f"{cpu:.2f} s of CPU){ratio}",
            flush=True,
        )


def bench(name: str, size: Size, python: str) -> None:
    """Both kinds of batch with one model."""
    params = init_params(size.model, jax.random.key(0))
    vocabulary = size.model.vocab_size
    episodes = {"ragged": ragged(size.episodes, MEDIAN, size.row, vocabulary), "dense": dense(size.dense, DENSE, vocabulary)}
    rows = {"ragged": size.row, "dense": DENSE}
    batches = {kind: collate(of, row_length=rows[kind], row_multiple=jax.device_count())[0] for kind, of in episodes.items()}
    given = {"ragged": layouts(episodes["ragged"], batches["ragged"]), "dense": {"rows": [packed(batches["dense"])]}}
    print(f"{name}: {sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f} million weights", flush=True)
    with tempfile.TemporaryDirectory() as folder, torch_half(python, Path(folder), size.model, params, given) as process:
        ours, theirs = our_side(size.model, params, batches), partial(their_side, process)
        sides = {kind: fastest(kind, list(given[kind]), ours, theirs) for kind in given}
        for kind, of in episodes.items():
            tokens, actions = sum(len(e.segments[0]) for e in of), sum(e.policy_tokens for e in of)
            shapes = "  ".join(f"{k} {' '.join(str(p['ids'].shape) for p in pieces)}" for k, pieces in given[kind].items())
            print(f" {kind}: {tokens:,} tokens, {actions:,} of them actions; {shapes}", flush=True)
            race(sides[kind], tokens, size)


def torch_half(
    python: str, folder: Path, model: ModelConfig, params: Params, given: Mapping[str, Mapping[str, Sequence[Piece]]]
) -> subprocess.Popen[str]:
    """The process that knows these weights, and every layout of every kind of batch as KIND-LAYOUT."""
    words = Tokenizer(WordLevel({"<end>": 0, "<padding>": 1}, unk_token="<end>")).to_str()
    pretrained.write(folder / "model", model, params, pretrained.Chat(words, "", end="<end>", padding="<padding>", context_limit=1024))
    parts: dict[str, Any] = {}
    for kind, of_kind in given.items():
        for layout, pieces in of_kind.items():
            for i, piece in enumerate(pieces):
                parts |= {f"{kind}-{layout}/{i}/{part}": x for part, x in piece.items()}
    np.savez(folder / "batches.npz", **parts)
    command = [python, str(HF_SIDE), str(folder / "model"), str(folder / "batches.npz"), str(LEARNING_RATE)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch and transformers")
    parser.add_argument("--sizes", default="0.5M,15M,135M,logprob", help=f"of {', '.join([*SIZES, LOGPROB])}; with commas")
    options = parser.parse_args()
    sizes = options.sizes.split(",")
    for name in sizes:
        if name not in (*SIZES, LOGPROB):
            parser.error(f"--sizes: {name!r} is unknown; known: {', '.join([*SIZES, LOGPROB])}")
    split_cpu()
    for name in sizes:
        if name == LOGPROB:
            bench_logprob.main()
        else:
            bench(name, SIZES[name], options.torch)


if __name__ == "__main__":
    main()
