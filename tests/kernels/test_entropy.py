import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.entropy import collision, entropy, highest, log_prob, log_softmax

rows = st.lists(st.floats(-30, 30), min_size=2, max_size=7).map(lambda x: np.array(x, np.float32))


@pytest.mark.parametrize("jit", [False, True])
def test_10c(jit):
    f = jax.jit(entropy) if jit else entropy
    np.testing.assert_allclose(f(jnp.array([1.0, 2.0, 3.0])), 0.8323956, atol=1e-6)


@given(rows)
def test_against_the_probabilities(logits):
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(entropy(jnp.array(logits)), -(p * np.where(p > 0, np.log(p), 0)).sum(), atol=2e-5)
    np.testing.assert_allclose(collision(jnp.array(logits)), np.square(p).sum(), rtol=2e-5)
    np.testing.assert_allclose(log_prob(jnp.array(logits), jnp.array(1)), np.log(p[1]), atol=2e-5)


@given(rows, st.floats(-100, 100))
def test_a_common_shift_changes_nothing(logits, shift):
    x = jnp.array(logits)
    np.testing.assert_allclose(entropy(x + np.float32(shift)), entropy(x), atol=1e-4)


def test_a_forbidden_token_is_as_if_it_were_not_there():
    short, long = jnp.array([[1.0, 2.0, -1.0]]), jnp.array([[1.0, -np.inf, 2.0, -1.0]])
    kept = np.array([0, 2, 3])
    for f in (entropy, collision, lambda x: log_prob(x, jnp.array([x.shape[1] - 1]))):
        np.testing.assert_allclose(f(long), f(short), rtol=1e-6)
        gradient = jax.grad(lambda x, f=f: f(x).sum())(long)
        np.testing.assert_allclose(gradient[:, kept], jax.grad(lambda x, f=f: f(x).sum())(short), atol=1e-6)
        assert gradient[0, 1] == 0
    assert log_prob(long, jnp.array([1]))[0] == -np.inf


def test_uniform_and_sure_choices():
    x = jnp.array([[0.0, 0.0, 0.0, 0.0], [500.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(entropy(x), [np.log(4), 0.0], atol=1e-6)
    np.testing.assert_allclose(collision(x), [0.25, 1.0], atol=1e-6)


def test_temperature_divides_the_logits():
    x = jnp.array([[1.0, 2.0, 3.0], [0.3, -0.2, 0.0]])
    np.testing.assert_allclose(log_softmax(x, temperature=0.5), jax.nn.log_softmax(2 * x), atol=1e-6)
    np.testing.assert_allclose(entropy(x, temperature=0.5), entropy(2 * x), atol=1e-6)


@pytest.mark.parametrize("f", [entropy, collision, lambda x: log_prob(x, jnp.array(2))])
def test_gradients_by_central_differences(f):
    with jax.enable_x64(True):
        x = jnp.array([0.3, -1.2, 0.8, 2.0])
        gradient = jax.grad(f)(x)
        for i, h in enumerate(1e-6 * np.eye(4)):
            np.testing.assert_allclose(gradient[i], (f(x + h) - f(x - h)) / 2e-6, atol=1e-8)


@pytest.mark.parametrize(("share", "kept"), [(1.0, [3, 1, 0, 5]), (0.5, [0, 5]), (0.2, [5]), (0.0, [5])])
@pytest.mark.parametrize("jit", [False, True])
def test_tokens_of_highest_entropy(share, kept, jit):
    x = jnp.array([1.0, 0.5, np.nan, 0.2, 9.0, 2.0])
    mask = jnp.array([True, True, False, True, False, True])
    f = lambda x, mask: highest(x, mask, share=share)  # noqa: E731
    found = (jax.jit(f) if jit else f)(x, mask)
    np.testing.assert_array_equal(np.flatnonzero(found), sorted(kept))


def test_highest_of_nothing_and_of_equals():
    assert not highest(jnp.ones(3), jnp.zeros(3, bool), share=0.5).any()
    assert highest(jnp.ones(3), jnp.ones(3, bool), share=0.2).all()


def test_a_whole_position_is_not_rounded_up():
    for n in range(2, 300):
        found = highest(jnp.arange(300.0, dtype=jnp.float32), jnp.arange(300) < n, share=0.2)
        assert int(found.sum()) == n - -(-4 * (n - 1) // 5)
