"""Counting: every ending once, what is unknown left out, and intervals that hold their rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.data.episode import Ending
from agentrl_jax.report.metrics import metric
from agentrl_jax.report.summary import summarise, wilson
from tests.data import strategies
from tests.report import runs


def test_a_worked_example():
    made = [
        runs.episode(0, 0, 0, success=True),
        runs.episode(0, 0, 1, success=False, ending=Ending.TURN_LIMIT),
        runs.episode(0, 0, 3, ending=Ending.SANDBOX_FAILED),
    ]
    values = summarise(made)
    assert values["rollout/episodes"] == 3
    assert values["rollout/usable"] == values["rollout/graded"] == 2
    assert values["rollout/success"] == values["rollout/reward"] == values["rollout/reward_std"] == 0.5
    assert values["rollout/component/tests"] == 0.5
    assert (values["rollout/audit/true"], values["rollout/audit/wrong"], values["rollout/audit/tampering"]) == (0.5, 0, 0)
    assert values["rollout/ending/turn_limit"] == values["rollout/ending/sandbox_failed"] == 1
    assert (values["rollout/count/parse_errors"], values["rollout/count/tool_errors"], values["rollout/count/tool_timeouts"]) == (1, 5, 1)
    assert values["rollout/turns"] == pytest.approx((2 + 3 + 3) / 3)
    assert values["rollout/invalid_turns"] == pytest.approx(1 / 8)
    assert values["rollout/share/generate"] == pytest.approx(1.5 / 2.25)


def test_a_missing_reward_is_not_zero():
    values = summarise([runs.episode(0, 0, 0, ending=Ending.GRADER_FAILED)])
    assert values["rollout/usable"] == 0
    assert not {"rollout/reward", "rollout/reward_std", "rollout/success"} & set(values)


def test_no_episodes_are_counted_as_none():
    values = summarise([], "eval")
    assert values["eval/episodes"] == 0
    assert values["eval/count/parse_errors"] == 0


@given(st.lists(strategies.episodes(), max_size=3), st.sampled_from(["rollout", "eval"]))
def test_endings_sum_to_the_episodes_and_every_name_is_declared(episodes, phase):
    values = summarise(episodes, phase)
    assert sum(values[f"{phase}/ending/{ending.value}"] for ending in Ending) == len(episodes) == values[f"{phase}/episodes"]
    for name in values:
        metric(name)


@pytest.mark.parametrize(
    ("successes", "n", "expected"),
    [(8, 10, (0.4902, 0.9433)), (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (0, 0, (0.0, 1.0)), (50, 100, (0.4038, 0.5962))],
)
def test_wilson_by_hand(successes, n, expected):
    assert wilson(successes, n) == pytest.approx(expected, abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_is_symmetric(tried):
    successes, n = tried
    low, high = wilson(successes, n)
    assert -1e-12 <= low <= successes / n + 1e-12
    assert successes / n - 1e-12 <= high <= 1
    assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_more_successes_than_trials_are_refused():
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson(3, 2)
