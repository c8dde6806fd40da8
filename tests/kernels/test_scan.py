"""The recurrence in blocks, as on CPUs, and in logarithmic depth, as elsewhere, against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels import scan

T = 5 * scan.BLOCK + 3


def loop(x, decay):
    found, later = np.zeros_like(x), np.zeros(x.shape[:-1], x.dtype)
    for t in reversed(range(x.shape[-1])):
        later = found[..., t] = x[..., t] + decay[..., t] * later
    return found


@pytest.mark.parametrize("shape", [(T,), (2, T), (2, 2, T)], ids=str)
@pytest.mark.parametrize("way", [scan._blocked, scan._logarithmic])
def test_every_way_gives_what_a_loop_gives(shape, way):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    decay = rng.choice([0.0, 0.9, 1.0], shape, p=[0.01, 0.2, 0.79]).astype(np.float32)
    np.testing.assert_allclose(jax.jit(way)(jnp.asarray(x), jnp.asarray(decay)), loop(x, decay), rtol=1e-5, atol=1e-4)


def test_gradient_in_blocks_is_that_in_logarithmic_depth():
    rng = np.random.default_rng(1)
    x, decay, weight = (jnp.asarray(rng.random(T), jnp.float32) for _ in range(3))

    def gradient(way):
        return jax.jit(jax.grad(lambda x, decay: jnp.sum(way(x, decay) * weight), (0, 1)))(x, decay)

    for blocked, logarithmic in zip(gradient(scan._blocked), gradient(scan._logarithmic), strict=True):
        np.testing.assert_allclose(blocked, logarithmic, rtol=1e-4, atol=1e-4)
