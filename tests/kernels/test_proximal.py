import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.proximal import proximal_log_prob

NEW, BEHAVIOUR = jnp.array([-0.5, -0.5, -0.5, -0.5]), jnp.array([-1.0, -1.0, -1.0, -1.0])
VERSIONS = jnp.array([4, 3, 0, -1], jnp.int32)  # current; the one before; four behind; not sampled


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("interpolation", "expected"),
    [
        ("behaviour", [-1.0, -1.0, -1.0, -1.0]),
        ("log", [-1.0, -1.0, -1.0 + 0.75 * 0.5, -1.0]),
        ("linear", [-1.0, -1.0, np.log(0.25 * np.exp(-1.0) + 0.75 * np.exp(-0.5)), -1.0]),
    ],
)
def test_by_hand(interpolation, expected, jit):
    f = lambda n, b, v: proximal_log_prob(n, b, v, 4, interpolation=interpolation)  # noqa: E731
    np.testing.assert_allclose((jax.jit(f) if jit else f)(NEW, BEHAVIOUR, VERSIONS), expected, atol=1e-6)


@given(st.floats(-30, 0), st.floats(-30, 0), st.integers(-1, 9), st.sampled_from(["log", "linear", "behaviour"]))
def test_between_the_two_policies(new, behaviour, version, interpolation):
    new, behaviour = jnp.array([new], jnp.float32), jnp.array([behaviour], jnp.float32)
    found = proximal_log_prob(new, behaviour, jnp.array([version], jnp.int32), 9, interpolation=interpolation)
    low, high = jnp.minimum(new, behaviour), jnp.maximum(new, behaviour)
    assert (found >= low - 1e-4).all()
    assert (found <= high + 1e-4).all()


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_the_older_a_token_the_closer_to_the_new_policy(new, behaviour):
    versions = jnp.arange(10, dtype=jnp.int32)
    for interpolation in ("log", "linear"):
        found = proximal_log_prob(jnp.full(10, new), jnp.full(10, behaviour), versions, 10, interpolation=interpolation)
        assert (np.diff(np.abs(np.asarray(found) - np.float32(new))) >= -1e-4).all()


def test_a_floor_under_the_linear_mixture():
    far = jnp.array([-60.0])
    found = proximal_log_prob(far, far, jnp.array([0], jnp.int32), 5, interpolation="linear", floor=1e-10)
    np.testing.assert_allclose(found, np.log(1e-10), rtol=1e-6)
    without = proximal_log_prob(far, far, jnp.array([0], jnp.int32), 5, interpolation="linear")
    np.testing.assert_allclose(without, -60.0, rtol=1e-6)


@pytest.mark.parametrize("interpolation", ["log", "linear", "behaviour"])
def test_a_constant(interpolation):
    f = lambda n, b: proximal_log_prob(n, b, VERSIONS, 4, interpolation=interpolation).sum()  # noqa: E731
    for gradient in jax.grad(f, argnums=(0, 1))(NEW, BEHAVIOUR):
        assert (gradient == 0).all()


@pytest.mark.parametrize("interpolation", ["log", "linear", "behaviour"])
def test_the_new_log_prob_of_tokens_that_nobody_sampled_is_not_read(interpolation):
    found = proximal_log_prob(NEW.at[3].set(np.nan), BEHAVIOUR, VERSIONS, 4, interpolation=interpolation)
    assert np.isfinite(found).all()
