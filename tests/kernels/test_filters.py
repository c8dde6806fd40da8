import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels import filters
from agentrl_jax.kernels.group import group_relative

# Eight groups of four: standard deviations .5, 0, 0, .577, .0577, .5, .5, .577.
REWARDS = jnp.array(
    [[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0.1, 0.2, 0.1, 0.2], [0, 0, 0, 1], [1, 1, 1, 0], [0, 1, 0, 1]]
).ravel()
GROUP = jnp.repeat(jnp.arange(8), 4)
EVERYONE = jnp.ones(32, bool)


def indices(mask):
    return np.flatnonzero(np.asarray(mask)).tolist()


def test_spread_of_groups():
    std = filters.group_score(REWARDS, GROUP, EVERYONE)
    np.testing.assert_allclose(std[:8], [0.5, 0.0, 0.0, 0.5773503, 0.0577350, 0.5, 0.5, 0.5773503], atol=1e-6)
    std = filters.group_score(REWARDS, GROUP, EVERYONE, divisor="population")
    np.testing.assert_allclose(std[:8], [0.4330127, 0.0, 0.0, 0.5, 0.05, 0.4330127, 0.4330127, 0.5], atol=1e-6)
    assert (np.asarray(std[8:]) == 0).all()


def test_equal_rewards_have_no_spread_at_all():
    tenth = jnp.full(8, 0.1)
    for score in ("std", "variance"):
        assert filters.group_score(tenth, jnp.zeros(8, int), jnp.ones(8, bool), score=score)[0] == 0
    assert not filters.varied(tenth, jnp.zeros(8, int), jnp.ones(8, bool)).any()


def test_dynamic_sampling_looks_at_the_metric_and_not_at_the_shaped_reward():
    assert indices(filters.varied(REWARDS, GROUP, EVERYONE)) == [0, 3, 4, 5, 6, 7]
    shaped = REWARDS + jnp.linspace(0, 0.01, 32)
    assert len(indices(filters.varied(shaped, GROUP, EVERYONE))) == 8
    # A member that is in no statistic makes no difference, and a group of one is alike.
    first = jnp.arange(32) % 4 == 0
    assert indices(filters.varied(REWARDS, GROUP, first)) == []


def test_the_most_uncertain_quarter_is_kept():
    std, there = filters.group_score(REWARDS, GROUP, EVERYONE), filters.group_exists(GROUP, EVERYONE)
    for best in (filters.best, jax.jit(filters.best, static_argnames=["fraction"])):
        assert indices(best(std, there, fraction=0.25)) == [3, 7]
    assert indices(filters.best(std, there, count=3)) == [0, 3, 7]
    assert indices(filters.best(std, there, fraction=1.0)) == list(range(8))
    assert indices(filters.best(std, there, fraction=0.25, order="smallest")) == [1, 2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rounding": "floor", "at_least": 0}, []),
        ({"rounding": "floor"}, [1]),
        ({"rounding": "ceil", "at_least": 0}, [1]),
        ({"rounding": "ceil", "at_least": 2}, [1, 2]),
    ],
)
def test_a_quarter_of_three_groups(options, expected):
    score, there = jnp.array([0.1, 0.3, 0.2]), jnp.ones(3, bool)
    assert indices(filters.best(score, there, fraction=0.25, **options)) == expected


def test_rounding_of_a_fraction_is_no_reason_for_one_group_more():
    score = jnp.arange(100.0)
    for fraction, number in ((0.07, 7), (0.29, 29), (0.56, 56)):
        for rounding in ("ceil", "floor"):
            assert len(indices(filters.best(score, score >= 0, fraction=fraction, rounding=rounding))) == number


def test_nucleus_of_variances():
    variance, there = jnp.array([0.2, 0.15, 0.2, 0.0]), jnp.ones(4, bool)
    kept = filters.nucleus(variance, there, share=0.9)
    assert indices(kept) == [0, 1, 2]
    np.testing.assert_allclose(filters.rescaled(jnp.ones(2), kept, there), 0.8660254, atol=1e-6)
    np.testing.assert_allclose(filters.kept_share(variance, kept, there), 1.0, atol=1e-6)
    assert indices(filters.nucleus(variance, there, share=0.3)) == [0]
    assert indices(filters.nucleus(variance, there, share=0.37)) == [0, 2]
    # Without any variance, all or none; a share of 1 keeps all.
    flat = jnp.zeros(4)
    assert indices(filters.nucleus(flat, there, share=0.9)) == [0, 1, 2, 3]
    assert indices(filters.nucleus(flat, there, share=0.9, flat="none")) == [0]
    assert indices(filters.nucleus(flat, there, share=0.9, flat="none", at_least=0)) == []
    assert indices(filters.nucleus(variance, there, share=1.0)) == [0, 1, 2, 3]


