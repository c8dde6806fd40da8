from collections import Counter
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.data import collate as door
from agentrl_jax.data.anchors import anchor_groups
from agentrl_jax.data.collate import bucket, collate, minibatch_rows, unpack
from agentrl_jax.data.episode import Author, Ending
from tests.data.strategies import batches, make_episode

T = 64


def sampled_tokens(episode):
    """What the record says of every policy token, in the order they were sampled."""
    spans = [span for segment in episode.segments for span in segment.spans if span.author is Author.POLICY]
    return [
        (int(i), float(lp), int(v), span.turn, np.float32(span.temperature or 1.0))
        for span in spans
        for i, lp, v in zip(span.tokens, span.logprobs, span.versions, strict=True)
    ]


def contents(batch, packing):
    """Per episode and segment, everything the token half says, but for where it lies."""
    names = ("ids", "position", "turn", "action", "mask", "in_loss", "logprob", "temperature", "version")
    columns = [unpack(getattr(batch.tokens, name), packing) for name in names]
    return [[tuple(c.tobytes() for c in per_field) for per_field in zip(*segments, strict=True)] for segments in zip(*columns, strict=True)]


def test_bucket():
    assert [bucket(n) for n in (0, 1, 2, 3, 5, 7, 9, 13, 100, 129)] == [1, 1, 2, 3, 6, 8, 12, 16, 128, 192]
    assert bucket(5, (4, 10)) == 10
    assert [bucket(n, door.ROWS) for n in (0, 1, 5, 8, 9, 11, 17, 33, 100)] == [1, 1, 5, 8, 10, 12, 20, 40, 112]
    with pytest.raises(ValueError, match="11 is above the largest bucket 10"):
        bucket(11, (4, 10))


@given(batches(), st.booleans())
def test_every_policy_token_once_and_nothing_else(episodes, pack):
    batch, packing = collate(episodes, row_length=T, pack=pack)
    tokens = batch.tokens
    found = {e: {} for e in range(len(episodes))}
    for b, t in zip(*np.nonzero(tokens.mask), strict=True):
        action = int(tokens.action[b, t])
        record = (tokens.ids, tokens.logprob, tokens.version, tokens.turn, tokens.temperature)
        row = found[int(tokens.episode[b, t])]
        assert action not in row
        row[action] = tuple(x[b, t].item() for x in record)
    for e, episode in enumerate(episodes):
        wanted = sampled_tokens(episode) if episode.usable else []
        assert [found[e][a] for a in sorted(found[e])] == wanted
        assert sorted(found[e]) == list(range(len(wanted)))


@given(batches(), st.booleans())
def test_tokens_are_conserved_and_segments_whole(episodes, pack):
    batch, packing = collate(episodes, row_length=T, pack=pack)
    tokens = batch.tokens
    usable = [episode for episode in episodes if episode.usable]
    assert packing.tokens == int((tokens.segment > 0).sum()) == sum(len(s) for e in usable for s in e.segments)
    assert int(tokens.mask.sum()) == sum(e.policy_tokens for e in usable)
    for episode, segments in zip(episodes, unpack(tokens.ids, packing), strict=True):
        expected = [s.tokens for s in episode.segments] if episode.usable else []
        assert [s.tolist() for s in segments] == [s.tolist() for s in expected]
    for segment, position in zip(tokens.segment, tokens.position, strict=True):
        used = int((segment > 0).sum())
        assert (segment[:used] > 0).all()  # all padding is at the end
        steps = np.diff(segment[:used])
        assert set(steps.tolist()) <= {0, 1}  # one after the other, each contiguous
        assert ((position[:used] == 0) == np.r_[True, steps == 1][:used]).all()
        assert (np.diff(position[:used])[steps == 0] == 1).all()


@given(batches(), st.booleans())
def test_padding_and_observations_say_nothing(episodes, pack):
    tokens = collate(episodes, row_length=T, pack=pack)[0].tokens
    padding, other = tokens.segment == 0, ~tokens.mask
    for array in (tokens.ids, tokens.position, tokens.episode, tokens.turn, tokens.mask):
        assert not array[padding].any()
    assert not tokens.in_loss[other].any()
    assert (tokens.action[other] == -1).all()
    assert (tokens.version[other] == -1).all()
    assert (tokens.logprob[other] == 0).all()
    assert (tokens.temperature[other] == 1).all()


