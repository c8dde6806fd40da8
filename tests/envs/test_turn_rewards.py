"""What turns are paid for by rule, and two policies that live on it without solving anything."""

from functools import partial

import pytest

from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.protocol import Environment, Observation, Task
from agentrl_jax.envs.repository import Repository
from agentrl_jax.envs.turn_rewards import by_tests, test_results
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

TASK = Task("t", "Fix it.", {})
TURNS = 12  # of an episode
TEST = ("test", {})

UNITTEST = "..F\n======\nFAIL: test_clamp\n------\nRan 3 tests in 0.001s\n\n"
results = test_results  # by another name, for pytest takes functions called test_* for tests
del test_results


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ok: 4 passed", (4, 4)),
        ("FAIL clamp(1, 2, 3) = 1, want 2 (2 of 5 failed)", (3, 5)),
        ("FAIL utils.py: SyntaxError", (0, 1)),
        (UNITTEST + "FAILED (failures=1)\nexit code 1", (2, 3)),
        (UNITTEST + "FAILED (failures=1, errors=1, skipped=1)", (1, 3)),
        (UNITTEST + "OK\n", (3, 3)),
        ("Ran 0 tests in 0.000s\n\nOK\n", None),
        ("F..\n2 failed, 3 passed, 1 warning in 0.02s\n", (3, 5)),
        ("===== 1 failed, 2 errors in 1.20s =====\n", (0, 3)),
        ("===== 5 passed in 1.20s =====\n", (5, 5)),
        ("no tests ran in 0.01s", None),
        ("def f(x):\n    return x", None),
        ("ok", None),
        ("", None),
    ],
)
def test_a_test_run_is_read_from_its_text(text, expected):
    assert results(text) == expected


async def test_the_reward_of_a_turn():
    pay = partial(by_tests, looked=0.1, passing=0.2, refused=-0.3)
    assert await pay(TASK, TEST, Observation("FAIL f(1) = 1, want 2 (1 of 4 failed)")) == pytest.approx(0.1 + 0.2 * 0.75)
    assert await pay(TASK, TEST, Observation("ok: 4 passed")) == pytest.approx(0.3)
    assert await pay(TASK, ("edit", {}), Observation("error: old not found in f", count="tool_errors")) == -0.3
    assert await pay(TASK, TEST, Observation("timeout", count="tool_timeouts")) == -0.3
    assert await pay(TASK, ("edit", {}), Observation("ok")) is None
    assert await pay(TASK, ("submit", {}), Observation("", done=True)) is None


async def earned(env: Environment, task: Task, calls) -> tuple[float, float]:
    """(reward of the turns by `by_tests`, reward of the episode)"""
    async with Bubblewrap() as backend:
        box, turns = await backend.start(task.files, limits=task.limits), 0.0
        for call in calls:
            turns += await by_tests(task, call, await env.step(task, *call, box)) or 0.0
        return turns, (await env.score(task, box)).reward


@pytest.mark.real("bwrap")
async def test_testing_for_ever_earns_more_than_a_fix():
    env, honest, exploit = BugFix(0), [], []
    for seed in range(8):
        task = env.task(seed)
        honest.append(await earned(env, task, [TEST, *env.gold(task)[:-1], TEST, ("submit", {})]))
        exploit.append(await earned(env, task, [TEST] * TURNS))
    assert [outcome for _, outcome in honest] == [1] * 8
    assert [outcome for _, outcome in exploit] == [0] * 8
    paid = {name: sum(turns for turns, _ in played) / 8 for name, played in {"fix": honest, "exploit": exploit}.items()}
    assert paid == {"fix": pytest.approx(0.257, abs=1e-3), "exploit": pytest.approx(1.290, abs=1e-3)}
    assert paid["exploit"] > paid["fix"] + 1, "and a fix earns 1 at its end"


@pytest.mark.real("bwrap")
async def test_where_there_is_a_shell_no_test_need_run():
    """Of the same 12 turns, 1.8 for words."""
    env = Repository()
    forged = ("run", {"command": r"printf 'Ran 9 tests in 0.001s\n\nOK\n'"})
    turns, outcome = await earned(env, env.task(0), [forged] * TURNS)
    assert (turns, outcome) == (pytest.approx(TURNS * 0.15), 0)
