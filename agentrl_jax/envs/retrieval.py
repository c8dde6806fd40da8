"""Full-text search: BM25 (Robertson & Zaragoza 2009) as Lucene computes it, by the package `bm25s`, which needs numpy only."""

import re
import sys
from types import ModuleType
from typing import Any

import numpy as np

from agentrl_jax.envs.corpus import Corpus, Passage

_NAME = re.compile(r"\w+(?:\.\w+)*")
_WORD = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_QUERY = 1000  # characters of a query that count
_TITLE = 3  # times that the words of a title count: a name should find what it names before what mentions it


def load_engine() -> ModuleType:
    """The package, without jax: its import would start a backend of jax wherever jax is installed, which is not a search's to do.

    Raises ImportError where it is not installed.
    """
    if (loaded := sys.modules.get("bm25s")) is not None:
        return loaded
    hidden = {name: sys.modules.get(name) for name in ("jax", "jax.lax")}
    try:
        sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType, reportCallIssue] - None: not to be imported
        import bm25s
    except ImportError as error:
        raise ImportError("search needs the package bm25s: pip install 'agentrl-jax[search]'") from error
    finally:
        for name, module in hidden.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return bm25s


def words(text: str) -> list[str]:
    """What is indexed, in lower case: dotted names, their words, and the parts of compound words, as `read` and `file` of `readFile`."""
    found = []
    for name in _NAME.findall(text):
        names = _WORD.findall(name)
        found += [name, *names] if len(names) > 1 else names
        for word in names:
            parts = _PART.findall(word)
            found += parts if len(parts) > 1 else []
    return [word.lower() for word in found]


class Index:
    """Searches the passages of a corpus by id and text. The same corpus and query give the same passages in the same order."""

    def __init__(self, corpus: Corpus) -> None:
        """Raises ValueError where no passage has a word."""
        tokens = [words(p.id) * _TITLE + words(p.text) for p in corpus.passages]
        if not any(tokens):
            raise ValueError(f"corpus {corpus.name}: no passage has a word that could be searched for")
        self._passages = corpus.passages
        self._engine: Any = load_engine().BM25(method="lucene", backend="numpy", csc_backend="numpy")
        self._engine.index(tokens, show_progress=False)

    def search(self, query: str, k: int) -> list[Passage]:
        """The at most `k` passages that match best, best first; earlier ones first where the scores are equal."""
        tokens = words(query[:_QUERY])
        if not tokens:
            return []
        scores = self._engine.get_scores(tokens)
        # The engine's own selection leaves the order of equal scores open.
        least = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
        candidates = np.flatnonzero((scores >= least) & (scores > 0))
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
        return [self._passages[i] for i in best]
