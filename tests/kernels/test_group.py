import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.group import group_relative, state_relative, turn_returns

ONE_GROUP = jnp.zeros(4, jnp.int32)
ALL = jnp.ones(4, bool)
REWARDS = jnp.array([1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.577350, -1.732051, 0.577350, 0.577350]),
        ({"eps": 1e-6}, [0.577349, -1.732047, 0.577349, 0.577349]),
        ({"std": "sample"}, [0.5, -1.5, 0.5, 0.5]),
        ({"std": "sample", "eps": 1e-4}, [0.4999, -1.4997, 0.4999, 0.4999]),
        ({"std": "none"}, [0.25, -0.75, 0.25, 0.25]),
        ({"std": "none", "baseline": "leave_one_out"}, [1 / 3, -1.0, 1 / 3, 1 / 3]),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_the_seeds_group_under_each_convention(options, expected, jit):
    f = lambda r: group_relative(r, ONE_GROUP, ALL, **options)  # noqa: E731
    np.testing.assert_allclose((jax.jit(f) if jit else f)(REWARDS), expected, atol=5e-6)


def test_ragged_groups_in_any_order():
    group = jnp.array([2, 0, 2, 0, 2, 1], jnp.int32)
    reward = jnp.array([0.2, 1.0, 0.8, 0.0, 0.5, 7.0])
    advantage = group_relative(reward, group, jnp.ones(6, bool))
    np.testing.assert_allclose(advantage, [-1.224745, 1.0, 1.224745, -1.0, 0.0, 0.0], atol=1e-5)


@given(st.integers(1, 64), st.sampled_from([0.1, 0.3, 1e-3, 1e4, 0.7]), st.sampled_from(["population", "sample", "none"]))
def test_equal_rewards_give_exactly_zero(n, value, std):
    advantage = group_relative(jnp.full(64, value, jnp.float32), jnp.zeros(64, jnp.int32), jnp.arange(64) < n, std=std)
    assert (np.asarray(advantage) == 0).all()


def test_a_lone_member():
    lone = (jnp.array([0.7]), jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
    assert group_relative(*lone)[0] == 0
    np.testing.assert_allclose(group_relative(*lone, singleton="raw"), [0.7])


@given(st.data())
def test_members_out_of_the_statistics_change_nothing(data):
    n = 8
    rewards = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=n, max_size=n)), np.float32)
    group = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)), np.int32)
    member = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    whole = np.asarray(group_relative(jnp.array(rewards), jnp.array(group), jnp.array(member)))
    poisoned = np.where(member, rewards, np.float32(np.nan))
    np.testing.assert_array_equal(group_relative(jnp.array(poisoned), jnp.array(group), jnp.array(member)), whole)
    assert (whole[~member] == 0).all()
    for g in set(group[member].tolist()):
        np.testing.assert_allclose(whole[member & (group == g)].sum(), 0, atol=1e-5)


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
