"""Runs of one experiment side by side: the same warm start, tasks and seeds, one thing changed. A finished run is not run again."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from agentrl_jax.config import Experiment
from agentrl_jax.report.score import Score
from agentrl_jax.report.summary import wilson
from agentrl_jax.runs import AFTER, BEFORE, read_score
from agentrl_jax.train import train

BAR = "held_out, sampled"


def run(experiment: Experiment) -> Path:
    """The folder of the finished run; trains what is not finished."""
    if read_score(experiment.folder / AFTER) is None:
        asyncio.run(train(experiment))
    return experiment.folder


def arm(experiment: Experiment, name: str, seed: int, **changes: object) -> Experiment:
    """The experiment with another seed and `changes`, started from the policy that the unchanged run made by its warm start."""
    if seed == experiment.seed and not changes:
        return experiment
    warmed = run(experiment)
    changed = replace(experiment, name=f"{experiment.name}-{name}-{seed}", seed=seed, policy=str(warmed / "warmstart"), **changes)
    changed.folder.mkdir(parents=True, exist_ok=True)
    # The same policy on the same tasks with the same seeds: measured once.
    shutil.copy(warmed / BEFORE, changed.folder / BEFORE)
    return changed


def scores(folder: Path) -> tuple[Score, Score]:
    """(before, after) of a finished run."""
    before, after = read_score(folder / BEFORE), read_score(folder / AFTER)
    assert before is not None
    assert after is not None
    return before, after


def gain(folder: Path, row: str = BAR) -> float:
    """Success after minus success before, on one row of the score."""
    (won0, n0), (won1, n1) = (score[row] for score in scores(folder))
    return won1 / n1 - won0 / n0


def table(title: str, folders: Sequence[Path]) -> str:
    """Success of runs before and after, sampled and greedy, with 95 % intervals of the sampled rates, and the spread of the gains."""
    lines = [title, f"  {'run':38}{'sampled before':>24}{'sampled after':>24}{'gain':>8}{'greedy before':>15}{'after':>8}"]
    for folder in folders:
        before, after = scores(folder)
        greedy = BAR.replace("sampled", "greedy")
        cells = "".join(f"{_rate(*score[BAR]):>24}" for score in (before, after))
        lines.append(
            f"  {folder.name:38}{cells}{gain(folder):>+8.3f}"
            f"{before[greedy][0] / before[greedy][1]:>15.3f}{after[greedy][0] / after[greedy][1]:>8.3f}"
        )
    gains = [gain(folder) for folder in folders]
    lines.append(f"  gain min {min(gains):+.3f}  median {median(gains):+.3f}  max {max(gains):+.3f}")
    return "\n".join(lines)


def _rate(won: int, n: int) -> str:
    low, high = wilson(won, n)
    return f"{won / n:.3f} [{low:.3f}, {high:.3f}]"
