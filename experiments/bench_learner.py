"""Speed of a training step, and of transformers on PyTorch with the same weights, tokens, loss and optimizer; memory of log-probs.

    python -m experiments.bench_learner [--sizes 0.5M,15M,135M,logprob] [--torch PYTHON]

ragged: episodes of log-normal length (fixed seed), nine parts context and one part action over eight turns. This package packs them into
        rows. PyTorch is given them in each of these ways: padded to the longest; sorted by length and padded in four pieces; packed into
        the same rows, with a mask; flat, in one row without padding, where attention goes segment by segment
dense:  rows of 512 tokens, all of them trained, the same for both

Both use all cores and f32: mean negative log-likelihood of the actions, gradients clipped to norm 1, AdamW (PyTorch's is the fused one),
logits for actions alone. Each of PyTorch's layouts runs with the faster of sdpa and eager attention, as first tries show. Sides take turns
of a few steps, of which the first is not counted: the other side's threads may spin on for a while, and memory that was given back to
the system meanwhile has to be cleared anew. Counted are real tokens per second, context and action. Before the clock starts all must
find the same losses and gradient norms, before and after a step. Run nothing else.

logprob: log-prob and gradient of up to 8,192 tokens over 151,936 words, against all logits at once: see `bench_logprob`.
--torch names a Python with torch and transformers, default this one. Twelve minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from agentrl_jax.data.collate import collate
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.rope import Rope
from agentrl_jax.models.sharding import rows_mesh, split_cpu
from experiments.ragged import dense, layouts, packed, ragged
from experiments.sides import Measured, Side, check, our_side, their_side, torch_half

MEDIAN, DENSE = 220, 512  # tokens of an episode
LOGPROB = "logprob"


class Size(NamedTuple):
    """A model, and what a step of it is timed on.

    episodes, row: ragged episodes, and the length of the rows that they are packed into, which none exceeds
    dense:         dense rows
    rounds:        in each, every side takes a step and then `steps` that are timed
    split:         whether our side makes a device of each core, see `models.sharding.split_cpu`
    at_once:       rows that each of our devices computes at the same time, None for all; divides both batches
    """

    model: ModelConfig
    episodes: int
    row: int
    dense: int
    rounds: int
    steps: int
    split: bool = True
    at_once: int | None = None


SIZES = {
    "tiny": Size(ModelConfig(64, 32, 1, 2, 1, 16, 64), episodes=3, row=512, dense=2, rounds=1, steps=1),
    "0.5M": Size(ModelConfig(512, 128, 3, 4, 2, 32, 256), episodes=48, row=768, dense=16, rounds=2, steps=2),
    "15M": Size(ModelConfig(4096, 384, 8, 6, 2, 64, 1024), episodes=24, row=512, dense=8, rounds=2, steps=1, at_once=2),
    # The shape of SmolLM2-135M. One step takes ten seconds.
    "135M": Size(
        ModelConfig(49152, 576, 30, 9, 3, 64, 1536, rope=Rope(theta=1e5), rms_norm_eps=1e-5, qk_norm=False),
        episodes=7,
        row=512,
        dense=2,
        rounds=1,
        steps=1,
        split=False,
    ),
}


def fastest(kind: str, names: Sequence[str], ours: Callable[[str], Measured], theirs: Callable[[str], Measured]) -> dict[str, Side]:
    """The sides of this kind of batch: this package, and each of PyTorch's layouts with the faster attention, after one step of both.

    Raises SystemExit where two find another loss or gradient: with a second kind, also where the step on the first was not the same.
    """
    options = {name: ("by_segment",) if name == "flat" else ("sdpa", "eager") for name in names}
    tries = {(name, attention): theirs(f"gradient {kind}-{name} {attention}") for name in names for attention in options[name]}
    check(ours(kind), {", ".join((kind, *key)): found for key, found in tries.items()})
    best = {name: min(options[name], key=lambda attention: tries[name, attention].wall) for name in names}
    theirs(f"train {kind}-{names[-1]} {best[names[-1]]}")
    sides = {f"PyTorch {name}, {best[name]}": partial(theirs, f"train {kind}-{name} {best[name]}") for name in names}
    return {"this package": partial(ours, kind), **sides}


def race(sides: Mapping[str, Side], tokens: int, size: Size) -> None:
    """Time all sides in turn and print a line for each. tokens: real ones of a step."""
    measured: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(size.rounds):
        for side, step in sides.items():
            measured[side] += [step() for _ in range(1 + size.steps)][1:]
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
    params, mesh = init_params(size.model, jax.random.key(0)), rows_mesh(None if size.split else 1)
    vocabulary = size.model.vocab_size
    episodes = {"ragged": ragged(size.episodes, MEDIAN, size.row, vocabulary), "dense": dense(size.dense, DENSE, vocabulary)}
    rows = {"ragged": size.row, "dense": DENSE}
    batches = {kind: collate(of, row_length=rows[kind], row_multiple=mesh.size)[0] for kind, of in episodes.items()}
    given = {"ragged": layouts(episodes["ragged"], batches["ragged"]), "dense": {"rows": [packed(batches["dense"])]}}
    print(f"{name}: {sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f} million weights", flush=True)
    named = {f"{kind}-{layout}": pieces for kind, of in given.items() for layout, pieces in of.items()}
    with tempfile.TemporaryDirectory() as folder, torch_half(python, Path(folder), size.model, params, named) as process:
        ours, theirs = our_side(size.model, params, batches, mesh, at_once=size.at_once), partial(their_side, process)
        sides = {kind: fastest(kind, list(given[kind]), ours, theirs) for kind in given}
        for kind, of in episodes.items():
            tokens, actions = sum(len(e.segments[0]) for e in of), sum(e.policy_tokens for e in of)
            shapes = "  ".join(f"{k} {' '.join(str(p['ids'].shape) for p in pieces)}" for k, pieces in given[kind].items())
            print(f" {kind}: {tokens:,} tokens, {actions:,} of them actions; {shapes}", flush=True)
            race(sides[kind], tokens, size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch and transformers")
    parser.add_argument("--sizes", default="0.5M,15M,135M,logprob", help=f"of {', '.join([*SIZES, LOGPROB])}; with commas")
    options = parser.parse_args(arguments)
    sizes = options.sizes.split(",")
    for name in sizes:
        if name not in (*SIZES, LOGPROB):
            parser.error(f"--sizes: {name!r} is unknown; known: {', '.join([*SIZES, LOGPROB])}")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(f"other programs run (load average {load:.1f}, {cores} cores), and slow down PyTorch more than JAX", file=sys.stderr)
    split_cpu()
    for name in sizes:
        if name == LOGPROB:
            # In a process of its own: one program on all cores, where the learner makes each core a device.
            subprocess.run([sys.executable, "-m", "experiments.bench_logprob"], check=True)
        else:
            bench(name, SIZES[name], options.torch)


if __name__ == "__main__":
    main()
