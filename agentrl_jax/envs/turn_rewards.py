"""Rewards of single turns, by rule: `Experiment(turn_reward=partial(turn_rewards.by_tests, passing=0.2))`.

A rule sees one call and its answer, and knows nothing of the turns before. What it gives is added to what the episode earns at its end;
which tokens it reaches is the credit rule's business: `credit.gigpo`, `credit.mt_grpo` and those with a critic read rewards of turns.
"""

import re

from agentrl_jax.envs.protocol import Call, Observation, Task


async def by_tests(
    task: Task, call: Call, observation: Observation, *, looked: float = 0.05, passing: float = 0.1, refused: float = -0.05
) -> float | None:
    """Pay for looking at the visible tests, and for how many of them pass. None for calls that are neither a test run nor refused.

    looked:  for a run that tells how many tests pass
    passing: where all of its tests pass, and in proportion where some do
    refused: for a call that the tools count against the policy: no such function, a time-out, ...

    It can be made to pay without anything being solved (tests/envs/test_turn_rewards.py plays both and says how much): each run is paid
    anew, so that testing until the turns are over may earn more than a fix; and where the policy runs shell commands, it can print the
    words of a test run that never took place. The audit of the report does not see this, for what turns earn is no part of the episode's
    `reward`: keep what all of them together can earn far below 1.
    """
    del task, call
    if observation.count is not None:
        return refused
    results = test_results(observation.text)
    return None if results is None else looked + passing * results[0] / results[1]


def test_results(text: str) -> tuple[int, int] | None:
    """(tests that passed, tests that ran) by the text of `BugFix`'s tests, unittest or pytest; None where it is of no such run."""
    if found := re.match(r"ok: (\d+) passed$", text):
        return int(found[1]), int(found[1])
    if text.startswith("FAIL "):
        found = re.search(r"\((\d+) of (\d+) failed\)$", text)
        return (int(found[2]) - int(found[1]), int(found[2])) if found else (0, 1)
    if found := re.search(r"^Ran ([1-9]\d*) tests? in .*\n\n(OK|FAILED)(.*)", text, re.MULTILINE):
        bad = sum(map(int, re.findall(r"(?:failures|errors)=(\d+)", found[3])))
        return max(0, int(found[1]) - bad), int(found[1])
    if found := re.search(r"^=* ?((?:\d+ \w+, )*\d+ \w+) in [\d.]+s", text, re.MULTILINE):
        counts = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (\w+)", found[1])}
        passed, bad = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
        return (passed, passed + bad) if passed + bad else None
    return None
