"""Log-probs in chunks: the plain definition, its gradient, and what is skipped."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from agentrl_jax.kernels.logprob import token_logprobs


def inputs(n=7, d=5, v=11):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, unembedding = jax.random.normal(keys[0], (n, d)), jax.random.normal(keys[1], (v, d))
    targets = jax.random.randint(keys[2], (n,), 0, v)
    return hidden, unembedding, targets, jax.random.uniform(keys[3], (n,), minval=0.5, maxval=2.0)


def plain(hidden, unembedding, targets, temperature):
    logprobs = jax.nn.log_softmax(hidden @ unembedding.T / temperature[:, None])
    return jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0], -(jnp.exp(logprobs) * logprobs).sum(axis=1)


def test_two_words_by_hand():
    hidden, unembedding = jnp.array([[jnp.log(3.0)], [0.0]]), jnp.array([[1.0], [0.0]])
    logprob, entropy = token_logprobs(hidden, unembedding, jnp.array([0, 1]), jnp.ones(2), chunk=2)
    np.testing.assert_allclose(jnp.exp(logprob), [0.75, 0.5], rtol=1e-6)
    np.testing.assert_allclose(entropy, [0.75 * np.log(4 / 3) + 0.25 * np.log(4), np.log(2)], rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "no-jit"])
def test_any_chunk_is_the_plain_definition(chunk, transform):
    ours = transform(partial(token_logprobs, chunk=chunk))(*inputs())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, plain(*inputs()))


@pytest.mark.parametrize("chunk", [3, 100])
def test_gradients_are_those_of_the_plain_definition(chunk):
    def loss(function, hidden, unembedding):
        logprob, entropy = function(jnp.asarray(hidden), jnp.asarray(unembedding), *inputs()[2:])
        return jnp.sum(logprob * jnp.arange(7.0)) + jnp.sum(jnp.square(entropy))

    hidden, unembedding = inputs()[:2]
    ours = jax.grad(partial(loss, partial(token_logprobs, chunk=chunk)), argnums=(0, 1))(hidden, unembedding)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, jax.grad(partial(loss, plain), (0, 1))(hidden, unembedding)
    )
    check_grads(partial(loss, partial(token_logprobs, chunk=chunk)), (hidden, unembedding), order=1, modes=["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("chunk", [2, 100])
def test_what_has_no_target_is_as_good_as_absent(chunk):
    hidden, unembedding, targets, temperature = inputs()
    kept = jnp.array([0, 2, 3, 6])
    targets = jnp.full_like(targets, -1).at[kept].set(targets[kept])
    poisoned = jnp.full_like(hidden, jnp.nan).at[kept].set(hidden[kept])

    def total(hidden, unembedding, targets, temperature):
        logprob, entropy = token_logprobs(hidden, unembedding, targets, temperature, chunk=chunk)
        return logprob.sum() + entropy.sum(), (logprob, entropy)

    (_, found), gradient = jax.value_and_grad(total, (0, 1), has_aux=True)(poisoned, unembedding, targets, temperature)
    (_, expected), wanted = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden[kept], unembedding, targets[kept], temperature[kept])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one[jnp.array([1, 4, 5])], 0)
        np.testing.assert_allclose(one[kept], other, rtol=1e-5)
    np.testing.assert_array_equal(gradient[0][jnp.array([1, 4, 5])], 0)
    np.testing.assert_allclose(gradient[0][kept], wanted[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient[1], wanted[1], rtol=1e-4, atol=1e-6)


def test_temperature_zero_is_greedy_recorded_at_one():
    hidden, unembedding, targets, _ = inputs()
    at = partial(token_logprobs, hidden, unembedding, targets, chunk=100)
    jax.tree.map(np.testing.assert_array_equal, at(jnp.zeros(7)), at(jnp.ones(7)))


def test_large_logits_stay_finite():
    hidden, unembedding, targets, temperature = inputs()
    logprob, entropy = token_logprobs(1e4 * hidden, unembedding, targets, temperature, chunk=100)
    assert jnp.isfinite(logprob).all()
    assert (entropy >= 0).all()


def test_all_logits_never_exist_at_once():
    """The program's scratch memory is that of a chunk, in the backward pass too."""
    n, v, chunk = 4096, 1024, 128
    hidden, unembedding = jnp.zeros((n, 8)), jnp.zeros((v, 8))
    targets, temperature = jnp.zeros(n, jnp.int32), jnp.ones(n)

    def memory(chunk):
        gradient = jax.grad(lambda h, u: token_logprobs(h, u, targets, temperature, chunk=chunk)[0].sum(), (0, 1))
        return jax.jit(gradient).lower(hidden, unembedding).compile().memory_analysis().temp_size_in_bytes

    assert memory(chunk) < n * v < memory(n)
