from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.kernels.group import gigpo, group_relative, group_statistics, state_relative, turn_returns

STATIC = ("std", "baseline", "eps", "eps_in", "singleton", "std_about")
relative = jax.jit(group_relative, static_argnames=STATIC)
two_levels = jax.jit(gigpo, static_argnames=("omega", "std", "eps", "singleton", "stats"))
ONE_GROUP = jnp.zeros(4, jnp.int32)
ALL = jnp.ones(4, bool)
REWARDS = jnp.array([1.0, 0.0, 1.0, 1.0])
NEMO = {"std": "leave_one_out", "baseline": "leave_one_out", "eps": 1e-6}
RLOO = {"std": "none", "baseline": "leave_one_out"}
RULES = [
    {},
    {"std": "sample", "eps": 1e-8},
    {"std": "none"},
    RLOO,
    NEMO,
    {"std": "sample", "eps": 1e-6, "std_about": "baseline"},
    {"std": "population", "eps": 1e-5, "eps_in": "variance"},
]


def one_group(rewards, **options):
    rewards = jnp.array(rewards, jnp.float32)
    return relative(rewards, jnp.zeros(rewards.shape, jnp.int32), jnp.ones(rewards.shape, bool), **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.577350, -1.732051, 0.577350, 0.577350]),
        ({"eps": 1e-6}, [0.577349, -1.732047, 0.577349, 0.577349]),
        ({"std": "sample"}, [0.5, -1.5, 0.5, 0.5]),
        ({"std": "sample", "eps": 1e-4}, [0.4999, -1.4997, 0.4999, 0.4999]),
        ({"std": "none"}, [0.25, -0.75, 0.25, 0.25]),
        (RLOO, [1 / 3, -1.0, 1 / 3, 1 / 3]),
        (NEMO, [0.577349, -1.0, 0.577349, 0.577349]),
        ({"std": "none", "baseline": "none"}, [1.0, 0.0, 1.0, 1.0]),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_the_seeds_group_under_each_convention(options, expected, jit):
    np.testing.assert_allclose((relative if jit else group_relative)(REWARDS, ONE_GROUP, ALL, **options), expected, atol=5e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [-1.224745, 1.224745, 0.0]),
        ({"std": "sample"}, [-1.0, 1.0, 0.0]),
        (RLOO, [-0.45, 0.45, 0.0]),
        (NEMO, [-2.121310, 2.121310, 0.0]),
    ],
)
def test_shaped_rewards(options, expected):
    np.testing.assert_allclose(one_group([0.2, 0.8, 0.5], **options), expected, atol=5e-6)


def test_the_std_of_one_other_member_does_not_divide():
    np.testing.assert_allclose(one_group([1.0, 0.0], **NEMO), [1.0, -1.0], atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "rewards", "expected"),
    [
        ([100.0, 300.0, 200.0, 200.0], [1.0, 0.0, 1.0, 1.0], [0.375, -0.625, 0.375, 0.375]),
        ([100.0, 300.0], [1.0, 0.0], [0.75, -0.25]),
        ([0.0, 0.0], [1.0, 0.0], [0.5, -0.5]),  # nobody wrote anything: the plain mean
    ],
)
def test_a_baseline_weighted_by_length(lengths, rewards, expected):
    np.testing.assert_allclose(one_group(rewards, std="none", baseline="length", length=jnp.array(lengths)), expected, atol=1e-6)


def test_ragged_groups_in_any_order():
    group = jnp.array([2, 0, 2, 0, 2, 1], jnp.int32)
    reward = jnp.array([0.2, 1.0, 0.8, 0.0, 0.5, 7.0])
    advantage = relative(reward, group, jnp.ones(6, bool))
    np.testing.assert_allclose(advantage, [-1.224745, 1.0, 1.224745, -1.0, 0.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e-3, 1e4])
def test_equal_rewards_give_exactly_zero(options, value):
    for n in (1, 3, 7, 8, 64):
        advantage = relative(jnp.full(64, value, jnp.float32), jnp.zeros(64, jnp.int32), jnp.arange(64) < n, **options)
        assert (np.asarray(advantage) == 0).all()