@given(batches(), st.booleans())
def test_predict_lists_the_policy_tokens_of_each_row(episodes, pack):
    tokens = collate(episodes, row_length=T, pack=pack)[0].tokens
    for mask, predict in zip(tokens.mask, tokens.predict, strict=True):
        wanted = np.nonzero(mask)[0].tolist()
        assert predict.tolist() == wanted + [T] * (len(predict) - len(wanted))
        assert 0 not in wanted  # the first token of a row is predicted from nothing


@given(batches())
def test_packed_is_padded(episodes):
    packed, where = collate(episodes, row_length=T)
    padded, elsewhere = collate(episodes, row_length=T, pack=False)
    for name in (f.name for f in fields(packed.episodes)):
        np.testing.assert_array_equal(getattr(packed.episodes, name), getattr(padded.episodes, name))
    assert contents(packed, where) == contents(padded, elsewhere)
    assert where.shape.rows <= elsewhere.shape.rows


@settings(max_examples=5)
@given(batches(), st.randoms(use_true_random=False))
def test_order_of_episodes_changes_no_contents(episodes, random):
    def by_id(order):
        batch, packing = collate(order, row_length=T)
        return {episode.id: content for episode, content in zip(order, contents(batch, packing), strict=True)}, packing.shape

    for _ in range(20):
        assert by_id(random.sample(episodes, len(episodes))) == by_id(episodes)


@given(batches(), st.sampled_from(["score", "drop"]), st.booleans())
def test_table(episodes, limits, dropped_in_stats):
    table = collate(episodes, row_length=T, limits=limits, dropped_in_stats=dropped_in_stats)[0].episodes
    groups = list(dict.fromkeys(episode.group for episode in episodes))
    for e, episode in enumerate(episodes):
        assert groups[table.group[e]] == episode.group
        assert table.reward[e] == np.float32(episode.reward or 0)
        dropped = limits == "drop" and episode.ending.limit
        assert table.in_loss[e] == (episode.usable and not dropped)
        assert table.in_stats[e] == (episode.usable and (dropped_in_stats or not dropped))
        assert table.truncated[e] == episode.ending.limit
        k = len(episode.turns)
        assert table.turn_exists[e].tolist() == table.turn_in_loss[e].tolist() == [True] * k + [False] * (table.state.shape[1] - k)
        assert table.turn_reward[e, :k].tolist() == [np.float32(t.reward or 0) for t in episode.turns]
        assert table.turn_valid[e, :k].tolist() == [t.valid for t in episode.turns]
        assert (table.state[e, k:] == -1).all()
    keys = {}
    for e, episode in enumerate(episodes):
        for k, turn in enumerate(episode.turns):
            key = None if turn.state is None else (episode.group, turn.state)
            assert keys.setdefault(key, int(table.state[e, k])) == table.state[e, k]
    assert keys.pop(None, -1) == -1
    assert len(set(keys.values())) == len(keys)  # different keys, different ids
    filler = slice(len(episodes), None)
    for flags in (table.in_stats, table.in_loss, table.truncated, table.turn_exists, table.turn_valid, table.turn_in_loss):
        assert not flags[filler].any()
    assert not set(table.group[filler].tolist()) & set(table.group[: len(episodes)].tolist())
    assert table.group.max() < len(table.group)  # a segment sum over E groups holds them all


