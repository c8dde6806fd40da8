import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels import diagnostics

MASK = jnp.array([[1, 1, 0, 1], [1, 0, 0, 1]], bool)
X = jnp.array([[1.0, 2.0, jnp.nan, 4.0], [-3.0, jnp.inf, jnp.nan, 8.0]])


@pytest.mark.parametrize("divisor", ["population", "sample"])
def test_summary_is_of_the_entries_under_the_mask(divisor):
    inside = np.asarray(X)[np.asarray(MASK)]
    for summarise in (diagnostics.summary, jax.jit(diagnostics.summary, static_argnames=["divisor"])):
        found = summarise(X, MASK, divisor=divisor)
        expected = [5, inside.sum(), inside.mean(), inside.std(ddof=divisor == "sample"), -3, 8]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    found = diagnostics.summary(X, MASK, lower=0.0, upper=4.0)
    np.testing.assert_allclose(found[2:], [inside.clip(0, 4).mean(), inside.clip(0, 4).std(), 0, 4], rtol=1e-6)


def test_summary_of_nothing_is_zero():
    nothing = jnp.zeros_like(MASK)
    assert all(value == 0 for value in diagnostics.summary(X, nothing))
    gradient = jax.grad(lambda x: diagnostics.summary(x, nothing).mean)(X)
    assert (np.asarray(gradient) == 0).all()


def test_equal_numbers_have_no_spread():
    assert diagnostics.summary(jnp.full(8, 0.1), jnp.ones(8, bool)).std == 0


@given(st.lists(st.tuples(st.floats(-5, 5, width=16), st.booleans(), st.integers(0, 2)), min_size=8, max_size=8))
def test_parts_are_summaries_of_their_own(entries):
    x, mask, part = (jnp.array(column) for column in zip(*entries, strict=True))
    summary = jax.jit(diagnostics.summary, static_argnames=["parts"])
    found = summary(x, mask, part=part, parts=4)
    for k in range(4):
        alone = summary(x, mask & (part == k))
        for whole, one in zip(found, alone, strict=True):
            np.testing.assert_allclose(whole[k], one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([0.0, 2.0, 7.0, 4.0], 1.0),
        ([3.0, 5.0, jnp.nan, 7.0], 1.0),
        ([1.0, 1.0, 1.0, 1.0], 0.0),
        ([0.0, 1.0, 7.0, 2.0], 0.75),
        ([4.0, 2.0, 0.0, 0.0], -3.0),
    ],
    ids=["all", "all but a constant", "constant", "half", "wrong way"],
)
def test_explained_variance(value, expected):
    target, mask = jnp.array([0.0, 2.0, jnp.inf, 4.0]), jnp.array([1, 1, 0, 1], bool)
    for explained in (diagnostics.explained_variance, jax.jit(diagnostics.explained_variance)):
        np.testing.assert_allclose(explained(jnp.array(value), target, mask), expected, atol=1e-6)


def test_equal_returns_leave_nothing_to_explain():
    value, target, mask = jnp.array([0.2, 0.7]), jnp.array([0.1, 0.1]), jnp.ones(2, bool)
    assert diagnostics.explained_variance(value, target, mask) == 0
    assert diagnostics.explained_variance(value, target, ~mask) == 0


def test_fractions():
    np.testing.assert_allclose(diagnostics.fractions_outside(X, MASK, lower=0.0, upper=2.0), [0.2, 0.4])
    np.testing.assert_allclose(diagnostics.fractions_outside(X, MASK), [0.0, 0.0])
    np.testing.assert_allclose(diagnostics.summary(X > 3, MASK).mean, 0.4)


def test_effective_sample_size():
    size = diagnostics.effective_sample_size
    one = jnp.ones(4, bool)
    np.testing.assert_allclose(size(jnp.array([2.0, 2.0, 2.0, jnp.nan]), jnp.array([1, 1, 1, 0], bool)), 1.0)
    np.testing.assert_allclose(size(jnp.array([1.0, 0.0, 0.0, 0.0]), one), 0.25)
    np.testing.assert_allclose(size(jnp.array([1.0, 2.0, 3.0, 4.0]) * 1e30, one), 100 / 120, rtol=1e-6)
    assert size(jnp.zeros(4), one) == 0