def test_large_rewards_lose_no_digits():
    np.testing.assert_allclose(one_group([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 1], std="none"), [-1, 0, 1, 0], atol=1e-6)


def test_a_lone_member():
    assert one_group([0.7])[0] == 0
    np.testing.assert_allclose(one_group([0.7], singleton="raw", std="none"), [0.7])
    np.testing.assert_allclose(one_group([0.7], singleton="raw", std="sample", eps=0.4), [0.5], rtol=1e-6)  # mean 0, std 1


def test_statistics_over_rows_weigh_long_episodes_more():
    # Three steps that earned 1, one that earned 0.
    np.testing.assert_allclose(one_group([1.0, 0.0], std="sample"), [0.707107, -0.707107], atol=1e-6)
    np.testing.assert_allclose(one_group([1.0, 0.0], std="sample", count=jnp.array([3.0, 1.0])), [0.5, -1.5], atol=1e-6)
    np.testing.assert_allclose(one_group([1.0, 0.0], std="none", count=jnp.array([3.0, 1.0])), [0.25, -0.75], atol=1e-6)


@pytest.mark.parametrize("options", [r for r in RULES if r is not NEMO], ids=str)
def test_a_count_is_that_many_rows(options):
    reward, group, count = [0.3, 1.0, 0.0, 0.5, 0.25], [0, 0, 1, 1, 1], [3, 1, 1, 2, 1]
    rows = [np.repeat(x, count) for x in (np.array(reward, np.float32), np.array(group, np.int32))]
    once = relative(jnp.array(reward), jnp.array(group, jnp.int32), jnp.ones(5, bool), count=jnp.array(count, jnp.float32), **options)
    each = relative(*map(jnp.array, rows), jnp.ones(8, bool), **options)
    np.testing.assert_allclose(np.repeat(once, count), each, atol=1e-5)


def test_out_of_the_loss_but_in_the_baseline_and_the_reverse():
    rewards, kept = jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.array([True, True, True, False])
    f = partial(relative, rewards, ONE_GROUP, std="none")
    np.testing.assert_allclose(f(kept), [1 / 3, -2 / 3, 1 / 3, 0.0], atol=1e-6)  # dropped before grouping
    np.testing.assert_allclose(f(ALL, in_loss=kept), [0.5, -0.5, 0.5, 0.0], atol=1e-6)  # masked in the loss alone
    np.testing.assert_allclose(f(kept, baseline="leave_one_out"), [0.5, -1.0, 0.5, 0.0], atol=1e-6)
    # Compared with a group that it is not counted in; it has nobody to leave out.
    np.testing.assert_allclose(f(kept, in_loss=ALL), [1 / 3, -2 / 3, 1 / 3, -2 / 3], atol=1e-6)
    np.testing.assert_allclose(f(kept, in_loss=ALL, baseline="leave_one_out"), [0.5, -1.0, 0.5, -2 / 3], atol=1e-6)


def test_a_second_row_of_an_episode_gets_its_advantage_and_counts_once():
    rewards, first = jnp.array([1.0, 1.0, 1.0, 0.0]), jnp.array([True, False, False, True])
    advantage = relative(rewards, ONE_GROUP, first, in_loss=ALL, std="sample")
    np.testing.assert_allclose(advantage, [0.707107, 0.707107, 0.707107, -0.707107], atol=1e-6)


def test_centred_by_group_and_scaled_by_batch():
    rewards, group = jnp.array([1.0, 0.0, 3.0, 1.0]), jnp.array([0, 0, 1, 1], jnp.int32)
    f = partial(relative, rewards, group, ALL, scale_group=ONE_GROUP, std="population")
    std = np.std([1.0, 0.0, 3.0, 1.0])
    np.testing.assert_allclose(f(), np.array([0.5, -0.5, 1.0, -1.0]) / std, rtol=1e-6)
    spread = np.sqrt(np.mean(np.square([0.5, -0.5, 1.0, -1.0])))
    np.testing.assert_allclose(f(std_about="baseline"), np.array([0.5, -0.5, 1.0, -1.0]) / spread, rtol=1e-6)
    # A group without spread in a batch with some.
    equal = relative(jnp.array([0.1, 0.1, 3.0, 1.0]), group, ALL, scale_group=ONE_GROUP, eps=1e-8)
    assert (np.asarray(equal)[:2] == 0).all()
    assert (np.asarray(equal)[2:] != 0).all()


