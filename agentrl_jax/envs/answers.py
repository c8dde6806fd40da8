"""Is an answer right? Exact match and F1 as SQuAD defines them (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1).

>>> exact("The  Eiffel Tower!", ["eiffel tower"])
True
>>> f1("the tower of Paris", ["Eiffel tower"])
0.4
"""

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles, words parted by single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, golds: Iterable[str]) -> bool:
    """Whether the answer is one of `golds`, both normalised."""
    return normalised(answer) in map(normalised, golds)


def f1(answer: str, golds: Iterable[str]) -> float:
    """Best harmonic mean of precision and recall over words, 0 to 1; where either has no words, 1 if both have none."""
    return max(_f1(normalised(answer).split(), normalised(gold).split()) for gold in golds)


def contains(answer: str, golds: Iterable[str]) -> bool:
    """Whether the answer's words hold those of one of `golds`, in a row: what a lenient grader goes by, and a long answer exploits."""
    words = f" {normalised(answer)} "
    return any(f" {normalised(gold)} " in words for gold in golds)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = (Counter(answer) & Counter(gold)).total()
    # 2PR / (P + R) with P = common / len(answer), R = common / len(gold)
    return 2 * common / (len(answer) + len(gold))
