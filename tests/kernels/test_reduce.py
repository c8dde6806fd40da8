import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels.reduce import token_weights

# Two episodes with masked losses [1, 3] and [1, 1, 1, 1, 1, 4].
LOSS = jnp.array([[1.0, 9.0, 3.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 9.0]])
MASK = jnp.array([[1, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]], bool)
EPISODE = jnp.array([[0] * 7, [1] * 7], jnp.int32)


@pytest.mark.parametrize(
    ("group", "options", "expected"),
    [
        ([0, 0, 0], {}, 1.625),
        ([0, 0, 0], {"reduction": "episode"}, 1.75),
        ([0, 1, 1], {"reduction": "group"}, 1.75),
        ([0, 0, 0], {"reduction": "group"}, 1.625),
        ([0, 0, 0], {"reduction": "constant", "horizon": 8.0}, 0.8125),
    ],
)
def test_reductions_of_a_worked_example(group, options, expected):
    # The third episode has no token in the loss: it is in no denominator.
    weights = token_weights(MASK, EPISODE, jnp.array(group, jnp.int32), **options)
    np.testing.assert_allclose(jnp.sum(weights * LOSS), expected, atol=1e-6)
    assert (np.asarray(weights)[~np.asarray(MASK)] == 0).all()


@pytest.mark.parametrize("reduction", ["token", "episode", "group"])
def test_rows_and_segments_do_not_matter(reduction):
    group = jnp.array([0, 1], jnp.int32)
    weights = token_weights(MASK, EPISODE, group, reduction=reduction)
    flat = token_weights(MASK.reshape(7, 2), EPISODE.reshape(7, 2), group, reduction=reduction)
    np.testing.assert_allclose(flat.reshape(2, 7), weights)


@pytest.mark.parametrize("options", [{}, {"reduction": "episode"}, {"reduction": "group"}, {"reduction": "constant", "horizon": 8.0}])
def test_nothing_in_the_loss_gives_zero_weights(options):
    assert (np.asarray(token_weights(jnp.zeros_like(MASK), EPISODE, jnp.zeros(3, jnp.int32), **options)) == 0).all()


def test_the_horizon_goes_with_constant_alone():
    for options in ({"horizon": 8.0}, {"reduction": "constant"}):
        with pytest.raises(ValueError, match="horizon"):
            token_weights(MASK, EPISODE, jnp.zeros(3, jnp.int32), **options)