members = st.tuples(st.sampled_from([0.0, 0.25, 0.1, 1.0]), st.integers(0, 7), st.booleans())


@pytest.mark.parametrize("options", RULES, ids=str)
@settings(max_examples=10)
@given(data=st.lists(members, min_size=8, max_size=8), order=st.permutations(range(8)))
def test_order_and_members_out_of_the_statistics_change_nothing(options, data, order):
    reward, group, member = (np.array(x, t) for x, t in zip(zip(*data, strict=True), (np.float32, np.int32, bool), strict=True))
    whole = np.asarray(relative(*map(jnp.array, (reward, group, member)), **options))
    poisoned = np.where(member, reward, np.float32(np.nan))
    np.testing.assert_array_equal(relative(*map(jnp.array, (poisoned, group, member)), **options), whole)
    assert (whole[~member] == 0).all()
    shuffled = relative(*(jnp.array(x[np.array(order)]) for x in (reward, group, member)), **options)
    np.testing.assert_allclose(shuffled, whole[np.array(order)], atol=1e-5)
    crashed = (np.append(reward, np.float32(np.inf)), np.append(group, np.int32(0)), np.append(member, False))
    np.testing.assert_allclose(relative(*map(jnp.array, crashed), **options)[:-1], whole, atol=1e-6)
    if options.get("baseline") != "leave_one_out":
        for g in set(group[member].tolist()):
            np.testing.assert_allclose(whole[member & (group == g)].sum(), 0, atol=1e-4)


def test_batches_of_batches_and_float64():
    together = jax.jit(jax.vmap(lambda r: group_relative(r, ONE_GROUP, ALL)))(jnp.stack([REWARDS, 1 - REWARDS]))
    np.testing.assert_allclose(together[1], -together[0], atol=1e-6)
    with jax.enable_x64():
        rewards = jnp.asarray(np.array([1.0, 0.0, 1.0, 1.0]))
        advantage = relative(rewards, ONE_GROUP, ALL, **NEMO)
        assert advantage.dtype == np.float64
        np.testing.assert_allclose(advantage, [0.5773492691913578, -1.0, 0.5773492691913578, 0.5773492691913578], rtol=1e-12)


