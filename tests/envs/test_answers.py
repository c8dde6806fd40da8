"""The rules of SQuAD's evaluation on examples worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.envs.answers import contains, exact, f1, normalised


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("The  Eiffel\tTower!", "eiffel tower"),
        ("An apple a day", "apple day"),
        ("theatre, Anna", "theatre anna"),  # articles are whole words
        ("U.S.", "us"),
        ("A.N. Other", "other"),  # punctuation goes first: what is left is an article
        ("the\N{EN DASH}end", "\N{EN DASH}end"),  # only ASCII punctuation goes
        ("read_file()", "readfile"),
        ("'utf-8'", "utf8"),
        (" The ", ""),
        ("\N{LATIN CAPITAL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE}", "\u00e9t\u00e9"),
    ],
)
def test_normalised(text: str, want: str) -> None:
    assert normalised(text) == want


def test_any_gold_will_do() -> None:
    assert exact("the TCPServer.", ["BaseServer", "tcpserver"])
    assert not exact("TCP Server", ["BaseServer", "tcpserver"])
    assert not exact("", ["x"])


@pytest.mark.parametrize(
    ("answer", "golds", "want"),
    [
        ("the cat sat on the mat", ["a cat on mat"], 6 / 7),  # 3 of 4 words right, 3 of 3 found
        ("dog dog", ["dog"], 2 / 3),  # a word counts as often as both have it
        ("dog", ["cat", "big dog"], 2 / 3),  # the best gold
        ("cat", ["dog"], 0.0),
        ("", ["the"], 1.0),
        ("cat", ["the"], 0.0),
        ("", ["cat"], 0.0),
    ],
)
def test_f1(answer: str, golds: list[str], want: float) -> None:
    assert f1(answer, golds) == pytest.approx(want)


def test_contains_goes_by_whole_words() -> None:
    assert contains("either socketserver or the http.server", ["http.server"])
    assert not contains("concatenate", ["cat"])
    assert not contains("sat cat", ["cat sat"])


@given(st.text(), st.text())
def test_relations(a: str, b: str) -> None:
    assert normalised(normalised(a)) == normalised(a)
    assert f1(a, [b]) == f1(b, [a])
    assert not exact(a, [b]) or (f1(a, [b]) == 1 and exact(b, [a]) and contains(a, [b]))
