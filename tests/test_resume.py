"""A run that was stopped, however it was stopped, becomes the run that never was: bit for bit, by the same command."""

import signal
from pathlib import Path

import pytest

from agentrl_jax.data.credits import read_credits
from agentrl_jax.report.load import CREDITS
from tests import launch
from tests.processes import until_gone

pytestmark = [pytest.mark.real("bwrap"), pytest.mark.slow, pytest.mark.timeout(900)]  # a test is several runs


def assert_same(folder: Path, finished: Path) -> None:
    assert launch.measured(folder) == launch.measured(finished)
    assert launch.collected(folder) == launch.collected(finished)
    for file in ("policy/model.safetensors", "warmstart/model.safetensors", "tokenizer.json", "before.json", "after.json"):
        assert (folder / file).read_bytes() == (finished / file).read_bytes(), file
    ours, theirs = (dict(read_credits(path / CREDITS)) for path in (folder, finished))
    assert {episode: [a.tobytes() for a in parts] for episode, parts in ours.items()} == {
        episode: [a.tobytes() for a in parts] for episode, parts in theirs.items()
    }


def assert_stopped(ended: launch.Ended) -> None:
    """As people expect of Ctrl-C: one line that says how to go on, no traceback, no process left."""
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "stopped; the same command goes on from here"
    assert "Traceback" not in ended.err
    assert until_gone(set(ended.left)) == set()


def test_interrupted_between_steps_and_within_one(tmp_path: Path, finished: Path):
    assert_stopped(launch.train(tmp_path, stop="interrupt,1"))
    assert len(launch.measured(tmp_path / "tiny")) == 1
    ended = launch.train(tmp_path, stop="wait,3", send=signal.SIGINT)
    assert len(ended.left) >= 3, "boxes were running"
    assert_stopped(ended)
    assert len(launch.measured(tmp_path / "tiny")) == 3
    assert launch.train(tmp_path).code == 0
    assert_same(tmp_path / "tiny", finished)


def test_interrupted_in_the_warm_start(tmp_path: Path):
    """A long computation hears Ctrl-C too."""
    assert_stopped(launch.train(tmp_path, "warmstart.updates=1000000", send=signal.SIGINT, when="warm start,"))


def test_killed_and_out_of_space(tmp_path: Path, finished: Path):
    folder = tmp_path / "tiny"
    killed = launch.train(tmp_path, stop="wait,3", send=signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    assert until_gone(set(killed.left)) == set()
    before = launch.collected(folder)
    assert {episode.step for episode in before} >= {0, 1, 2}

    full = launch.train(tmp_path, stop="full,4")
    assert full.code == 1
    assert full.err.splitlines()[-1].startswith("error: ")
    assert "File too large" in full.err.splitlines()[-1]
    assert "Traceback" not in full.err
    # The kill cost what came after the checkpoint of step 2. What is collected again is the same, and the first take stays readable.
    superseded = launch.collected(folder, superseded=True)
    assert all(episode in superseded for episode in before)
    assert sum(episode.step == 2 for episode in superseded) == 2 * sum(episode.step == 2 for episode in before)

    assert launch.train(tmp_path).code == 0
    assert_same(folder, finished)


def test_a_finished_run_only_reports_again(tmp_path: Path, finished: Path):
    policy = (finished / "policy/model.safetensors").read_bytes()
    ended = launch.train(finished.parent)
    assert ended.code == 0
    assert "held_out, sampled" in ended.out
    assert (finished / "policy/model.safetensors").read_bytes() == policy
