"""The expert does everything worth learning, and its share of nonsense."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from agentrl_jax.envs.bugfix import LEVELS, BugFix, handed_out
from agentrl_jax.envs.bugs import evaluate
from agentrl_jax.envs.expert import expert
from agentrl_jax.envs.protocol import Call, Observation, Task


def play(env: BugFix, task: Task, seed: int) -> list[tuple[Call, str]]:
    """An episode without a box: edits and tests as the tools do them, for edits that parse."""
    original = handed_out(task)
    present = dict(original)

    def answer(name: str, arguments: dict[str, str]) -> str:
        if name == "read":
            return present[arguments["function"]]
        if name == "edit":
            function, old = arguments["function"], arguments["old"]
            source = present[function] if env.settings.cumulative else original[function]
            if source.count(old) != 1:
                return "error: old not found"
            present[function] = source.replace(old, arguments["new"])
            return "ok"
        for case in task.hidden["visible" if name == "test" else "cases"]:
            try:
                got = evaluate(present[case.function], case.function, (case.arguments,))[0]
            except SyntaxError:
                return "FAIL utils.py: SyntaxError"
            if got != case.want:
                return f"FAIL {case.function}(...) = {got}, want {case.want}"
        return "ok: all passed"

    script = expert(env, task, Random(seed))
    call = next(script)
    episode = []
    while True:
        episode.append((call, answer(*call)))
        if call[0] == "submit":
            return episode
        call = script.send(Observation(episode[-1][1]))


@pytest.mark.slow
@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_it_succeeds_sometimes_and_shows_every_behaviour(level: int) -> None:
    env = BugFix(level)
    seen: Counter[str] = Counter()
    n = 120
    for seed in range(n):
        episode = play(env, env.task(seed), seed)
        names = [call[0] for call, _ in episode]
        answers = [answer for _, answer in episode]
        edits = [call for call, _ in episode if call[0] == "edit"]
        assert names.count("submit") == 1
        seen["success"] += answers[-1].startswith("ok")
        seen["tested, then submitted"] += names[-2:] == ["test", "submit"]
        seen["submitted untested"] += names[-2:] == ["edit", "submit"]
        seen["submitted on ok"] += names[-2] == "test" and answers[-2].startswith("ok")
        seen["submitted on FAIL"] += names[-2] == "test" and answers[-2].startswith("FAIL")
        seen["edited after FAIL"] += any(
            a == "test" and x.startswith("FAIL") and "edit" in names[i:] for i, (a, x) in enumerate(zip(names, answers, strict=True))
        )
        seen["tried another edit"] += any(a != b and a[1]["function"] == b[1]["function"] for a, b in pairwise(edits))
        seen["edit failed"] += level == 0 or any(answer.startswith("error") for answer in answers)  # level 0 keeps them rare
        seen["read first"] += "read" in names[:2]
    assert 0.15 * n < seen.pop("success") < 0.6 * n
    assert all(0.01 * n < count for count in seen.values()), seen


def test_it_is_reproducible() -> None:
    env = BugFix(0)
    assert play(env, env.task(5), 1) == play(env, env.task(5), 1)
    assert len({str(play(env, env.task(5), seed)) for seed in range(10)}) > 5
