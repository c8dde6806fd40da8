import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.value_loss import value_clipped, value_loss

ON = jnp.array([True])
numbers = st.lists(st.floats(-5, 5), min_size=4, max_size=4).map(lambda x: jnp.array(x, jnp.float32))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("scale", "loss"), [(0.5, 0.045), (1.0, 0.09)])
def test_10d_a_value_past_the_interval_has_no_gradient(scale, loss, jit):
    f = lambda v: value_loss(v, jnp.array([1.0]), ON, old=jnp.array([0.5]), clip=0.2, scale=scale)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(jax.jit(f) if jit else f)(jnp.array([0.9]))
    np.testing.assert_allclose(value, loss, atol=1e-6)
    assert gradient[0] == 0
    assert value_clipped(jnp.array([0.9]), jnp.array([1.0]), ON, old=jnp.array([0.5]), clip=0.2)[0]


def test_a_value_that_left_the_interval_away_from_its_target_is_pulled_back():
    f = lambda v: value_loss(v, jnp.array([0.0]), ON, old=jnp.array([0.5]), clip=0.2)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(f)(jnp.array([0.9]))
    np.testing.assert_allclose((value, gradient[0]), (0.405, 0.9), rtol=1e-6)


@given(numbers, numbers, numbers)
def test_a_wide_interval_does_not_clip(value, target, old):
    mask = jnp.ones(4, bool)
    np.testing.assert_allclose(value_loss(value, target, mask, old=old, clip=20.0), value_loss(value, target, mask))
    np.testing.assert_allclose(value_loss(value, target, mask), 0.5 * np.square(value - target), rtol=1e-6)
    assert not value_clipped(value, target, mask, old=old, clip=20.0).any()
    gradient = jax.grad(lambda v: value_loss(v, target, mask, old=old, clip=20.0).sum())(value)
    np.testing.assert_allclose(gradient, value - target, atol=1e-6)


@given(numbers, numbers, numbers)
def test_clipping_never_makes_the_loss_smaller(value, target, old):
    mask = jnp.ones(4, bool)
    assert (value_loss(value, target, mask, old=old, clip=0.2) >= value_loss(value, target, mask)).all()


@pytest.mark.parametrize(("x", "loss", "gradient"), [(0.4, 0.08, 0.4), (1.0, 0.5, 1.0), (-3.0, 2.5, -1.0), (3.0, 2.5, 1.0)])
def test_huber_is_linear_far_away(x, loss, gradient):
    f = lambda v: value_loss(v, jnp.zeros(1), ON, huber=1.0)[0]  # noqa: E731
    found = jax.value_and_grad(f)(jnp.array([x]))
    np.testing.assert_allclose((found[0], found[1][0]), (loss, gradient), rtol=1e-6)


@pytest.mark.parametrize("huber", [None, 1.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_under_the_mask_reaches_value_or_gradient(huber, poison):
    mask = jnp.array([True, False, True])
    clean = jnp.array([0.9, 0.0, -2.0]), jnp.array([1.0, 0.0, 1.0]), jnp.array([0.5, 0.0, 0.0])

    def loss(value, target, old):
        return value_loss(value, target, mask, old=old, clip=0.2, huber=huber).sum()

    poisoned = [x.at[1].set(poison) for x in clean]
    wanted, found = jax.value_and_grad(loss)(*clean), jax.value_and_grad(loss)(*poisoned)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])


def test_targets_and_old_values_are_constants():
    f = lambda target, old: value_loss(jnp.array([0.9]), target, ON, old=old, clip=0.2)[0]  # noqa: E731
    for gradient in jax.grad(f, argnums=(0, 1))(jnp.array([1.0]), jnp.array([0.5])):
        assert gradient[0] == 0


@pytest.mark.parametrize("options", [{}, {"huber": 1.0}, {"clip": 0.3}, {"clip": 0.3, "huber": 0.5}])
def test_gradients_by_central_differences(options):
    with jax.enable_x64(True):
        target, old = jnp.array([1.0, -1.0, 0.2, 3.0]), jnp.array([0.5, 0.0, 0.1, 0.7])
        old_if_clipped = {"old": old} if "clip" in options else {}
        f = lambda v: value_loss(v, target, jnp.ones(4, bool), **old_if_clipped, **options).sum()  # noqa: E731
        x = jnp.array([0.9, 0.1, 0.35, 0.6])
        gradient = jax.grad(f)(x)
        for i, h in enumerate(1e-6 * np.eye(4)):
            np.testing.assert_allclose(gradient[i], (f(x + h) - f(x - h)) / 2e-6, atol=1e-8)


def test_clip_and_old_go_together():
    with pytest.raises(ValueError, match="needs"):
        value_loss(jnp.zeros(1), jnp.zeros(1), ON, clip=0.2)
