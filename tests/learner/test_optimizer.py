import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax.config import Optimizer
from agentrl_jax.learner.optimizer import make_optimizer, schedule


@pytest.mark.parametrize(
    ("settings", "updates", "at", "expected"),
    [
        (Optimizer(learning_rate=1.0, decay="constant"), 10, [0, 5, 10, 20], [1, 1, 1, 1]),
        (Optimizer(learning_rate=1.0, decay="linear"), 10, [0, 5, 10, 20], [1, 0.5, 0, 0]),
        (Optimizer(learning_rate=1.0, decay="cosine"), 10, [0, 5, 10, 20], [1, 0.5, 0, 0]),
        (Optimizer(learning_rate=1.0, decay="linear", warmup=4), 8, [0, 2, 4, 6, 8], [0, 0.5, 1, 0.5, 0]),
        (Optimizer(learning_rate=1.0, decay="constant", warmup=4), 8, [0, 1, 4, 8], [0, 0.25, 1, 1]),
        (Optimizer(learning_rate=1.0, decay="linear", warmup=4), 2, [0, 2, 4, 5], [0, 0.5, 1, 0]),
    ],
)
def test_the_rate_of_every_update(settings, updates, at, expected):
    rate = schedule(settings, updates)
    np.testing.assert_allclose([rate(jnp.int32(update)) for update in at], expected, atol=1e-7)


def test_one_step_of_adamw_by_hand():
    """First step: m / sqrt(v) is the sign of the gradient, whatever it was cut to; decay is of the weights, outside of it."""
    settings = Optimizer(learning_rate=0.1, decay="constant", weight_decay=0.5, clip=1.0, eps=1e-12)
    optimizer = make_optimizer(settings, 10)
    params = {"w": jnp.array([2.0, -1.0])}
    update, _ = optimizer.update({"w": jnp.array([30.0, -40.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(update["w"], [-0.1 * (1 + 0.5 * 2.0), -0.1 * (-1 + 0.5 * -1.0)], rtol=1e-5)


def test_gradients_are_cut_to_their_global_norm():
    """Seen in what Adam remembers of the gradient: (1 - b1) g."""
    optimizer = make_optimizer(Optimizer(clip=1.0, b1=0.5), 10)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    for gradient, kept in (([30.0, -40.0], [0.6, -0.8]), ([0.3, -0.4], [0.3, -0.4])):
        _, state = optimizer.update({"a": jnp.array(gradient[:1]), "b": jnp.array(gradient[1:])}, optimizer.init(params), params)
        mean = optax.tree.get(state, "mu")
        np.testing.assert_allclose([mean["a"][0], mean["b"][0]], 0.5 * np.array(kept), rtol=1e-6)
