"""Speed and memory of credit, loss and gradient under every rule, and of the same in PyTorch, in one run.

    python -m experiments.bench_kernels [--shape 256x8192 64x32768] [--rules ppo grpo] [--compile SECONDS] [--torch PYTHON]

Rows x tokens, about half of them the policy's in alternating turns, in groups of 8, ragged. A line is one call that gives advantages, loss
and gradient: of a rule of credit with PPO's loss, of a loss with GRPO's credit. All three must agree with eager's, or nothing is told.
Each side is a process of its own that has all cores, and they take turns:

    ours     the kernels of this package, jitted
    eager    the rule written from its formula in PyTorch; * recurs over tokens in a loop, as one writes it there
    compile  the same under torch.compile, as many as SECONDS per shape are enough for; not the loops, which it would unroll
    verl     verl's own function, where verl is installed

Shown are the fastest of sixteen repeats (of loops two). A ratio above 1 means that ours is faster. Fails where the median of eager / ours
is below 3 or one is below 1. Run nothing else meanwhile. --torch names a Python with torch. Four minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.bench_kernels import batch
from experiments.bench_kernels.agree import difference

ROUNDS, REPEATS = 4, 4
MEDIAN, MINIMUM = 3.0, 1.0
LIMIT = 60
"""Seconds for one rule of one side."""
COMPILED_FIRST = ("ppo", "grpo", "gspo", "tis_token", "value_loss", "kl_k3", "gmpo", "cispo", "turn_gae")
HAS_VERL = "import importlib.util, sys; sys.exit(importlib.util.find_spec('verl') is None)"

Answer = tuple[float | None, str]  # ms, or why there are none


class Side:
    """A process that answers (serve.py), and the memory that it has taken so far, in MB."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name, self.folder, self.peak = name, folder, 0.0
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, rule: str, repeats: int = REPEATS, limit: int = LIMIT) -> Answer:
        """Fastest of the repeats."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"rule": rule, "repeats": repeats, "limit": limit, "save": str(self.saved(rule))}
        with suppress(BrokenPipeError):  # nothing comes back either, and that is told below
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended; its message is above. --torch PYTHON names one that has torch")
        answer = json.loads(line)
        self.peak = answer["peak"]
        return (None, answer["error"]) if "error" in answer else (min(answer["ms"]), "")

    def saved(self, rule: str) -> Path:
        return self.folder / f"{self.name}-{rule}.npz"

    def outputs(self, rule: str) -> list[NDArray[Any]]:
        with np.load(self.saved(rule)) as file:
            return list(file.values())

    def end(self) -> None:
        self.process.communicate()


def in_turns(rule: str, sides: list[Side]) -> list[Answer]:
    """Fastest of each side; they go round, so that a slow moment of the machine is not all of one side's time."""
    rounds, repeats = (2, 1) if rule in batch.LOOPS else (ROUNDS, REPEATS)
    answers: list[Answer] = [(None, "")] * len(sides)
    for _ in range(rounds):
        for i, side in enumerate(sides):
            ms, problem = side.ask(rule, repeats)
            earlier = answers[i][0]
            answers[i] = (ms if earlier is None or ms is None else min(ms, earlier)), problem
    return answers


def compile_some(side: Side, rules: list[str], loops: set[str], seconds: float) -> dict[str, Answer]:
    """The rules that can be compiled and timed in so many seconds, those of COMPILED_FIRST first."""
    found: dict[str, Answer] = {}
    until = time.monotonic() + seconds
    for rule in sorted(rules, key=lambda rule: rule not in COMPILED_FIRST):
        left = int(until - time.monotonic())
        if rule in loops or left < 1:
            continue
        found[rule] = side.ask(rule, limit=min(left, LIMIT))
        if not found[rule][1].startswith("TimeoutError") and found[rule][0] is None:
            print(f"torch.compile fails on {rule}: {found[rule][1].splitlines()[0][:200]}")
            if len(found) == 1:
                return found  # as it does without a C++ compiler
    return found


