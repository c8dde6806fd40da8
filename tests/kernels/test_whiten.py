import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.kernels.group import group_relative
from agentrl_jax.kernels.whiten import moments, spread, standardise, whiten

X = jnp.array([[1.0, 2.0, jnp.nan], [4.0, jnp.inf, 5.0]])
MASK = jnp.array([[True, True, False], [True, False, True]])


def test_moments_are_those_of_the_entries_under_the_mask():
    kept = np.array([1.0, 2.0, 4.0, 5.0])
    np.testing.assert_allclose(moments(X, MASK), (kept.mean(), kept.var()), rtol=1e-6)
    np.testing.assert_allclose(moments(X, MASK, divisor="sample"), (kept.mean(), kept.var(ddof=1)), rtol=1e-6)
    np.testing.assert_allclose(moments(X, MASK, axis=-1), ([1.5, 4.5], [0.25, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(moments(X, MASK, axis=0), ([2.5, 2, 5], [2.25, 0, 0]), rtol=1e-6)


@pytest.mark.parametrize("divisor", ["population", "sample"])
def test_too_few_entries(divisor):
    for kept in (jnp.zeros((2, 3), bool), jnp.zeros((2, 3), bool).at[1, 2].set(True)):
        mean, variance = moments(X, kept, divisor=divisor)
        assert (mean, variance) == (5.0 if kept.any() else 0.0, 0.0)
        assert (np.asarray(whiten(X, kept, divisor=divisor)) == 0).all()


@pytest.mark.parametrize(("eps_in", "expected"), [("std", 2.5), ("variance", 2.121320), ("floor", 2.0)])
def test_where_eps_enters(eps_in, expected):
    np.testing.assert_allclose(spread(jnp.array(4.0), eps=0.5, eps_in=eps_in), expected, rtol=1e-6)
    np.testing.assert_allclose(spread(jnp.array(0.0), eps=0.25, eps_in=eps_in), 0.25 if eps_in == "std" else 0.5)


@pytest.mark.parametrize(
    ("divisor", "expected"),
    [("sample", [-1.208354, -0.428382, 0, 0, 0.910311, 0.726425]), ("population", [-1.395286, -0.494652, 0, 0, 1.051136, 0.838803])],
)
def test_advantages_around_a_tool_call(divisor, expected):
    mask = jnp.array([True, True, False, False, True, True])
    advantages = jnp.array([0.394784, 0.4372, 7.0, -7.0, 0.51, 0.5])
    np.testing.assert_allclose(whiten(advantages, mask, divisor=divisor, eps=1e-8, eps_in="variance"), expected, atol=2e-5)


def test_shift_and_centre():
    x, mask = jnp.array([1.0, 3.0]), jnp.ones(2, bool)
    np.testing.assert_allclose(whiten(x, mask), [-1, 1])
    np.testing.assert_allclose(whiten(x, mask, shift=False), [1, 3])  # std 1 already
    np.testing.assert_allclose(whiten(2 * x, mask, shift=False), [3, 5])
    np.testing.assert_allclose(whiten(2 * x, mask, centre=False), [1, 3])
    np.testing.assert_allclose(standardise(x, jnp.array(1.0), jnp.array(4.0)), [0, 1])


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_entries_give_exactly_zero(eps):
    for value in (0.1, 0.7, 1e4):
        x = jnp.full(64, value, jnp.float32)
        for n in (2, 3, 7, 8, 63):
            assert (np.asarray(whiten(x, jnp.arange(64) < n, eps=eps, divisor="sample")) == 0).all()
    np.testing.assert_allclose(whiten(x, jnp.arange(64) < 7, shift=False)[:7], 1e4)


@settings(max_examples=15)
@given(
    x=st.lists(st.sampled_from([0.0, 0.1, -1.0, 2.5]), min_size=5, max_size=5),
    count=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    divisor=st.sampled_from(["population", "sample"]),
)
def test_a_count_is_that_many_entries(x, count, divisor):
    f = jax.jit(whiten, static_argnames=("divisor", "eps"))
    once = f(jnp.array(x), jnp.ones(5, bool), count=jnp.array(count, jnp.float32), divisor=divisor, eps=1e-4)
    each = np.repeat(np.array(x, np.float32), count)
    padded = np.pad(each, (0, 15 - len(each)))
    tokens = f(jnp.array(padded), jnp.array(np.arange(15) < len(each)), divisor=divisor, eps=1e-4)
    np.testing.assert_allclose(np.repeat(np.asarray(once), count), np.asarray(tokens)[: len(each)], atol=1e-5)


def test_reinforce_plus_plus_baseline_over_tokens_and_over_episodes():
    group, everyone = jnp.array([0, 0, 1, 1], jnp.int32), jnp.ones(4, bool)
    centred = group_relative(jnp.array([1.0, 0.0, 1.0, 1.0]), group, everyone, std="none")
    np.testing.assert_allclose(centred, [0.5, -0.5, 0, 0])
    tokens = whiten(centred, everyone, count=jnp.array([1.0, 3.0, 2.0, 2.0]), divisor="sample", eps=1e-8, eps_in="variance")
    np.testing.assert_allclose(tokens, [1.767767, -1.060660, 0.353553, 0.353553], atol=1e-5)
    episodes = whiten(centred, everyone, eps=1e-6, centre=False)
    np.testing.assert_allclose(episodes, [1.414210, -1.414210, 0, 0], atol=1e-5)


def test_jit_and_float64():
    with jax.enable_x64():
        x, mask = jnp.asarray(np.array([1.0, 2.0, 4.0])), jnp.ones(3, bool)
        whitened = jax.jit(whiten)(x, mask)
        assert whitened.dtype == np.float64
        np.testing.assert_allclose(whitened, (np.array([1, 2, 4]) - 7 / 3) / np.std([1, 2, 4]), rtol=1e-12)
