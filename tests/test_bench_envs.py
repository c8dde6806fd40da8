"""The benchmark of environments plays episodes that count, with isolation and without."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.real("bwrap")
def test_every_episode_scores_1_in_boxes_and_on_the_floor() -> None:
    options = ["--episodes", "3", "--rounds", "1", "--level", "1", "3"]
    command = [sys.executable, "-m", "experiments.bench_envs", *options]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["level", "boxes/s", "floor/s", "share", "warm/s", "share"]
    assert [row.split()[0] for row in rows] == ["1", "3"]
    assert all(re.fullmatch(r" +\d( +\d+\.\d+){5}", row) for row in rows)
