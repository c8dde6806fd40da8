"""The folder of a run, and how errors are told."""

import json
import sys
from dataclasses import replace

import pytest

from agentrl_jax.config import ConfigError
from agentrl_jax.data.frames import StoreError
from agentrl_jax.runs import claim, read_score, reported, write_score
from tests.tiny import experiment

SCORE = {"held_out, sampled": (3, 10), "held_out, greedy": (0, 10)}


def test_a_folder_belongs_to_one_experiment(tmp_path):
    claim(tmp_path / "run", experiment)
    claim(tmp_path / "run", experiment)
    with pytest.raises(ConfigError) as raised:
        claim(tmp_path / "run", replace(experiment, seed=3, optimizer=replace(experiment.optimizer, minibatches=1)))
    assert str(raised.value).splitlines()[1:] == ["  seed: was 0, now 3", "  optimizer.minibatches: was 2, now 1"]
    assert "choose another name, or delete it" in str(raised.value)
    claim(tmp_path / "run", experiment)  # a refusal has changed nothing


def test_what_changes_no_number_may_change(tmp_path):
    claim(tmp_path, experiment)
    free = replace(
        experiment,
        name="moved",
        root="elsewhere",
        checkpoint_every=3,
        evaluate=replace(experiment.evaluate, every=7),
        rollout=replace(experiment.rollout, slots=8, retries=0),
    )
    claim(tmp_path, free)
    assert json.loads((tmp_path / "config.json").read_text())["checkpoint_every"] == 3


def test_scores_come_back(tmp_path):
    path = tmp_path / "before.json"
    assert read_score(path) is None
    assert write_score(path, SCORE) == SCORE
    assert read_score(path) == SCORE
    assert [file.name for file in tmp_path.iterdir()] == ["before.json"]


def test_a_damaged_score_is_named_with_the_way_out(tmp_path):
    path = tmp_path / "after.json"
    path.write_text('{"held_out')
    with pytest.raises(ConfigError, match=r"after.json: not valid JSON .*; delete it to measure again"):
        read_score(path)


def told(capsys, error):
    """Exit status and stderr of a command that ends with this."""
    with reported() as status:
        raise error
    return status.code, capsys.readouterr().err


def test_errors_that_people_can_mend_are_one_line(capsys):
    assert told(capsys, ConfigError("steps must be int")) == (1, "error: steps must be int\n")
    assert told(capsys, OSError(28, "No space left on device")) == (1, "error: [Errno 28] No space left on device\n")
    assert told(capsys, PermissionError(13, "Permission denied", "a")) == (1, "error: [Errno 13] Permission denied: 'a'\n")


def test_those_of_tasks_that_ran_together_too(capsys):
    several = ExceptionGroup("tasks", [StoreError("a: full"), ExceptionGroup("more", [StoreError("b: full")])])
    assert told(capsys, several) == (1, "error: a: full\n")


def test_ctrl_c_is_one_line(capsys):
    assert told(capsys, KeyboardInterrupt()) == (130, "stopped; the same command goes on from here\n")


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("bug"),
        ProcessLookupError(3, "No such process"),
        ExceptionGroup("tasks", [StoreError("full"), ZeroDivisionError("bug")]),
    ],
)
def test_mistakes_in_the_code_keep_their_traceback(error):
    with pytest.raises(type(error)), reported():
        raise error


def test_success_is_silent(capsys):
    with reported() as status:
        sys.stdout.write("")
    assert (status.code, capsys.readouterr().err) == (0, "")