def test_perplexity_is_of_each_unit():
    logprob = jnp.log(jnp.array([[0.5, 0.5, 0.25, 1.0]]))
    mask = jnp.array([[True, True, True, False]])
    np.testing.assert_allclose(diagnostics.perplexity(logprob, mask), [[2 ** (4 / 3)] * 4], rtol=1e-6)
    unit = jnp.array([[0, 0, 1, 2]], jnp.int32)
    np.testing.assert_allclose(diagnostics.perplexity(logprob, mask, unit), [[2.0, 2.0, 4.0, 1.0]], rtol=1e-6)


def test_chi_square_is_the_variance_of_the_weights():
    rollout, train = np.array([0.2, 0.3, 0.5]), np.array([0.4, 0.3, 0.3])
    value = diagnostics.chi_square(jnp.log(jnp.asarray(train / rollout)))
    np.testing.assert_allclose((rollout * np.asarray(value)).sum(), (np.square(train) / rollout).sum() - 1, rtol=1e-5)


def test_slices_by_length_lag_and_versions():
    """Two episodes, the first in both rows with a token of another version in the second."""
    episode = jnp.array([[0, 0, 1, 1], [0, 0, 0, 0]], jnp.int32)
    mask = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    version = jnp.array([[3, 3, 5, -1], [4, 6, -1, -1]], jnp.int32)
    length = diagnostics.episode_length(mask, episode, 3)
    assert np.asarray(length).tolist() == [[4, 4, 1, 1], [4, 4, 4, 4]]
    spanned = diagnostics.versions_spanned(version, mask, episode, 3)
    assert np.asarray(spanned).tolist() == [[3, 3, 0, 0], [3, 3, 3, 3]]
    lag = diagnostics.policy_lag(version, 6)
    of_lag = diagnostics.summary(jnp.ones((2, 4)), mask, part=diagnostics.bucket(lag, (1, 3)), parts=3)
    assert of_lag.number.tolist() == [1, 2, 2]  # lag 0 | 1 and 2 | 3 and more
    assert np.asarray(diagnostics.bucket(length, (2, 4))).tolist() == [[2, 2, 0, 0], [2, 2, 2, 2]]


@pytest.mark.parametrize(
    ("ids", "unit", "mask", "expected"),
    [
        ([1, 2, 1, 2, 1, 2], [0] * 6, [1] * 6, [3 / 5] * 6),
        ([1, 2, 3, 4, 5, 6], [0] * 6, [1] * 6, [0] * 6),
        ([1, 2, 1, 2, 1, 2], [0, 0, 0, 1, 1, 1], [1] * 6, [0] * 6),
        ([7, 7, 7, 7, 7, 7], [0, 0, 0, 1, 1, 1], [1] * 6, [1 / 2] * 6),
        ([7, 7, 7, 7, 7, 7], [0] * 6, [1, 1, 0, 1, 1, 0], [1 / 2] * 6),
        ([7, 7, 7, 7, 7, 7], [0] * 6, [0] * 6, [0] * 6),
    ],
)
def test_repeated_pairs(ids, unit, mask, expected):
    found = diagnostics.repetition(jnp.array([ids]), jnp.array([mask], bool), jnp.array([unit]), n=2)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_repetition_of_what_is_shorter_than_an_n_gram():
    assert (np.asarray(diagnostics.repetition(jnp.zeros((2, 3), int), jnp.ones((2, 3), bool), n=4)) == 0).all()


def test_echo_trap_rings_on_named_thresholds():
    std = jnp.array([0.5, 0.3, 0.01, jnp.nan])
    norm = jnp.array([1.0, 1.0, 9.0, 1.0])
    alarms = diagnostics.echo_trap(reward_std=std, gradient_norm=norm, min_reward_std=0.05, max_gradient_norm=5.0, min_entropy=0.1)
    assert {name: alarm.tolist() for name, alarm in alarms.items()} == {
        "reward_std": [False, False, True, True],
        "gradient_norm": [False, False, True, False],
        "any": [False, False, True, True],
    }
    alarms = diagnostics.echo_trap(entropy=jnp.array(0.2), repetition=jnp.array(0.4), min_entropy=0.1, max_repetition=0.3)
    assert not alarms["entropy"]
    assert alarms["repetition"]
    with pytest.raises(ValueError, match="nothing to watch"):
        diagnostics.echo_trap(entropy=jnp.array(0.2))
