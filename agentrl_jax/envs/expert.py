"""A deliberately imperfect player of `BugFix`, for the warm start.

Its episodes hold every behaviour that pays (testing before submitting, another edit after FAIL, submitting on ok) mixed with the
ones that do not (submitting untested, the same edit again, fragments that are not there). Which are worth keeping is what
reinforcement learning is left to find out. It knows the right edit and makes it only now and then; its other edits are mutations
by the same operators that made the bug, so they look alike.
"""

import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from random import Random

from agentrl_jax.envs.bugfix import BugFix, Level, handed_out
from agentrl_jax.envs.mutate import fragment, mutations
from agentrl_jax.envs.protocol import Call, Observation, Task

Edit = tuple[str, str]  # old, new


@dataclass(frozen=True)
class Habits:
    """Probabilities of what the expert does.

    right:      an edit is the right one
    slip:       an edit is a slip: text of another function, or a single character
    repeat:     an edit may be one it made before
    read:       reads a function before its first edit of it
    test_first: runs the tests before anything else
    test:       runs the tests after an edit
    untested:   submits after an edit it did not test
    give_up:    submits although the tests failed
    go_on:      edits further although the tests passed
    follow:     edits the function that failed (where the prompt names none)
    undo:       takes its last edit back where that function still fails (and edits are cumulative)
    tries:      edits at most, per bug
    """

    right: float = 0.2
    slip: float = 0.07
    repeat: float = 0.1
    read: float = 0.9
    test_first: float = 0.35
    test: float = 0.6
    untested: float = 0.7
    give_up: float = 0.3
    go_on: float = 0.1
    follow: float = 0.8
    undo: float = 0.5
    tries: int = 4


# By level, so that it succeeds often enough for a policy that imitates it to find rewards (`make check-env` measures it).
# At level 0 it seldom tries twice: that it pays is the policy's to find out.
HABITS = (
    Habits(right=0.4, slip=0.04, test_first=0.2, test=0.45, untested=0.9, give_up=0.6),
    Habits(right=0.35, test_first=0.8),
    Habits(right=0.55, test_first=0.8, test=0.85, untested=0.3, give_up=0.15),
    Habits(right=0.65, test_first=0.9, test=0.9, untested=0.3, give_up=0.1, undo=0.8),
)


def expert(env: BugFix, task: Task, rng: Random, habits: Habits | None = None) -> Generator[Call, Observation, None]:
    """Tool calls, each in answer to the observation sent in; the last one is submit. `next` gives the first."""
    habits = habits or HABITS[env.level]
    texts = handed_out(task)
    right = {function: (old, new) for function, old, new in task.hidden["edits"]}
    suspects = list(right) if env.settings.named else list(texts)
    read: set[str] = set()
    made: list[Call] = []
    failing = _failing((yield "test", {})) if rng.random() < habits.test_first else None
    for _ in range(habits.tries * len(right)):
        function = rng.choice(suspects)
        if failing is not None and failing in suspects and rng.random() < habits.follow:
            function = failing
        if function not in read and rng.random() < habits.read:
            yield "read", {"function": function}
            read.add(function)
        last = made[-1][1] if made else {}
        if env.settings.cumulative and failing and failing == last.get("function") and rng.random() < habits.undo:
            yield "edit", {"function": last["function"], "old": last["new"], "new": last["old"]}
        call = _edit(env.settings, function, texts, right, made, rng, habits)
        yield call
        made.append(call)
        if rng.random() < habits.test:
            failing = _failing((yield "test", {}))
            over = rng.random() < (1 - habits.go_on if failing is None else habits.give_up)
        else:
            over = rng.random() < habits.untested
        if over:
            break
    yield "submit", {}


def _edit(
    level: Level, function: str, texts: dict[str, str], right: dict[str, Edit], made: list[Call], rng: Random, habits: Habits
) -> Call:
    if function in right and rng.random() < habits.right:
        old, new = right[function]
    elif rng.random() < habits.slip:
        old, new = _wrong(level, texts[rng.choice([name for name in texts if name != function])], (), rng)
        old = old if old not in texts[function] else old.strip()[0]
    else:
        avoided = [right.get(function)]
        if rng.random() >= habits.repeat:
            avoided += [(call["old"], call["new"]) for _, call in made if call["function"] == function]
        old, new = _wrong(level, texts[function], avoided, rng)
    return "edit", {"function": function, "old": old, "new": new}


def _wrong(level: Level, source: str, avoided: Collection[Edit | None], rng: Random) -> Edit:
    """An edit that makes one of the level's mutations that is not avoided, else any; the kinds of mutations are equally likely."""
    kinds: dict[str, list[Edit]] = {}
    for mutation in mutations(source):
        edit = fragment(source, mutation)
        if edit is not None and edit not in avoided:
            kinds.setdefault(mutation.operator, []).append(edit)
    made = sorted(filter(level.makes, kinds)) or sorted(kinds)
    return rng.choice(kinds[rng.choice(made)])


def _failing(observation: Observation) -> str | None:
    """The function that the tests say fails; "" where they fail without saying so; None where they pass."""
    if observation.text.startswith("ok"):
        return None
    found = re.match(r"FAIL (\w+)\(", observation.text)
    return found[1] if found else ""
