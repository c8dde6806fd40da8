"""The benchmark of the learner compares the same work: its layouts hold the same tokens, and a loss that differs is found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_jax.data.collate import collate
from experiments.bench_learner import Measured, check
from experiments.ragged import CONTEXT, TURNS, layouts, ragged


@pytest.fixture(scope="module")
def episodes():
    return ragged(12, 220, 1024, 512)


def test_episodes_are_ragged_and_nine_parts_context(episodes):
    lengths = [len(episode.segments[0]) for episode in episodes]
    assert max(lengths) > 2 * np.median(lengths)
    actions = sum(episode.policy_tokens for episode in episodes)
    assert 0.8 < (sum(lengths) - actions) / actions / CONTEXT < 1.3
    assert all(len(episode.turns) == TURNS for episode in episodes)


def test_every_layout_holds_the_same_actions_behind_the_same_tokens(episodes):
    found = {}
    for name, pieces in layouts(episodes, collate(episodes, row_length=(768, 1024))[0]).items():
        texts = set()
        for piece in pieces:
            ids, positions, action = (piece[part] for part in ("ids", "positions", "action"))
            for row, column in zip(*np.nonzero(action), strict=True):
                start = column - positions[row, column]
                assert (np.diff(positions[row, start : column + 1]) == 1).all()
                texts.add(ids[row, start : column + 1].tobytes())
        found[name] = texts
    assert list(found) == ["padded", "sorted", "packed", "flat"]
    assert len(found["padded"]) == sum(episode.policy_tokens for episode in episodes)
    assert all(texts == found["padded"] for texts in found.values())


@pytest.mark.parametrize(("loss", "norm"), [(1.001, 2.0), (1.0, 2.01), (float("nan"), 2.0), (1.0, float("nan"))])
def test_a_loss_or_gradient_that_differs_is_no_comparison(loss, norm):
    ours = Measured(1.0, 2.0, 1.0, 1.0)
    check(ours, {"same": Measured(1.00001, 2.0002, 1.0, 1.0)})
    with pytest.raises(SystemExit, match=r"no comparison.*\(padded\)"):
        check(ours, {"same": ours, "padded": Measured(loss, norm, 1.0, 1.0)})


@pytest.mark.slow
@pytest.mark.real("torch")
def test_both_sides_train_the_same():
    # Strict promotion is for our code alone, and the exception that tests make for optax does not reach other processes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_NUMPY")}
    command = [sys.executable, "-m", "experiments.bench_learner", "--sizes", "tiny"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    sides = re.findall(r"^  (.+?)(?:, \w+)? +[\d,]+ tokens/s .*?(ratio \d+\.\d+)?$", done.stdout, flags=re.MULTILINE)
    ragged_sides = ["this package", "PyTorch padded", "PyTorch sorted", "PyTorch packed", "PyTorch flat"]
    assert [name for name, _ in sides] == [*ragged_sides, "this package", "PyTorch rows"]
    assert all(bool(ratio) == name.startswith("PyTorch") for name, ratio in sides)
