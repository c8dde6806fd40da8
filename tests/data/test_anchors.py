import random
from difflib import SequenceMatcher

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.data.anchors import anchor_groups

A, B, C = "0123456789", "012345678x", "01234567yx"  # a ~ b ~ c at 0.9, a and c at 0.8


def lcs(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b):
            corner, row[j + 1] = row[j + 1], corner + 1 if x == y else max(row[j + 1], row[j])
    return row[-1]


def greedy(states, group, similar):
    """The definition, with nothing done to be quick."""
    found, firsts = [], []
    for state, label in zip(states, group, strict=True):
        match = next((i for i, (other, first) in enumerate(firsts) if other == label and (state == first or similar(state, first))), None)
        if match is None:
            match = len(firsts)
            firsts.append((label, state))
        found.append(match)
    return found


def test_exact_keys_meet_within_a_group():
    states = [b"s0", b"s1", b"s0", None, b"s0", b"s1"]
    assert anchor_groups(states, ["g", "g", "g", "g", "h", "g"]).tolist() == [0, 1, 0, -1, 2, 1]
    assert anchor_groups([], []).tolist() == []


@pytest.mark.parametrize("similarity", ["lcs", "difflib"])
def test_the_order_of_turns_matters(similarity):
    f = lambda *states: anchor_groups(states, [0] * 3, similarity=similarity, threshold=0.85).tolist()  # noqa: E731
    assert f(A, B, C) == [0, 0, 1]
    assert f(B, A, C) == [0, 0, 0]


def test_the_paper_wants_more_than_the_threshold_and_the_code_no_less():
    assert anchor_groups([A, B], [0, 0], similarity="lcs", threshold=0.9).tolist() == [0, 1]
    assert anchor_groups([A, B], [0, 0], similarity="difflib", threshold=0.9).tolist() == [0, 0]


def test_difflib_misses_what_a_subsequence_finds():
    pair = ["acbab", "abcab"]  # ratio 0.4, 2 LCS / 10 = 0.8
    assert anchor_groups(pair, [0, 0], similarity="lcs", threshold=0.75).tolist() == [0, 0]
    assert anchor_groups(pair, [0, 0], similarity="difflib", threshold=0.75).tolist() == [0, 1]


def test_one_changed_character_in_a_long_repetitive_text():
    text = "step: look around; nothing here " * 10
    changed = text[:100] + "#" + text[101:]
    pair = [text, changed]
    assert SequenceMatcher(None, changed, text).ratio() < 0.5  # autojunk: everything is frequent
    assert anchor_groups(pair, [0, 0], similarity="lcs", threshold=0.99).tolist() == [0, 0]
    assert anchor_groups(pair, [0, 0], similarity="difflib", threshold=0.5).tolist() == [0, 1]
    assert anchor_groups(pair, [0, 0], similarity="difflib", threshold=0.5, autojunk=False).tolist() == [0, 0]


@given(
    st.lists(st.tuples(st.text("abc", max_size=8), st.integers(0, 1)), max_size=12),
    st.sampled_from([0.3, 0.5, 0.7, 0.9]),
    st.sampled_from(["text", "ids"]),
)
def test_as_defined(turns, threshold, kind):
    texts, group = [state for state, _ in turns], [label for _, label in turns]
    states = texts if kind == "text" else [[70_000 + ord(c) for c in text] for text in texts]
    by_lcs = greedy(texts, group, lambda a, b: 2 * lcs(a, b) > threshold * (len(a) + len(b)))
    assert anchor_groups(states, group, similarity="lcs", threshold=threshold).tolist() == by_lcs
    by_ratio = greedy(texts, group, lambda a, b: SequenceMatcher(None, a, b).ratio() >= threshold)
    assert anchor_groups(states, group, similarity="difflib", threshold=threshold).tolist() == by_ratio


def test_two_thousand_states_of_five_hundred_tokens():
    rng = random.Random(0)
    origins = [[rng.randrange(30_000) for _ in range(500)] for _ in range(40)]
    states, origin = [], []
    for _ in range(2000):
        origin.append(rng.randrange(40))
        state = list(origins[origin[-1]])
        for _ in range(10):
            state[rng.randrange(500)] = rng.randrange(30_000)
        states.append(state)
    found = anchor_groups(states, [0] * 2000, similarity="lcs", threshold=0.9)
    first = {o: i for i, o in enumerate(dict.fromkeys(origin))}
    np.testing.assert_array_equal(found, [first[o] for o in origin])


@pytest.mark.parametrize("options", [{"similarity": "lcs"}, {"threshold": 0.9}])
def test_a_threshold_goes_with_a_similarity(options):
    with pytest.raises(ValueError, match="threshold"):
        anchor_groups(["a"], [0], **options)


def test_states_and_labels_come_in_pairs():
    with pytest.raises(ValueError, match="2 states, 1 group labels"):
        anchor_groups(["a", "b"], [0])