def test_nucleus_of_a_softmax():
    score, there = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), jnp.ones(4, bool)
    assert indices(filters.nucleus(score, there, share=0.7, weights="softmax")) == [0, 1]
    assert indices(filters.nucleus(-score, there, share=0.7, weights="softmax", order="smallest")) == [0, 1]


def test_near_the_best():
    score, there = jnp.array([1.0, 0.4, 0.6, 2.0]), jnp.array([True, True, True, False])
    assert indices(filters.near_best(score, there, share=0.5)) == [0, 2]
    assert indices(filters.near_best(score, there, share=0.5, order="smallest")) == [1, 2]


@given(st.lists(st.floats(0, 1, width=16), min_size=6, max_size=6), st.permutations(range(6)))
def test_the_order_of_groups_does_not_matter_but_for_ties(scores, order):
    scores = jnp.array(scores)
    if len(set(scores.tolist())) < 6:
        return
    order, there = jnp.array(order), jnp.ones(6, bool)
    best = jax.jit(lambda score: filters.best(score, there, count=2))
    nucleus = jax.jit(lambda score: filters.nucleus(score, there, share=0.6))
    for choose in (best, nucleus):
        assert (np.asarray(choose(scores)[order]) == np.asarray(choose(scores[order]))).all()


def test_groups_that_are_not_there_are_never_kept():
    score, there = jnp.array([9.0, 0.2, jnp.nan, 0.1]), jnp.array([False, True, False, True])
    for kept in (
        filters.best(score, there, count=4),
        filters.nucleus(score, there, share=0.99),
        filters.nucleus(score, there, share=0.99, weights="softmax"),
        filters.near_best(score, there, share=0.1),
    ):
        assert indices(kept) == [1, 3]


@pytest.mark.parametrize(("bounded", "expected"), [(True, [0.0, -0.5, -1.0, -1.0]), (False, [0.0, -0.5, -1.0, -1.5])])
def test_soft_overlong_punishment(bounded, expected):
    length = jnp.array([16384.0, 18432.0, 20480.0, 22528.0])
    np.testing.assert_allclose(filters.overlong_penalty(length, limit=20480, margin=4096, bounded=bounded), expected)


def test_which_tokens_are_counted_is_a_whole_penalty():
    of_all, of_policy = filters.overlong_penalty(jnp.array([1800.0, 200.0]), limit=1600, margin=400, bounded=False)
    assert (of_all, of_policy) == (-1.5, 0.0)


@pytest.mark.parametrize(
    ("scope", "baseline", "expected"),
    [
        ("statistics", "mean", [1 / 3, -2 / 3, 1 / 3, 0]),
        ("loss", "mean", [0.5, -0.5, 0.5, 0]),
        ("statistics", "leave_one_out", [0.5, -1.0, 0.5, 0]),
    ],
)
def test_compact_filtering_before_grouping_or_in_the_loss(scope, baseline, expected):
    reward, everyone = jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool)
    truncated = jnp.array([False, False, False, True])
    in_stats, in_loss = filters.exclude(truncated, everyone, everyone, scope=scope)
    advantage = group_relative(reward, jnp.zeros(4, int), in_stats, std="none", baseline=baseline)
    np.testing.assert_allclose(jnp.where(in_loss, advantage, 0.0), expected, atol=1e-6)


def test_crashes_leave_the_statistics_and_groups_need_a_majority():
    reward = jnp.array([1.0, 0, 1, 0, 0, 7, jnp.nan, 7])
    group, valid = jnp.zeros(8, int), jnp.arange(8) < 5
    np.testing.assert_allclose(filters.group_score(reward, group, valid, score="mean")[0], 0.4, atol=1e-6)
    assert indices(filters.mostly_valid(group, jnp.ones(8, bool), valid)) == [0]
    assert indices(filters.mostly_valid(group, jnp.ones(8, bool), jnp.arange(8) < 4)) == []
    assert indices(filters.group_exists(group, valid, at_least=5)) == [0]
    assert indices(filters.group_exists(group, valid, at_least=6)) == []
