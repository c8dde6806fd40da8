"""Mutants are small, valid, reversible, and their fixes can be said in a few unique characters."""

import ast

import pytest

from agentrl_jax.envs.bugs import functions
from agentrl_jax.envs.mutate import MAX_FRAGMENT, Mutation, fragment, mutations, tokens

CLAMP = "def clamp(x, lo):\n    if x < lo:\n        return lo\n    return x\n"


def edits(source: str) -> dict[tuple[str, str], str]:
    return {edit: m.operator for m in mutations(source) if (edit := fragment(source, m))}


def test_mutants_of_a_small_function() -> None:
    assert edits(CLAMP) == {
        ("if x", "if lo"): "variable",
        ("if x", "if not x"): "negation",
        (" < lo", " <= lo"): "comparison",
        (" < lo", " > lo"): "comparison",
        (" < lo", " < x"): "variable",
        ("return lo", "lo"): "return",
        ("return lo", "return x"): "variable",
        ("return x", "x"): "return",
        ("return x", "return lo"): "variable",
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a + 1", (" + 1", " - 1")),
        ("return a + 1", (" a + 1", " a")),
        ("return a[1:b]", ("1:b", "1:b - 1")),
        ("return a and b", (" and b", " or b")),
        ("return max(a, b)", ("return max", "return min")),
        ("return max(a, b)", (" max(a, b", " max(b, a")),
        ("return a not in b", (" not in", " in")),
        ("return range(b)", (" range(b", " range(b + 1")),
        ("return True", ("return True", "return False")),
        ("a += b", (" += b", " -= b")),
        ("a if not a else b", (" not a", " a")),
    ],
)
def test_each_kind_of_mistake(line: str, expected: tuple[str, str]) -> None:
    assert expected in edits(f"def f(a, b):\n    {line}\n")


@pytest.mark.parametrize("name", sorted(functions()))
def test_the_fix_of_a_mutant_is_a_mutation_of_it(name: str) -> None:
    source = functions()[name].source
    fixable = 0
    for mutation in mutations(source):
        mutant = mutation.apply(source)
        assert mutant != source
        ast.parse(mutant)
        inverse = mutation.inverse(source)
        assert inverse.apply(mutant) == source
        fixable += any(other.apply(mutant) == source for other in mutations(mutant))
    assert fixable >= len(mutations(source)) - 3


@pytest.mark.parametrize("name", sorted(functions()))
def test_fragments_are_unique_short_and_say_the_mutation(name: str) -> None:
    source = functions()[name].source
    for mutation in mutations(source):
        if (edit := fragment(source, mutation)) is not None:
            old, new = edit
            assert source.count(old) == 1
            assert 3 <= len(old) <= MAX_FRAGMENT
            assert "\n" not in old + new
            assert source.replace(old, new) == mutation.apply(source)


def test_no_fragment_where_none_is_unique() -> None:
    source = "def f(a, b):\n    a = b\n    a = b\n"
    assert fragment(source, Mutation(source.index("b\n"), source.index("b\n") + 1, "a", "variable")) is None


def test_operators_and_operands_ask_for_the_same_text() -> None:
    source = "def f(m):\n    return m > 12\n"
    olds = {fragment(source, m)[0] for m in mutations(source) if m.operator in ("comparison", "constant")}  # type: ignore[index]
    assert olds == {" > 12"}


def test_tokens_know_operands() -> None:
    (_, line) = tokens("def f(m):\n    return m > 12\n")
    assert [token.operand for token in line] == [False, True, False, True]
