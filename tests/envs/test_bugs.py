"""The library is fit for a small policy, and every bug in it shows."""

import pytest

from agentrl_jax.envs import inbox
from agentrl_jax.envs.bugs import LOOPS, bugs, evaluate, functions

NAMES = sorted(functions())


def test_there_are_enough() -> None:
    assert len([f for f in functions().values() if not f.longer]) >= 60
    assert 0.1 < sum(f.unseen for f in functions().values()) / len(NAMES) < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_compact_and_their_results_plain(name: str) -> None:
    function = functions()[name]
    lines = function.source.splitlines()
    assert 3 <= len(lines) <= (15 if function.longer else 7)
    assert max(map(len, lines)) <= 60
    assert '"' not in function.source
    assert function.source.isascii()
    assert len(function.pool) == len(set(function.pool)) >= 12
    assert max(map(len, function.pool)) <= 40
    assert len(set(function.wants)) >= 2, "some inputs must make a difference"
    assert {want for want in function.wants if want[0] in "!<"} <= {"!ValueError"}


@pytest.mark.parametrize("name", NAMES)
def test_each_bug_shows_where_it_says_and_its_edit_mends_it(name: str) -> None:
    function = functions()[name]
    assert len(bugs(name)) >= 5
    for bug in bugs(name):
        assert bug.source.count(bug.old) == 1
        assert bug.source.replace(bug.old, bug.new) == function.source
        assert len(bug.fails) >= 2
    bug = bugs(name)[0]
    results = evaluate(bug.source, name, function.pool)
    assert bug.fails == {i for i, want in enumerate(function.wants) if results[i] != want}


def test_endless_loops_and_exceptions_are_results() -> None:
    endless = "def f(n):\n    while n:\n        pass\n    return 1 // n\n"
    assert evaluate(endless, "f", ("(1,)", "(0,)", "(2,)")) == ["!Timeout", "!ZeroDivisionError", "!Timeout"]
    growing = "def f(xs):\n    for x in xs:\n        xs.append(x)\n    return xs\n"
    assert evaluate(growing, "f", ("([],)", "([1],)")) == ["[]", "!Timeout"]
    assert evaluate(f"def f(n):\n    for n in range({LOOPS}):\n        pass\n    return n\n", "f", ("(0,)",)) == [str(LOOPS - 1)]


def test_a_mutant_cannot_change_the_inputs_of_the_next_call() -> None:
    source = "def f(xs):\n    xs.append(1)\n    return xs\n"
    assert evaluate(source, "f", ("([],)", "([],)")) == ["[1]", "[1]"]


def test_results_as_text_keep_types_apart() -> None:
    values = [1, True, "1", 1.0, [1], (1,), [True], None, "None", (), [], "", [(1, [2])], [[1, (2,)]], object(), {1}, range(3)]
    assert len({inbox.show(value) for value in values}) == len(values)


def test_outcome_is_total() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise SystemExit

    deep: list[object] = []
    for _ in range(10**5):
        deep = [deep]
    assert inbox.outcome(exit, (0,)) == "!SystemExit"
    assert inbox.outcome(Loud, ()) == "<Loud>"
    assert inbox.outcome(lambda: 10**5000, ()) == "<unprintable>"
    assert inbox.outcome(lambda: deep, ()) == "<unprintable>"
    assert len(inbox.outcome(lambda: "x" * 10**6, ())) == inbox.LONGEST
