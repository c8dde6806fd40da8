"""Which episodes a page shows, and that their tokens arrive whole."""

import base64
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.data.episode import Author
from agentrl_jax.report.sample import Entry, choose, encode
from tests.data import strategies
from tests.report import runs


def some_run(steps, groups=2, members=2):
    episodes = [runs.episode(step, group, member) for step in range(steps) for group in range(groups) for member in range(members)]
    return [Entry.of(episode) for episode in episodes]


def shown_steps(episodes):
    return list(dict.fromkeys(e.step for e in episodes))


def test_nothing_of_nothing():
    assert choose([]) == []


def test_all_are_shown_where_they_fit():
    episodes = some_run(4)
    assert choose(episodes) == episodes


@pytest.mark.parametrize(("count", "expected"), [(28, [*range(7)]), (27, [0, 2, 4, 6]), (12, [0, 3, 6]), (11, [0, 6]), (8, [0, 6])])
def test_first_last_and_every_kth_step(count, expected):
    assert shown_steps(choose(some_run(7), count=count)) == expected


@given(st.integers(1, 9), st.integers(1, 3), st.integers(200, 4000), st.integers(1, 40))
def test_bounds_hold_and_groups_stay_whole(steps, groups, tokens, count):
    entries = some_run(steps, groups)
    shown = choose(entries, tokens, count)
    assert shown == sorted(shown, key=lambda e: e.step)
    if len(shown) > 1:
        assert len(shown) <= count
        assert sum(e.tokens for e in shown) <= tokens
    names = {e.group for e in shown}
    if len(names) > 1:
        assert {e.id for e in shown} == {e.id for e in entries if e.group in names}


def test_of_a_group_that_is_too_large_some_members_are_shown():
    entries = [Entry(f"m{m}", 0, "g", 100) for m in range(8)]
    assert [e.id for e in choose(entries, tokens=350)] == ["m0", "m1", "m2"]
    assert [e.id for e in choose(entries, tokens=50)] == ["m0"]


def array(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


@given(st.lists(strategies.episodes(), max_size=2, unique_by=lambda e: e.id))
def test_encoding_keeps_every_token(episodes):
    advantages = {e.id: np.arange(e.policy_tokens, dtype=np.float32) for e in episodes[::2]}
    page = encode(episodes, advantages, None)
    spans = [span for e in episodes for s in e.segments for span in s.spans]
    ids = np.array([entry[0] for entry in page["vocabulary"]] or [0])[array(page["ids"], "<u2")]
    np.testing.assert_array_equal(ids, np.concatenate([np.zeros(0, int), *[s.tokens for s in spans]]))
    logprobs = np.concatenate([np.zeros(0, np.float32), *[s.logprobs for s in spans if s.logprobs is not None]])
    np.testing.assert_array_equal(array(page["logprobs"], "<f4"), logprobs)
    given = array(page["advantages"], "<f4")
    assert len(given) == len(logprobs)
    at = 0
    for e, described in zip(episodes, page["episodes"], strict=True):
        part = given[at : at + e.policy_tokens]
        at += e.policy_tokens
        assert described["credited"] == (e.id in advantages)
        np.testing.assert_array_equal(part, advantages.get(e.id, np.full(e.policy_tokens, np.nan, np.float32)))
    for span, written in zip(spans, [s for e in page["episodes"] for s in e["spans"]], strict=True):
        assert written[1:4] == [int(span.author), span.turn, len(span.tokens)]
        if span.author is Author.POLICY:
            runs_of = [x for version, run in groupby(span.versions.tolist()) for x in (version, len(list(run)))]
            assert written[4:] == [span.temperature, span.finish_reason, span.kv, runs_of]


def test_a_part_of_a_character_is_written_as_its_bytes():
    page = encode([runs.episode(0, 0, 0)], {}, lambda token: runs.tokenizer().decode_bytes([token]))
    partial = [entry for entry in page["vocabulary"] if entry[1] is None]
    assert sorted(entry[2] for entry in partial) == ["86", "92", "e2"]


def test_without_a_tokenizer_ids_are_shown():
    page = encode([runs.episode(0, 0, 0)], {}, None)
    assert all(entry[1] == f"⟨{entry[0]}⟩" for entry in page["vocabulary"])


def test_a_large_vocabulary_takes_wider_indices():
    made = [strategies.make_episode("e0", vocabulary=400_000, prompt=90_000, turns=1)]
    page = encode(made, {}, None)
    assert page["wide"]
    ids = np.array([entry[0] for entry in page["vocabulary"]])[array(page["ids"], "<u4")]
    np.testing.assert_array_equal(ids, made[0].segments[0].tokens)


def test_advantages_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="s0-g0-m0"):
        encode([runs.episode(0, 0, 0)], {"s0-g0-m0": np.zeros(3, np.float32)}, None)
