"""Which turns started in the same state: the anchor groups of GiGPO (https://arxiv.org/abs/2505.10978, Eq. 6), on the host.

The result feeds `kernels.group.state_relative`: equal exactly where group and state are. Three rules for "the same state":

    "exact"    equal keys; what an environment with a state key wants
    "lcs"      similarity 2 LCS(a, b) / (len a + len b) > threshold, LCS the longest common subsequence: the paper, 0.9
    "difflib"  difflib.SequenceMatcher(None, a, b).ratio() >= threshold: the paper's public code, 0.95 or 0.9

difflib's ratio is not the LCS: it adds up longest common *blocks*, is not symmetric, and from 200 elements on ignores whatever is
frequent (autojunk), so that one changed character in a long repetitive text can bring it below one half. It is never the larger one.
"""

from collections.abc import Callable, Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq
from rapidfuzz.process import cdist

Similarity = Literal["exact", "lcs", "difflib"]
AnchorFn = Callable[[Sequence[Any], Sequence[Hashable]], NDArray[np.int32]]
"""`(state of each turn or None, group of each turn) -> number of its anchor group or -1`: `partial(anchor_groups, similarity=...)`."""


def anchor_groups(
    states: Sequence[Any],
    group: Sequence[Hashable],
    *,
    similarity: Similarity = "exact",
    threshold: float | None = None,
    autojunk: bool = True,
) -> NDArray[np.int32]:
    """Number of the anchor group of each turn: 0, 1, ... by first appearance, -1 where the state is None.

    A state joins the first cluster of its group, in order of creation, whose *first* member is similar enough; otherwise it founds one.
    So the order of turns matters: with a ~ b ~ c but not a ~ c, the order a, b, c gives {a, b}, {c}, and b, a, c gives one cluster.
    Equal states always meet. States of different groups never do.

    Args:
        states: hashable keys for "exact"; else strings or sequences of token ids.
        group: label of the group of each turn.
        threshold: for similarities; required there.
        autojunk: of difflib; the public code leaves it on.

    Example:
        >>> anchor_groups(["0123456789", "012345678x", "01234567yx"], [0, 0, 0], similarity="lcs", threshold=0.85).tolist()
        [0, 0, 1]
    """
    if len(states) != len(group):
        raise ValueError(f"{len(states)} states, {len(group)} group labels")
    if similarity not in ("exact", "lcs", "difflib"):
        raise ValueError(f"similarity {similarity!r}: choose exact, lcs or difflib")
    if (threshold is None) == (similarity != "exact"):
        raise ValueError("a threshold goes with a similarity, and with none for exact keys")
    number: dict[tuple[Hashable, Hashable], int] = {}  # equal states always meet, so each is looked at once
    clusters: dict[Hashable, list[int]] = {}
    find: dict[Hashable, Callable[[Any], int | None]] = {}
    symbols: dict[Hashable, int] = {}
    found = np.full(len(states), -1, np.int32)
    count = 0
    for turn, (state, label) in enumerate(zip(states, group, strict=True)):
        if state is None:
            continue
        key = (label, state if threshold is None or isinstance(state, str) else tuple(state))
        if key not in number:
            match = None
            if threshold is not None:
                if label not in find:
                    find[label] = _first_by_lcs(threshold, symbols) if similarity == "lcs" else _first_by_difflib(threshold, autojunk)
                match = find[label](key[1])
            of_label = clusters.setdefault(label, [])
            if match is None:
                of_label.append(count)
                count += 1
            number[key] = of_label[-1 if match is None else match]
        found[turn] = number[key]
    return found


def _first_by_lcs(threshold: float, symbols: dict[Hashable, int]) -> Callable[[Any], int | None]:
    """The first of the states seen so far without a match that is similar to this one; if there is none, this is one more."""
    firsts: list[str] = []
    lengths = np.zeros(0, np.int64)
    bags = np.zeros((0, 256), np.int32)

    def find(state: Any) -> int | None:
        nonlocal lengths, bags
        # As characters, whatever the symbols are: rapidfuzz is fastest on those.
        text = state if isinstance(state, str) else "".join(chr(symbols.setdefault(symbol, len(symbols))) for symbol in state)
        bag = np.bincount(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32) % 256, minlength=256).astype(np.int32)
        needed = threshold * (len(text) + lengths[: len(firsts)]) / 2
        # No common subsequence has more of a symbol than the one that has less of it.
        possible = np.flatnonzero(np.minimum(bags[: len(firsts)], bag).sum(axis=1) > needed)
        if len(possible):
            candidates = [firsts[i] for i in possible]
            cutoff = int(needed[possible].min())
            lcs = cdist([text], candidates, scorer=LCSseq.similarity, score_cutoff=cutoff, dtype=np.int32)[0]
            similar = possible[lcs > needed[possible]]
            if len(similar):
                return int(similar[0])
        if len(firsts) == len(lengths):
            room = max(64, len(firsts))
            lengths, bags = np.pad(lengths, (0, room)), np.pad(bags, ((0, room), (0, 0)))
        lengths[len(firsts)], bags[len(firsts)] = len(text), bag
        firsts.append(text)
        return None

    return find


def _first_by_difflib(threshold: float, autojunk: bool) -> Callable[[Any], int | None]:
    """As `_first_by_lcs`, by the ratio of difflib with the state first and the cluster's first member second."""
    firsts: list[SequenceMatcher[Any]] = []

    def find(state: Any) -> int | None:
        for i, matcher in enumerate(firsts):
            matcher.set_seq1(state)
            if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= threshold and matcher.ratio() >= threshold:
                return i
        firsts.append(SequenceMatcher(None, "", state, autojunk))
        return None

    return find
