"""Speed and memory of a training step on one accelerator: a model of Qwen3-0.6B's shape with random weights, in bfloat16, its layers
computed again in the backward pass.

    python -m experiments.bench_gpu [--tiny] [--torch PYTHON]

The batch is ragged: see `experiments.ragged`. MFU is what the model has to compute for the real tokens (`flops`; neither the layers'
second time nor padding counts) over what the device can do. Beside it the same step of transformers on PyTorch, with autocast and
gradient checkpointing, where PyTorch sees a device of this kind: padded and packed with sdpa, and flat, in one row, with attention
segment by segment. It runs first, and both must find the same loss and gradient norm. Eight minutes, most of them compiling.
--tiny runs a tiny model, on CPUs too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from agentrl_jax.data.collate import collate
from agentrl_jax.models.decoder import Compute, ModelConfig, init_params
from agentrl_jax.models.rope import Rope
from agentrl_jax.models.sharding import rows_mesh
from experiments.ragged import layouts, ragged
from experiments.sides import Measured, check, our_side, their_side, torch_half

COMPUTE = Compute(dtype="bfloat16", remat=True)
# Dense bfloat16 operations a second, from the makers' data sheets, by a part of `device_kind`; the first that fits counts.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
LAYOUTS = {"padded": "sdpa", "packed": "sdpa", "flat": "by_segment"}  # and PyTorch's attention


class Work(NamedTuple):
    """A model, and the ragged episodes of a step: their number, median length, and the length of rows, which none exceeds."""

    model: ModelConfig
    episodes: int
    median: int
    row: int
    steps: int


QWEN3_600M = Work(ModelConfig(151_936, 1024, 28, 16, 8, 128, 3072, rope=Rope(theta=1e6)), episodes=48, median=1000, row=4096, steps=5)
TINY = Work(ModelConfig(64, 32, 2, 2, 1, 16, 64), episodes=4, median=150, row=256, steps=2)


def flops(model: ModelConfig, lengths: Sequence[int], actions: int) -> int:
    """Operations of a step's matmuls on segments of these lengths: two a multiplication, and twice the forward pass for the gradient.

    Attention is causal: on average a token sees half of its segment. Logits are made for actions alone. As in PaLM, appendix B
    (https://arxiv.org/abs/2204.02311), but for these two.
    """
    heads = model.num_heads * model.head_dim
    projections = 2 * model.hidden_size * (heads + model.num_kv_heads * model.head_dim)
    layer = projections + 3 * model.hidden_size * model.intermediate_size
    scores = sum(n * n for n in lengths) * heads  # q kᵀ, and as many again to mix the values
    return 3 * (2 * model.num_layers * (layer * sum(lengths) + scores) + 2 * model.vocab_size * model.hidden_size * actions)


def peak_of(kind: str) -> float | None:
    """Operations a second of this kind of device; None where it is not in the table."""
    return next((peak for name, peak in PEAKS.items() if name in kind), None)


def torch_device(python: str, platform: str) -> str | None:
    """The device that PyTorch would use beside JAX on this platform; None where it has none."""
    tests = {"cpu": "import torch, transformers", "gpu": "import torch, transformers; torch.zeros(1, device='cuda')"}
    if platform not in tests:
        return None
    done = subprocess.run([python, "-c", tests[platform]], capture_output=True, check=False)
    return None if done.returncode else {"cpu": "cpu", "gpu": "cuda"}[platform]


def line(side: str, found: Sequence[Measured], tokens: int, operations: int, peak: float | None) -> str:
    """Speed, MFU and memory of one side, by the median of its steps."""
    wall = float(np.median([step.wall for step in found]))
    share = "" if peak is None else f"  MFU {operations / wall / peak:6.1%}"
    memory = f"  peak {found[-1].peak / 2**30:.1f} GiB" if found[-1].peak else ""
    speed = [tokens / step.wall for step in found]
    return f"  {side:26} {tokens / wall:10,.0f} tokens/s ({min(speed):,.0f}-{max(speed):,.0f}){share}{memory}"


def their_steps(ask: Callable[[str], Measured], steps: int) -> tuple[dict[str, Measured], dict[str, list[Measured]]]:
    """What PyTorch finds for each layout before any step, and its timed steps."""
    before = {name: ask(f"gradient {name} {attention}") for name, attention in LAYOUTS.items()}
    return before, {f"PyTorch {name}, {a}": [ask(f"train {name} {a}") for _ in range(1 + steps)][1:] for name, a in LAYOUTS.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch and transformers")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and a few hundred tokens")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of the device too
    device, work = jax.devices()[0], TINY if options.tiny else QWEN3_600M
    params = init_params(work.model, jax.random.key(0))
    episodes = ragged(work.episodes, work.median, work.row, work.model.vocab_size)
    batch = collate(episodes, row_length=work.row)[0]
    lengths, actions = [len(e.segments[0]) for e in episodes], sum(e.policy_tokens for e in episodes)
    tokens, operations, peak = sum(lengths), flops(work.model, lengths, actions), peak_of(device.device_kind)
    given = layouts(episodes, batch)
    shapes = "  ".join(f"{name} {given[name][0]['ids'].shape}" for name in LAYOUTS)
    print(f"{device.device_kind}: {sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f} million weights, {COMPUTE.dtype}, remat")
    print(f" {tokens:,} tokens, {actions:,} of them actions, {operations / 1e12:.1f} TFLOP a step; {shapes}")
    if peak is None:
        print(f" MFU is unknown: the table in {Path(__file__).name} has no peak of this device")

    beside = torch_device(options.torch, device.platform)
    before, found = {}, {}
    if beside is None:
        print(f" PyTorch with a device of this kind is not in {options.torch}: this package alone")
    else:
        pieces = {name: given[name] for name in LAYOUTS}
        with (
            tempfile.TemporaryDirectory() as folder,
            torch_half(options.torch, Path(folder), work.model, params, pieces, f"{beside}:{COMPUTE.dtype}") as process,
        ):
            before, found = their_steps(partial(their_side, process), work.steps)

    step = our_side(work.model, params, {"ragged": batch}, rows_mesh(1), COMPUTE)
    first = step("ragged")
    check(first, before, loss=0.05, norm=0.05)  # bfloat16, rounded in other places
    for side, steps in {"this package": [step("ragged") for _ in range(work.steps)], **found}.items():
        print(line(side, steps, tokens, operations, peak), flush=True)
    print(f" first step, with compilation: {first.wall:.0f} s")


if __name__ == "__main__":
    main()