def test_endings_and_the_masks_differ_as_they_should():
    episodes = [
        make_episode("ok", reward=1.0),
        make_episode("limit", reward=0.5, ending=Ending.TURN_LIMIT),
        make_episode("crash", ending=Ending.SANDBOX_FAILED),
        make_episode("unscored", reward=None),
        make_episode("silent", action=0),
    ]
    score, _ = collate(episodes, row_length=T)
    assert score.episodes.in_stats[:5].tolist() == [True, True, False, False, False]
    assert score.episodes.in_loss[:5].tolist() == [True, True, False, False, False]
    assert score.episodes.reward[:2].tolist() == [1.0, 0.5]
    dropped, _ = collate(episodes, row_length=T, limits="drop")
    assert dropped.episodes.in_stats[:2].tolist() == dropped.episodes.in_loss[:2].tolist() == [True, False]
    kept, _ = collate(episodes, row_length=T, limits="drop", dropped_in_stats=True)
    assert kept.episodes.in_stats[:2].tolist() == [True, True]
    assert kept.episodes.in_loss[:2].tolist() == [True, False]
    # Who wrote a token does not depend on what is trained, and attention on neither.
    np.testing.assert_array_equal(score.tokens.mask, dropped.tokens.mask)
    np.testing.assert_array_equal(score.tokens.segment, dropped.tokens.segment)
    assert (score.tokens.segment > 0).sum() > score.tokens.mask.sum()


def test_decoding_the_mask_gives_the_sampled_text():
    vocabulary = [chr(ord("a") + i) for i in range(26)]
    episodes = [make_episode(f"e{i}", seed=i, turns=3, segments=1 + i % 2, vocabulary=26) for i in range(5)]
    batch, packing = collate(episodes, row_length=48)
    ids, masks = unpack(batch.tokens.ids, packing), unpack(batch.tokens.mask, packing)
    for episode, segment_ids, segment_masks in zip(episodes, ids, masks, strict=True):
        spans = [span.tokens for segment in episode.segments for span in segment.spans if span.author is Author.POLICY]
        trained = [i for row, mask in zip(segment_ids, segment_masks, strict=True) for i in row[mask]]
        assert "".join(vocabulary[i] for i in trained) == "".join(vocabulary[i] for span in spans for i in span)


def test_first_fit_decreasing_by_hand():
    # prompts of 5, 4, 3, 2, 2 tokens and one action token each: 6, 5, 4, 3, 3 in rows of 8
    episodes = [make_episode(f"e{n}", turns=1, prompt=p, action=1) for n, p in enumerate((2, 5, 4, 2, 3))]
    batch, packing = collate(episodes, row_length=8)
    assert packing.length.tolist() == [3, 6, 5, 3, 4]
    # 6 | 5+3 | 4+3
    assert packing.row.tolist() == [1, 0, 1, 2, 2]
    assert packing.start.tolist() == [5, 0, 0, 4, 0]
    assert batch.tokens.segment[:3].tolist() == [[1] * 6 + [0] * 2, [1] * 5 + [2] * 3, [1] * 4 + [2] * 3 + [0]]
    assert packing.fill == 21 / 24


def test_rows_of_a_group_lie_together():
    episodes = [make_episode(f"e{i}", group=f"g{i % 3}", turns=1, prompt=20 + i) for i in range(12)]
    batch, _ = collate(episodes, row_length=40)
    assert batch.episodes.group[batch.tokens.episode[:, 0]].tolist() == sorted(batch.episodes.group[:12].tolist())


