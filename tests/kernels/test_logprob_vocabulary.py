"""A vocabulary in parts: the plain definition in float64, whatever the parts; and what the parts save."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.logprob import token_logprobs


def inputs(n, v, d=5, seed=0):
    rng = np.random.default_rng(seed)
    hidden, unembedding = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, d), (v, d)))
    targets = rng.integers(-1, v, n).astype(np.int32)
    return hidden, unembedding, targets, rng.uniform(0.5, 2, n).astype(np.float32)


def plain(hidden, unembedding, targets, temperature, d_logprob, d_entropy):
    """Log-prob, entropy and the gradients of their weighted sum, all logits in float64."""
    hidden, unembedding, temperature = (np.asarray(x, np.float64) for x in (hidden, unembedding, temperature))
    valid, t = (targets >= 0)[:, None], temperature[:, None]
    logits = np.where(valid, hidden, 0) @ unembedding.T / t
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    p, onehot = np.exp(logp), np.arange(len(unembedding)) == targets[:, None]
    entropy = -(p * logp).sum(1, keepdims=True)
    d_logits = valid * (d_logprob[:, None] * (onehot - p) - d_entropy[:, None] * p * (logp + entropy)) / t
    logprob = (onehot * logp).sum(1)
    return logprob, (valid * entropy)[:, 0], d_logits @ unembedding, d_logits.T @ np.where(valid, hidden, 0)


def ours(hidden, unembedding, targets, temperature, d_logprob, d_entropy, **sizes):
    def results(hidden, unembedding):
        return token_logprobs(hidden, unembedding, jnp.asarray(targets), jnp.asarray(temperature), **sizes)

    found, back = jax.vjp(results, jnp.asarray(hidden), jnp.asarray(unembedding))
    return *found, *back((jnp.asarray(d_logprob), jnp.asarray(d_entropy)))


compiled = jax.jit(ours, static_argnames=("chunk", "vocabulary"))


def weights(n):
    return np.sin(np.arange(n, dtype=np.float32)), np.cos(np.arange(n, dtype=np.float32))


@given(st.sampled_from([(1, 7), (9, 12)]), st.sampled_from([1, 5, 12]), st.integers(0, 99))
def test_any_parts_are_the_plain_definition(shape, vocabulary, seed):
    given = *inputs(*shape, seed=seed), *weights(shape[0])
    for one, other in zip(compiled(*given, chunk=4, vocabulary=vocabulary), plain(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=3e-5)


def test_more_tokens_and_words_than_a_cache_holds():
    """What a CPU splits once more, with a rest of both."""
    given = *inputs(601, 4201), *weights(601)
    for one, other in zip(compiled(*given, chunk=1, vocabulary=4200), plain(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * max(1, np.abs(other).max()))


def test_what_has_no_target_may_hold_anything():
    hidden, *rest = inputs(9, 12)
    rest[1][[1, 4]] = -1
    poisoned = hidden.copy()
    poisoned[1], poisoned[4] = np.nan, np.inf
    parts = [compiled(x, *rest, *weights(9), chunk=9, vocabulary=5) for x in (hidden, poisoned)]
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_the_parts_may_be_in_any_order_of_size():
    """A running maximum that rises, falls, or starts far below the last: all sums stay finite."""
    for order in (1, -1):
        unembedding = np.linspace(-1e3, 1e3, 12, dtype=np.float32)[::order, None].copy()
        given = np.ones((2, 1), np.float32), unembedding, np.array([0, 11], np.int32), np.ones(2, np.float32), *weights(2)
        for one, other in zip(compiled(*given, chunk=2, vocabulary=5), plain(*given), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("matrix", [jnp.bfloat16, jnp.float32])
def test_bfloat16_inputs_sum_in_float32(matrix):
    given = *inputs(9, 1000), *weights(9)
    rounded = jnp.asarray(given[0], jnp.bfloat16), jnp.asarray(given[1], jnp.bfloat16).astype(matrix), *given[2:]
    found = compiled(*rounded, chunk=9, vocabulary=300)
    expected = plain(*(np.asarray(x, np.float32) for x in rounded))
    assert [x.dtype for x in found] == [jnp.float32, jnp.float32, jnp.bfloat16, matrix]
    for one, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    for one, other in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2e-2, atol=2e-2 * np.abs(other).max())


def test_a_large_vocabulary_takes_a_hundredth_of_the_memory():
    """Scratch memory of log-prob and gradient of 8,192 tokens at Qwen3's vocabulary, beside all logits; nothing is run."""
    n, v, d = 8192, 151_936, 64
    f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = f32((n, d)), f32((v, d)), jax.ShapeDtypeStruct((n,), jnp.int32), f32((n,))

    def memory(vocabulary):
        def loss(hidden, unembedding, targets, temperature):
            logprob, entropy = token_logprobs(hidden, unembedding, targets, temperature, chunk=n, vocabulary=vocabulary)
            return jnp.sum(logprob) + jnp.sum(entropy)

        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    parts, whole = memory(8192), memory(v)
    assert 100 * parts < whole
