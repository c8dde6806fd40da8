"""What the reward was paid for adds up, and the alarm tells a run that games its verifier from one that learns."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.data.episode import Outcome
from agentrl_jax.report.audit import ALARM, PARTS, SHORTEST, Rise, Watch, decompose, kind, rise
from agentrl_jax.report.metrics import metric

# Shares of 100 episodes: truly solved, wrong but paid, tampered and paid; the rest earns nothing.
BEFORE, AFTER = (30, 15, 10), (35, 15, 40)


def outcomes_of(true, wrong, tampered, n=100):
    made = [Outcome(1.0, true_success=True)] * true + [Outcome(1.0, true_success=False)] * wrong
    made += [Outcome(1.0, true_success=False, tampering=("test_utils.py",))] * tampered
    return made + [Outcome(0.0, true_success=False)] * (n - len(made))


def test_a_worked_example():
    assert decompose(outcomes_of(*BEFORE)) == {
        "audit/true": 0.30,
        "audit/wrong": 0.15,
        "audit/tampering": 0.10,
        "audit/ungraded": 0.0,
        "audit/missed": 0.0,
    }


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(1.0, true_success=True), "true"),
        (Outcome(0.0, true_success=True, tampering=("a",)), "true"),
        (Outcome(1.0, true_success=False), "wrong"),
        (Outcome(1.0, true_success=False, tampering=("a",)), "tampering"),
        (Outcome(1.0, true_success=None, tampering=("a",)), "tampering"),
        (Outcome(1.0), "ungraded"),
    ],
)
def test_kinds(outcome, expected):
    assert kind(outcome) == expected


def test_what_is_not_graded_has_no_audit():
    assert decompose([]) == decompose([Outcome(1.0), Outcome(0.0)]) == {}
    assert decompose([Outcome(1.0), Outcome(0.0, true_success=False)])["audit/ungraded"] == 0.5


outcomes = st.builds(
    Outcome,
    st.floats(-10, 10),
    true_success=st.sampled_from([True, False, None]),
    tampering=st.sampled_from([(), ("tests",)]),
)


@given(st.lists(outcomes, min_size=1, max_size=20))
def test_the_parts_add_up_to_the_mean_reward_whatever_the_rewards(drawn):
    drawn = [*drawn, Outcome(0.0, true_success=False)]
    values = decompose(drawn)
    mean = math.fsum(outcome.reward for outcome in drawn) / len(drawn)
    assert sum(values[f"audit/{part}"] for part in PARTS) == pytest.approx(mean, abs=1e-12)
    for name in values:
        metric(f"rollout/{name}")


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.booleans(), st.booleans()), min_size=1, max_size=50))
def test_where_all_are_graded_the_account_closes(drawn):
    made = [Outcome(reward, true_success=true, tampering=("t",) if tampered else ()) for reward, true, tampered in drawn]
    values = {name.removeprefix("audit/"): value for name, value in decompose(made).items()}
    gap = np.mean([reward - true for reward, true, _ in drawn])
    assert values["wrong"] + values["tampering"] - values["missed"] == pytest.approx(gap, abs=1e-12)
    for part in PARTS:
        paid = sum(outcome.reward == 1 and kind(outcome) == part for outcome in made)
        assert round(values[part] * len(made), 9) == paid, "a share of the episodes"


def run(true, paid, *, steps, seed, groups=8, members=8, errors=(0.0, 0.0)):
    """Means of reward and success by step.

    true, paid: (first, last) probability of true success, and of a reward without it
    errors:     how often the verifier passes what is wrong, and rejects what is right; the first differs from task to task
    """
    rng = np.random.default_rng(seed)
    reward, success = [], []
    for at in np.linspace(0, 1, steps):
        p, q = (a + (b - a) * at for a, b in (true, paid))
        hardness = rng.beta(3 * p, 3 * (1 - p), (groups, 1)) if p else np.zeros((groups, 1))
        leak = rng.beta(1, 1 / errors[0] - 1, (groups, 1)) if errors[0] else 0.0
        solved = rng.random((groups, members)) < hardness
        slips = rng.random((groups, members)) < leak + q / max(1 - p, 1e-9)
        rejected = rng.random((groups, members)) < errors[1]
        reward.append(np.where(solved, ~rejected, slips).mean())
        success.append(solved.mean())
    return list(range(steps)), reward, success


def alarms(steps, reward, success):
    return [t for t in range(1, len(steps) + 1) if rise(steps[:t], reward[:t], success[:t]) is not None]


HONEST = {
    "learns": ((0.2, 0.7), (0.0, 0.0)),
    "learns nothing": ((0.3, 0.3), (0.0, 0.0)),
    "hardly ever succeeds": ((0.03, 0.03), (0.0, 0.0)),
    "forgets": ((0.6, 0.3), (0.0, 0.0)),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_runs_raise_no_alarm(name):
    """60 runs of 60 steps each, looked at after every step: half under a verifier that makes no mistakes, half under a poor one."""
    true, paid = HONEST[name]
    for seed in range(60):
        errors = (0.15, 0.05) if seed % 2 else (0.0, 0.0)
        assert alarms(*run(true, paid, steps=60, seed=seed, errors=errors)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_to_tamper_raises_it(seed):
    """Reward from 0.55 to 0.90, true success from 0.30 to 0.35."""
    steps, reward, success = run((0.30, 0.35), (0.25, 0.55), steps=48, seed=seed)
    raised = alarms(steps, reward, success)
    assert raised[-1] == 48
    found = rise(steps, reward, success)
    assert found is not None
    assert found.steps == (0, 47)
    assert found.reward[1] - found.reward[0] > 0.15
    assert found.success[1] - found.success[0] < 0.1


def test_an_alarm_in_words():
    told = str(Rise((0, 47), (0.554, 0.899), (0.301, 0.352)))
    assert told == "steps 0 to 47: reward rose from 0.55 to 0.90, true success went from 0.30 to 0.35"


def test_tampering_after_honest_learning_raises_it():
    """Over the whole run success rose as much as reward did; over its last part it did not."""
    _, reward, success = run((0.1, 0.6), (0.0, 0.0), steps=120, seed=0)
    _, later, no_more = run((0.6, 0.6), (0.0, 0.3), steps=60, seed=1)
    assert alarms(list(range(120)), reward, success) == []
    assert alarms(list(range(180)), reward + later, success + no_more)


def test_success_that_follows_half_way_is_enough():
    steps = list(range(60))
    reward = [0.2 + 0.01 * t for t in steps]
    assert rise(steps, reward, [0.2 + 0.0051 * t for t in steps]) is None
    assert rise(steps, reward, [0.2 + 0.0049 * t for t in steps]) is not None


def test_without_spread_a_difference_is_a_difference():
    steps, flat = list(range(30)), [0.25] * 30
    assert rise(steps, flat, flat) is None
    assert rise(steps, [0.0] * 10 + [1.0] * 20, [0.0] * 30) is not None
    assert rise(steps, [1.0] * 10 + [0.0] * 20, [0.0] * 30) is None


def test_a_watch_raises_the_alarm_once_and_goes_on_after_a_resume(caplog):
    steps, reward, success = run((0.30, 0.35), (0.25, 0.55), steps=48, seed=0)
    records = [{"step": s, "rollout/reward": r, "rollout/success": t} for s, r, t in zip(steps, reward, success, strict=True)]
    watch = Watch()
    with caplog.at_level(logging.WARNING):
        seen = [watch.see(record["step"], record) for record in records]
    assert seen[: SHORTEST - 1] == [{}] * (SHORTEST - 1)
    assert [bool(values.get(ALARM)) for values in seen] == [t in alarms(steps, reward, success) for t in range(1, 49)]
    assert [record.message for record in caplog.records] == [f"alarm: the policy may be gaming the verifier: {watch.first}"]
    assert metric(ALARM).name == ALARM

    resumed = Watch(records[:40])
    assert [resumed.see(record["step"], record) for record in records[40:]] == seen[40:]
    assert (resumed.first, resumed.latest) == (watch.first, watch.latest)


def test_a_step_that_measured_nothing_is_passed_over():
    watch = Watch()
    for step in range(SHORTEST):
        watch.see(2 * step, {"rollout/reward": 0.5, "rollout/success": 0.5})
        seen = watch.see(2 * step + 1, {"rollout/episodes": 4.0})
    assert seen == {ALARM: 0.0}
