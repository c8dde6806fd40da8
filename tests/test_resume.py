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


def test_interrupted_within_a_step_and_between_two_then_killed_then_out_of_space(tmp_path: Path, finished: Path):
    folder = tmp_path / "tiny"
    interrupted = launch.train(tmp_path, stop="wait,1", send=signal.SIGINT)
    assert len(interrupted.left) >= 3, "boxes were running"
    assert_stopped(interrupted)
    assert len(launch.measured(folder)) == 1
    assert_stopped(launch.train(tmp_path, stop="interrupt,2"))
    assert len(launch.measured(folder)) == 2

    killed = launch.train(tmp_path, stop="wait,3", send=signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    assert until_gone(set(killed.left)) == set()
    before, taken = launch.collected(folder), launch.collected(folder, superseded=True)
    assert {episode.step for episode in before} >= {0, 1, 2}

    full = launch.train(tmp_path, stop="full,4")
    assert full.code == 1
    assert full.err.splitlines()[-1].startswith("error: ")
    assert "File too large" in full.err.splitlines()[-1]
    assert "Traceback" not in full.err
    # The kill cost what came after the checkpoint of step 2. What is collected again is the same, and earlier takes stay readable.
    superseded = launch.collected(folder, superseded=True)
    assert all(episode in superseded for episode in taken)
    first, again = (sum(episode.step == 2 for episode in episodes) for episodes in (before, superseded))
    assert again - sum(episode.step == 2 for episode in taken) == first > 0

    assert launch.train(tmp_path).code == 0
    assert_same(folder, finished)


def test_interrupted_in_the_warm_start(tmp_path: Path):
    """A long computation hears Ctrl-C too."""
    assert_stopped(launch.train(tmp_path, "warmstart.updates=1000000", send=signal.SIGINT, when="warm start,"))


def test_a_finished_run_only_reports_again(tmp_path: Path, finished: Path):
    policy = (finished / "policy/model.safetensors").read_bytes()
    ended = launch.train(finished.parent)
    assert ended.code == 0
    assert "held_out, sampled" in ended.out
    assert (finished / "policy/model.safetensors").read_bytes() == policy
