"""The real search engine against the formula, and what its import leaves alone."""

import math
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.envs.corpus import Corpus, Passage
from agentrl_jax.envs.retrieval import Index, words


def index(*texts: str) -> Index:
    return Index(Corpus("test", tuple(Passage(str(i), text) for i, text in enumerate(texts))))


def found(index: Index, query: str, k: int = 5) -> list[str]:
    return [passage.id for passage in index.search(query, k)]


def test_names_are_found_whole_and_in_parts() -> None:
    assert words("Use xml.sax.readFile") == ["use", "xml.sax.readfile", "xml", "sax", "readfile", "read", "file"]
    assert words("TCPServer2, read_file") == ["tcpserver2", "tcp", "server", "2", "read_file", "read", "file"]
    assert words("?! -- ()") == []


def test_the_passage_that_has_the_rarer_words_comes_first() -> None:
    books = index("the sea and the ship", "the ship", "the sea", "the land")
    assert found(books, "sea ship") == ["0", "1", "2"]
    assert found(books, "land") == ["3"]
    assert found(books, "3") == ["3"], "titles are searched too"
    assert found(books, "sea", 1) == ["2"], "the shorter passage"


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    assert found(index(*["one and the same"] * 9), "same", 4) == ["0", "1", "2", "3"]


def test_nothing_is_found_for_words_that_nobody_wrote() -> None:
    books = index("sea", "land")
    assert found(books, "air") == found(books, "") == found(books, "?!") == found(books, "\ud800") == []
    assert found(books, "sea " * 10**5) == ["0"]


def test_a_corpus_needs_words() -> None:
    with pytest.raises(ValueError, match="corpus test: no passage has a word"):
        Index(Corpus("test", (Passage("-", "?"),)))
    with pytest.raises(ValueError, match="corpus test: no passage has a word"):
        Index(Corpus("test", ()))


@given(st.lists(st.text("abcd ", max_size=12), min_size=1, max_size=8), st.text("abcd ", max_size=6), st.integers(1, 9))
def test_the_best_are_those_of_the_formula(texts: list[str], query: str, k: int) -> None:
    """BM25 as Lucene has it: sum of idf * tf / (tf + k1 (1 - b + b length / mean length)), k1 = 1.5, b = 0.75."""
    documents = [Counter(words(str(i)) * 3 + words(text)) for i, text in enumerate(texts)]
    mean = sum(d.total() for d in documents) / len(documents)

    def score(d: Counter[str]) -> float:
        total = 0.0
        for word in words(query):
            n = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            total += idf * d[word] / (d[word] + 1.5 * (0.25 + 0.75 * d.total() / mean))
        return total

    scores = [score(d) for d in documents]
    got = [scores[int(i)] for i in found(index(*texts), query, k)]
    assert got == pytest.approx(sorted((s for s in scores if s > 0), reverse=True)[:k], rel=1e-5)


@pytest.mark.parametrize("first", ["", "import jax.lax; "])
def test_the_engine_comes_without_jax(first: str) -> None:
    check = (
        f"import sys; {first}before = sys.modules.get('jax'), sys.modules.get('jax.lax')\n"
        "from agentrl_jax.envs.retrieval import load_engine\n"
        "engine = load_engine()\n"
        "assert not engine.selection_np.JAX_IS_AVAILABLE\n"
        "assert (sys.modules.get('jax'), sys.modules.get('jax.lax')) == before\n"
        "assert 'numba' not in sys.modules\n"
        "import jax.lax; assert jax.lax.top_k and load_engine() is engine\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True, timeout=120)