def cell(ours: float, theirs: Answer) -> str:
    """Time and ratio; or a dash."""
    ms, _ = theirs
    return f"{'-':>9} {'':>7}" if ms is None else f"{ms:9.2f} {ms / ours:6.1f}x"


def measure(rows: int, width: int, chosen: list[str], compile_seconds: float, python: str) -> bool:
    """Print the table of one shape; whether it is as fast as it should be."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as ends:
        folder = Path(temporary)
        arrays = batch.make(rows, width)
        print(f"\n{rows} x {width}, {arrays['mask'].mean():.0%} of the tokens the policy's, {os.cpu_count()} threads", flush=True)
        np.savez(folder / "arrays.npz", allow_pickle=False, **arrays)
        del arrays

        def side(name: str, command: list[str], *arguments: str) -> Side:
            started = Side(name, [*command, *arguments], folder)
            ends.callback(started.end)
            return started

        file, threads = str(folder / "arrays.npz"), str(os.cpu_count())
        ours = side("ours", [sys.executable, "-m", "experiments.bench_kernels.ours"], file)
        theirs = [python, "-m", "experiments.bench_kernels.torch_side"]
        eager = side("eager", theirs, "eager", file, threads)
        inductor = side("compile", theirs, "compile", file, threads)
        verl = None
        if subprocess.run([python, "-c", HAS_VERL], check=False).returncode == 0:
            verl = side("verl", theirs, "verl", file, threads)
        rules = chosen or list(batch.RULES)
        compiled = compile_some(inductor, rules, batch.LOOPS, compile_seconds)
        print(f"{'ms':24} {'ours':>9} {'eager':>9} {'':7} {'compile':>9} {'':7} {'verl' if verl else 'verl: not installed':>9}")
        ratios: dict[str, list[float]] = {"eager": [], "compile": [], "verl": []}
        for rule in rules:
            asked = [eager, verl, ours] if verl else [eager, ours]
            answers = in_turns(rule, asked)
            sides = {"eager": (eager, answers[0]), "compile": (inductor, compiled.get(rule, (None, "")))}
            if verl:
                sides["verl"] = verl, answers[1]
            fast, problem = answers[-1]
            if fast is None or answers[0][0] is None:
                raise SystemExit(f"{rule}: {problem or answers[0][1]}")
            line = f"{rule + ('*' if rule in batch.LOOPS else ''):24} {fast:9.2f}"
            for name, (other, answer) in sides.items():
                line += " " + cell(fast, answer)
                if answer[0] is None:
                    continue
                differs = difference(ours.outputs(rule), other.outputs(rule))
                if differs and name == "eager":
                    raise SystemExit(f"{rule}: ours and {name} differ in {differs}: no comparison")
                if differs:
                    line += " (another rule)" if name == "verl" else " (other numbers)"
                else:
                    ratios[name].append(answer[0] / fast)
                other.saved(rule).unlink()
            ours.saved(rule).unlink()
            print(line, flush=True)
        for name, found in ratios.items():
            if found:
                print(f"{name} / ours: median {median(found):.1f}, least {min(found):.2f}, of {len(found)} rules")
        peaks = [f"{side.name} {side.peak:,.0f} MB" for side in (ours, eager, inductor, verl) if side and side.peak]
        print("peak memory, the arrays and libraries included: " + ", ".join(peaks), flush=True)
    return median(ratios["eager"]) >= MEDIAN and min(ratios["eager"]) >= MINIMUM


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["256x8192", "64x32768"], metavar="ROWSxTOKENS")
    parser.add_argument("--rules", nargs="+", default=[], metavar="RULE", choices=batch.RULES, help="these alone")
    parser.add_argument("--compile", type=float, default=40, metavar="SECONDS", help="for torch.compile, per shape; 0: without it")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch")
    chosen = parser.parse_args(arguments)
    shapes = [tuple(map(int, shape.split("x"))) for shape in chosen.shape]
    fast = [measure(rows, width, chosen.rules, chosen.compile, chosen.torch) for rows, width in shapes]
    if not all(fast):
        print(f"\ntoo slow: the median of eager / ours should be {MEDIAN:g} and none below {MINIMUM:g}")
    return 0 if all(fast) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