def test_statistics_of_each_group():
    rewards, group = jnp.array([1.0, 0.0, 5.0, 9.0]), jnp.array([1, 1, 2, 3], jnp.int32)
    f = partial(group_statistics, rewards, group, jnp.array([True, True, True, False]), groups=5, std="sample")
    found = f()
    np.testing.assert_allclose(found.members, [0, 2, 1, 0, 0])
    np.testing.assert_allclose(found.mean, [0, 0.5, 5, 0, 0])
    np.testing.assert_allclose(found.std, [0, 0.707107, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose([found.low[1], found.high[1]], [0, 1])
    raw = f(singleton="raw", eps=0.6, eps_in="floor")
    np.testing.assert_allclose(raw.mean, [0, 0.5, 0, 0, 0])
    np.testing.assert_allclose(raw.std, [1, 0.774597, 1, 1, 1], atol=1e-6)


@pytest.mark.parametrize("options", [{"std": "unbiased"}, {"baseline": "median"}, {"baseline": "length"}, {"length": REWARDS}])
def test_options_that_make_no_sense(options):
    with pytest.raises(Exception, match=r"std|baseline|length"):
        group_relative(REWARDS, ONE_GROUP, ALL, **options)


def test_turn_returns():
    reward = jnp.array([[0.0, 0.2, 1.0], [0.0, 1.0, 99.0]])
    exists = jnp.array([[True, True, True], [True, True, False]])
    np.testing.assert_allclose(turn_returns(reward, exists, gamma=0.9), [[0.99, 1.1, 1.0], [0.9, 1.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize(("std", "expected"), [("population", 1.0), ("sample", 0.707107), ("none", 0.475)])
def test_the_seeds_anchor_pair(std, expected):
    # Two edits made after the same read; one episode earns 1 a turn later, the other 0. Other states are reached once.
    returns = turn_returns(jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), jnp.ones((2, 3), bool), gamma=0.95)
    state = jnp.array([[-1, 3, 1], [-1, 3, 2]], jnp.int32)
    advantage = state_relative(returns, state, jnp.ones((2, 3), bool), std=std)
    np.testing.assert_allclose(advantage, [[0, expected, 0], [0, -expected, 0]], atol=5e-6)


# The seeds' four trajectories of three turns: one start, and a second state shared by the first two.
STATES = jnp.array([[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 6, 7]], jnp.int32)
TURNS = jnp.ones((4, 3), bool)
FINAL = jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])


def seeds_gigpo(**options):
    return two_levels(REWARDS, turn_returns(FINAL, TURNS, gamma=0.95), ONE_GROUP, STATES, TURNS, ALL, **options)


@pytest.mark.parametrize(
    ("std", "first", "second"),
    [
        ("population", [1.154701, -3.464102, 1.154701, 1.154701], [1.577350, -2.732051, 0.577350, 0.577350]),
        ("sample", [1.0, -3.0, 1.0, 1.0], [1.207107, -2.207107, 0.5, 0.5]),
        ("none", [0.475625, -1.426875, 0.475625, 0.475625], [0.725, -1.225, 0.25, 0.25]),
    ],
)
def test_the_seeds_two_levels(std, first, second):
    advantage = seeds_gigpo(std=std)
    np.testing.assert_allclose(advantage[:, 0], first, atol=5e-6)
    np.testing.assert_allclose(advantage[:, 1], second, atol=5e-6)
    np.testing.assert_allclose(advantage[:, 2], relative(REWARDS, ONE_GROUP, ALL, std=std), atol=5e-6)


def test_the_weight_of_the_lower_level():
    without, half, full = (seeds_gigpo(omega=omega) for omega in (0.0, 0.5, 1.0))
    np.testing.assert_allclose(without, np.repeat(relative(REWARDS, ONE_GROUP, ALL)[:, None], 3, axis=1), atol=1e-6)
    np.testing.assert_allclose(2 * half, without + full, atol=1e-5)


def test_episodes_or_their_turns_as_members():
    exists = jnp.array([[True, True, True], [True, False, False]])
    f = partial(
        gigpo, jnp.array([1.0, 0.0]), jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), jnp.full((2, 3), -1), exists, ALL[:2], std="sample"
    )
    np.testing.assert_allclose(f()[:, 0], [0.707107, -0.707107], atol=1e-6)
    np.testing.assert_allclose(f(stats="rows"), [[0.5, 0.5, 0.5], [-1.5, 0.0, 0.0]], atol=1e-6)


@settings(max_examples=20)
@given(data=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 1), st.integers(1, 3)), min_size=4, max_size=4))
@pytest.mark.parametrize("std", ["population", "none"])
def test_without_a_repeated_state_it_is_grpo(std, data):
    reward, group, length = (np.array(x, t) for x, t in zip(zip(*data, strict=True), (np.float32, np.int32, np.int32), strict=True))
    exists = jnp.arange(3)[None] < jnp.array(length)[:, None]
    returns = turn_returns(jnp.where(exists, jnp.array(reward)[:, None], 0.0), exists, gamma=0.9)
    states = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    advantage = two_levels(jnp.array(reward), returns, jnp.array(group), states, exists, ALL, std=std)
    plain = relative(jnp.array(reward), jnp.array(group), ALL, std=std)
    np.testing.assert_allclose(advantage, jnp.where(exists, plain[:, None], 0.0), atol=1e-6)
