"""Ranking without sorting against sorting."""

import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import ranking

SHAPE = (3, 8)
f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
# Few different values, so that many tie.
values = hypothesis.extra.numpy.arrays(np.float32, SHAPE, elements=st.one_of(st.floats(-2, 2, width=16), st.sampled_from([-0.0, 0.0, 0.5])))
masks = hypothesis.extra.numpy.arrays(bool, SHAPE)

largest, first = jax.jit(ranking.largest), jax.jit(ranking.first)
smallest = jax.jit(ranking.smallest, static_argnames="mean_below")


def picked(order, mask, count):
    """The first `count` of `order` that are in `mask`."""
    found = np.zeros(mask.size, bool)
    found[[i for i in order if mask.ravel()[i]][:count]] = True
    return found.reshape(mask.shape)


@hypothesis.given(values, masks, st.integers(0, 30))
def test_largest_are_those_of_a_stable_sort(value, mask, count):
    order = np.argsort(-value.ravel(), kind="stable")
    np.testing.assert_array_equal(largest(f32(value), jnp.asarray(mask), jnp.int32(count)), picked(order, mask, count))


@hypothesis.given(masks, st.integers(0, 30))
def test_first_in_row_major_order(mask, count):
    np.testing.assert_array_equal(first(jnp.asarray(mask), jnp.int32(count)), picked(range(mask.size), mask, count))


@hypothesis.given(values, masks, st.sampled_from([0.25, 0.5, 1.0]))
def test_smallest_are_as_many_as_have_a_mean_below(value, mask, bound):
    value = np.round(np.abs(value) * 8) / 8  # sums are exact
    order = [i for i in np.argsort(value.ravel(), kind="stable") if mask.ravel()[i]]
    means = np.cumsum(value.ravel()[order]) / np.arange(1, len(order) + 1)
    count = max(int((means < bound).sum()), 1)
    np.testing.assert_array_equal(smallest(f32(value), jnp.asarray(mask), mean_below=bound), picked(order, mask, count))


def test_order_of_floats_is_that_of_their_keys():
    x = np.array([-np.inf, -3.0, -1e-40, 0.0, 1e-40, 0.5, 3.0, np.inf], np.float32)
    keys = np.asarray(ranking.ordered(f32(x)))
    assert (keys > 0).all()
    assert (np.diff(keys.astype(np.int64)) >= 0).all()
    assert ranking.ordered(f32(-0.0)) == ranking.ordered(f32(0.0))


def test_rows_of_one_unit_are_summed_as_others_are():
    from agentrl_jax.kernels import units

    x = f32(np.random.default_rng(0).normal(size=(4, 20)))
    one, two = jnp.zeros((4, 20), jnp.int32), jnp.ones((4, 20), jnp.int32)
    for unit in (one, two):
        np.testing.assert_allclose(units.unit_sum(x, unit), np.broadcast_to(x.sum(1, keepdims=True), x.shape), rtol=1e-5, atol=1e-6)
        gradient = jax.jit(jax.grad(lambda x, unit: jnp.sum(jnp.square(units.unit_sum(x, unit)))))(x, unit)
        np.testing.assert_allclose(gradient, 40 * np.broadcast_to(x.sum(1, keepdims=True), x.shape), rtol=1e-4, atol=1e-4)
