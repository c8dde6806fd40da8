"""The PyTorch half of the benchmark, for a Python without this package.

python -m experiments.bench_kernels.torch_side eager|compile|verl ARRAYS.npz THREADS
"""

# pyright: reportMissingImports=false

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.bench_kernels import verl_rules
from experiments.bench_kernels.batch import USUAL_CREDIT, USUAL_LOSS, Arrays
from experiments.bench_kernels.serve import serve
from experiments.bench_kernels.torch_credit import CREDIT, Batch
from experiments.bench_kernels.torch_losses import LOSSES


def load(arrays: Arrays) -> Batch:
    d = {name: torch.from_numpy(array) for name, array in arrays.items()}
    d = {name: x.long() if x.dtype == torch.int32 else x for name, x in d.items()}
    return {**d, "on": d["mask"], "mask": d["mask"].float()}


def rule(name: str, d: Batch, mode: str = "eager") -> Callable[[], list[Tensor]]:
    """A function without arguments that gives the advantages, the loss and its gradient."""
    rules: dict[str, Callable[..., Tensor]] = {**CREDIT, **LOSSES}
    if mode == "verl":
        rules.update({name: verl_rules.rules()[name]})
    x = d["new_value" if name == "value_loss" else "new"].detach().requires_grad_()

    def credit_and_loss(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            advantage = rules[name if name in CREDIT else USUAL_CREDIT](d)
        return advantage, rules[name if name in LOSSES else USUAL_LOSS](x, {**d, "advantage": advantage})

    torch.compiler.reset()  # after some recompilations of one function it falls back to eager
    forward = torch.compile(credit_and_loss, dynamic=False) if mode == "compile" else credit_and_loss

    def run() -> list[Tensor]:
        x.grad = None
        advantage, loss = forward(x)
        loss.backward()
        assert x.grad is not None
        return [advantage, loss.detach(), x.grad]

    return run


def to_numpy(outputs: list[Tensor]) -> list[NDArray[Any]]:
    return [x.numpy() for x in outputs]


if __name__ == "__main__":
    mode, file, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    logging.disable()  # what fails under torch.compile is in the answer
    serve(file, load, lambda name, d: rule(name, d, mode), to_numpy)