@given(batches(), st.integers(1, 6))
def test_shapes_are_rungs_and_multiples(episodes, multiple):
    batch, packing = collate(episodes, row_length=(T // 2, T), row_multiple=multiple)
    b, t, a, e, k = packing.shape
    assert batch.tokens.ids.shape == (b, t)
    assert batch.tokens.predict.shape == (b, a)
    assert batch.episodes.state.shape == (e, k)
    assert b % multiple == 0
    assert b // multiple in door.ROWS
    assert t in (T // 2, T)
    assert a in {*door.LADDER, t}
    assert {e, k} <= set(door.LADDER)


@given(batches(), batches())
def test_at_least_keeps_the_shape(small, large):
    _, big = collate([*large], row_length=T)
    _, first = collate(small, row_length=T, at_least=big.shape)
    assert all(a >= b for a, b in zip(first.shape, big.shape, strict=True))
    _, again = collate(small, row_length=T, at_least=first.shape)
    assert again.shape == first.shape


def test_components_in_the_order_asked():
    episodes = [make_episode("a", components={"tests": 0.5, "style": 2.0}), make_episode("b", ending=Ending.CANCELLED)]
    table = collate(episodes, row_length=T, components=("style", "tests"))[0].episodes
    assert table.components.tolist() == [[2.0, 0.5], [0.0, 0.0]]
    with pytest.raises(ValueError, match="episode a: no reward component 'speed'; its verifier gave: tests, style"):
        collate(episodes, row_length=T, components=("speed",))


def test_similar_states_can_be_one_anchor():
    texts = ["0123456789", "012345678x", "abcdefghij"]
    episodes = [make_episode(str(i), turns=1, states=(text,)) for i, text in enumerate(texts)]
    exact, _ = collate(episodes, row_length=T)
    similar, _ = collate(episodes, row_length=T, anchors=partial(anchor_groups, similarity="lcs", threshold=0.8))
    assert exact.episodes.state[:3, 0].tolist() == [0, 1, 2]
    assert similar.episodes.state[:3, 0].tolist() == [0, 0, 1]


def test_a_segment_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="episode long: a segment of 103 tokens is longer than a row of 64; raise row_length"):
        collate([make_episode("ok"), make_episode("long", turns=1, prompt=100)], row_length=(32, 64))


def test_unknown_limits():
    with pytest.raises(Exception, match="bootstrap"):  # a ValueError, or the type checker of the tests
        collate([make_episode()], row_length=T, limits="bootstrap")  # pyright: ignore[reportArgumentType]


def test_nothing_to_train_is_a_batch_of_filler():
    batch, packing = collate([make_episode(ending=Ending.SANDBOX_FAILED)], row_length=T, row_multiple=4)
    assert batch.tokens.ids.shape == (4, T)
    assert not batch.tokens.segment.any()
    assert not batch.episodes.in_stats.any()
    assert unpack(batch.tokens.ids, packing) == [()]


def test_greedy_tokens_are_scored_at_temperature_one():
    batch, _ = collate([make_episode(temperature=0.0), make_episode("hot", temperature=0.5)], row_length=T)
    assert Counter(batch.tokens.temperature[batch.tokens.mask].tolist()) == {1.0: 6, 0.5: 6}


@given(batches(), st.integers(1, 4), st.integers(0, 3))
def test_minibatches_deal_every_row_once(episodes, n, seed):
    batch, _ = collate(episodes, row_length=T, row_multiple=n)
    dealt = minibatch_rows(batch, n, seed=seed)
    assert sorted(dealt.ravel().tolist()) == list(range(batch.tokens.ids.shape[0]))
    np.testing.assert_array_equal(dealt, minibatch_rows(batch, n, seed=seed))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 5))
def test_minibatches_train_similar_numbers_of_tokens(actions, n, seed):
    episodes = [make_episode(f"e{i}", turns=1, action=a) for i, a in enumerate(actions)]
    batch, _ = collate(episodes, row_length=T, row_multiple=n, pack=False)
    counts = [int(batch.tokens.mask[rows].sum()) for rows in minibatch_rows(batch, n, seed=seed)]
    # Neighbours in size are dealt out, so two minibatches differ by no more than the largest row.
    assert max(counts) - min(counts) <= max(actions)


def test_minibatches_depend_on_the_seed_and_refuse_a_remainder():
    batch, _ = collate([make_episode(f"e{i}") for i in range(8)], row_length=32, pack=False)
    assert len({minibatch_rows(batch, 2, seed=seed).tobytes() for seed in range(8)}) > 1
    with pytest.raises(ValueError, match="8 rows cannot be dealt into 3 equal minibatches; collate with row_multiple=3"):
        minibatch_rows(batch, 3, seed=0)


def test_a_dropped_episode_weighs_nothing_when_rows_are_dealt():
    episodes = [make_episode(f"e{i}", action=10, ending=Ending.TIME_LIMIT if i < 2 else Ending.SUBMITTED) for i in range(4)]
    batch, _ = collate(episodes, row_length=64, limits="drop", pack=False)
    for seed in range(5):
        for rows in minibatch_rows(batch, 2, seed=seed):
            assert (rows >= 2).sum() == 1


def test_a_narrower_loss_is_a_replaced_flag():
    batch, _ = collate([make_episode()], row_length=T)
    narrowed = replace(batch, tokens=replace(batch.tokens, in_loss=np.zeros_like(batch.tokens.in_loss)))
    assert narrowed.tokens.mask.any()
    assert not narrowed.tokens.in_loss.any()
