"""Blocked attention against the plain formula, values and gradients, over several blocks and segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from agentrl_jax.models.blockwise import blockwise_attention, segment_starts


def plain(q, k, v, segments):
    """softmax over everything at or before the query in its segment."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    t = q.shape[1]
    visible = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((t, t), bool))[None]
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf)), v)


def inputs(t, *, heads=4, kv=2, d=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (2, t, heads, d))
    k, v = (jax.random.normal(key, (2, t, kv, d)) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], q.shape)


def segments_of(t):
    """A row of three segments and padding whose borders lie inside blocks, and a row of one."""
    bounds = jnp.array([t // 3, t // 2, 5 * t // 6])
    ragged = 1 + jnp.searchsorted(bounds, jnp.arange(t), side="right")
    return jnp.stack([jnp.where(ragged == 4, 0, ragged), jnp.ones(t, ragged.dtype)]).astype(jnp.int32)


@pytest.mark.parametrize("t", [1, 5, 128, 300], ids=lambda t: f"T{t}")
@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (3, 1), (2, 2)])
def test_blocks_are_the_plain_formula(t, heads, kv):
    q, k, v, d_out = inputs(t, heads=heads, kv=kv)
    segments = segments_of(t)
    ours, back = jax.vjp(lambda *x: blockwise_attention(*x, segment_starts(segments)), q, k, v)
    theirs, plain_back = jax.vjp(lambda *x: plain(*x, segments), q, k, v)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for one, other in zip(back(d_out), plain_back(d_out), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_written_gradient_is_that_of_the_values():
    q, k, v, _ = inputs(6, heads=2, kv=1, d=4)
    first = segment_starts(segments_of(6))
    check_grads(jax.jit(lambda *x: blockwise_attention(*x, first)), (q, k, v), order=1, modes=["rev"], rtol=2e-2, atol=2e-2)


def test_large_scores_do_not_overflow():
    q, k, v, d_out = inputs(5)
    first = segment_starts(segments_of(5))
    out, back = jax.vjp(lambda *x: blockwise_attention(*x, first), 1e4 * q, k, v)
    assert all(jnp.isfinite(x).all() for x in (out, *back(d_out)))


def test_bfloat16_inputs_are_scored_and_summed_in_float32():
    """Against float32 on the rounded inputs only the rounding of weights and results is left: 2 ** -8 of their size."""
    rounded = [x.astype(jnp.bfloat16) for x in inputs(300)]
    first = segment_starts(segments_of(300))

    def results(q, k, v, d_out):
        out, back = jax.vjp(lambda *x: blockwise_attention(*x, first), q, k, v)
        return out, *back(d_out)

    ours, theirs = results(*rounded), results(*(x.astype(jnp.float32) for x in rounded))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=2**-7 * jnp.abs(other).max())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_segment_starts_are_where_the_number_changes(lengths):
    lengths = [*lengths, 30 - sum(lengths)]  # padding, perhaps none; one shape compiles once
    numbers = [*range(1, len(lengths)), 0]
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    segments = jnp.asarray(np.repeat(numbers, lengths).astype(np.int32))
    np.testing.assert_array_equal(segment_starts(segments[None])[0], starts)
