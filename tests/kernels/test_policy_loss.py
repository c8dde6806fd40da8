import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels.kl import kl
from agentrl_jax.kernels.policy_loss import clipped, masked_log_ratio, ppo_clip

RATIOS = np.array([0.5, 0.9, 1.0, 1.1, 1.5, 4.0], np.float32)


@pytest.mark.parametrize(
    ("advantage", "clip_high", "loss", "gradient"),
    [
        (1.0, 0.2, [-0.5, -0.9, -1, -1.1, -1.2, -1.2], [-0.5, -0.9, -1, -1.1, 0, 0]),
        (-1.0, 0.2, [0.8, 0.9, 1, 1.1, 1.5, 4], [0, 0.9, 1, 1.1, 1.5, 4]),
        (1.0, 0.28, [-0.5, -0.9, -1, -1.1, -1.28, -1.28], [-0.5, -0.9, -1, -1.1, 0, 0]),
    ],
)
def test_ppo_clip_on_a_grid_of_ratios(advantage, clip_high, loss, gradient):
    a = jnp.full(6, advantage)
    f = lambda x: ppo_clip(x, a, clip_high=clip_high)  # noqa: E731
    x = jnp.log(RATIOS)
    np.testing.assert_allclose(f(x), loss, atol=1e-5)
    g = jax.grad(lambda x: f(x).sum())(x)
    np.testing.assert_allclose(g, gradient, atol=1e-5)
    np.testing.assert_array_equal(clipped(x, a, clip_high=clip_high), np.array(gradient) == 0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_under_the_mask_reaches_value_or_gradient(poison):
    mask = jnp.array([True, False, True])

    def loss(new):
        log_ratio = masked_log_ratio(new, jnp.array([-1.0, poison, -2.0]), mask)
        return jnp.where(mask, ppo_clip(log_ratio, jnp.array([1.0, 0.0, -1.0])) + kl(log_ratio, estimator="k3"), 0.0).sum()

    clean = jnp.array([-0.9, -5.0, -2.3])
    value, gradient = jax.value_and_grad(loss)(clean.at[1].set(poison))
    assert np.isfinite(value)
    assert gradient[1] == 0
    assert np.isfinite(gradient).all()


def test_kl_values_and_gradients():
    d = jnp.array(0.5)
    expected = {"k1": (0.5, 1.0), "k2": (0.125, 0.5), "k3": (0.106531, 0.393469)}
    for name, (value, gradient) in expected.items():
        np.testing.assert_allclose(kl(d, estimator=name), value, atol=1e-6)
        np.testing.assert_allclose(jax.grad(lambda d, n=name: kl(d, estimator=n))(d), gradient, atol=1e-6)


def test_only_k2_has_the_gradient_of_the_reverse_kl():
    logits, reference = jnp.array([0.3, -0.4, 0.9]), jax.nn.log_softmax(jnp.array([1.0, 0.0, 0.2]))

    def exact(x):
        p = jax.nn.log_softmax(x)
        return jnp.sum(jnp.exp(p) * (p - reference))

    def expected_gradient(estimator):
        p = jax.lax.stop_gradient(jnp.exp(jax.nn.log_softmax(logits)))
        return jax.grad(lambda x: jnp.sum(p * kl(jax.nn.log_softmax(x) - reference, estimator=estimator)))(logits)

    np.testing.assert_allclose(expected_gradient("k2"), jax.grad(exact)(logits), atol=1e-6)
    np.testing.assert_allclose(expected_gradient("k1"), 0, atol=1e-6)


def test_an_unknown_estimator_is_named():
    with pytest.raises((ValueError, TypeError), match="k4"):
        kl(jnp.zeros(1), estimator="k4")
