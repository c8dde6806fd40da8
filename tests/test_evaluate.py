from dataclasses import replace

import pytest

from agentrl_jax import evaluate
from agentrl_jax.config import Rollout
from agentrl_jax.data.episode import Ending, Outcome
from agentrl_jax.evaluate import settings_of, successes
from agentrl_jax.report.score import table
from agentrl_jax.runs import AFTER, BEFORE, read_score
from tests.data.strategies import make_episode
from tests.launch import EXPERIMENT


def test_what_was_never_graded_is_no_failure():
    won, failed, unknown = (
        replace(make_episode(f"e{i}"), outcome=Outcome(1.0, true_success=success)) for i, success in enumerate([True, False, None])
    )
    spoilt = make_episode("e3", reward=None, ending=Ending.SANDBOX_FAILED)
    assert successes([won, failed, unknown, spoilt, won]) == (2, 3)
    assert successes([]) == (0, 0)


def test_settings_of_rollouts_reach_the_collector():
    rollout = Rollout(turns=3, turn_tokens=5, episode_tokens=7, context=11, seconds=13.0, temperature=0.5, slots=17, retries=2)
    settings = settings_of(rollout)
    limits = settings.limits
    assert (limits.turns, limits.turn_tokens, limits.episode_tokens, limits.context, limits.seconds) == (3, 5, 7, 11, 13.0)
    assert (settings.temperature, settings.slots, settings.retries) == (0.5, 17, 2)
    assert settings_of(rollout, temperature=0.0).temperature == 0


def test_the_table_by_hand():
    """Wilson intervals at 95 %: of 5 in 10 (0.237, 0.763), of 0 in 10 (0, 0.278)."""
    lines = table({"before": {"held_out, sampled": (0, 10)}, "after": {"held_out, sampled": (5, 10)}}).splitlines()
    assert lines[0].split() == ["before", "after"]
    assert lines[1].split() == ["held_out,", "sampled", "0.000", "[0.000,", "0.278]", "0.500", "[0.237,", "0.763]"]


@pytest.mark.real("bwrap")
@pytest.mark.slow
def test_evaluating_a_policy_again_gives_the_scores_of_its_run(capsys, finished):
    """By the command line, in another process than the run's: the same tasks, seeds and weights."""
    arguments = [EXPERIMENT, f"root={finished.parent}"]
    assert evaluate.main(arguments) == 0
    assert capsys.readouterr().out == table({"tiny": read_score(finished / AFTER)}) + "\n"
    assert evaluate.main([*arguments, f"policy={finished / 'warmstart'}"]) == 0
    assert capsys.readouterr().out == table({"tiny": read_score(finished / BEFORE)}) + "\n"


def test_without_arguments_it_says_how_to_call_it(capsys):
    assert evaluate.main([]) == 2
    assert "EXPERIMENT.py [field=value ...]" in capsys.readouterr().err


def test_no_run_is_one_line(capsys, tmp_path):
    assert evaluate.main([EXPERIMENT, f"root={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/tiny/policy/config.json")
