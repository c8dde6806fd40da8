from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from agentrl_jax.config import Optimizer
from agentrl_jax.learner.optimizer import make_optimizer, schedule
from agentrl_jax.models import lora
from agentrl_jax.models.decoder import ModelConfig, init_params


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
    params = {"w": jnp.array([[2.0, -1.0]])}
    update, _ = optimizer.update({"w": jnp.array([[30.0, -40.0]])}, optimizer.init(params), params)
    np.testing.assert_allclose(update["w"], [[-0.1 * (1 + 0.5 * 2.0), -0.1 * (-1 + 0.5 * -1.0)]], rtol=1e-5)


MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=4,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=6,
    tie_embeddings=False,
    attention_bias=True,
)


def ones_of(function, *args):
    """What a function makes, but full of ones."""
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), jax.eval_shape(function, *args))


def shrunk(params):
    """Names of the arrays that an update without a gradient changes."""
    optimizer = make_optimizer(Optimizer(weight_decay=0.5), 10)
    gradient = jax.tree.map(jnp.zeros_like, params)
    change, _ = jax.jit(lambda gradient, params: optimizer.update(gradient, optimizer.init(params), params))(gradient, params)
    leaves = jax.tree_util.tree_leaves_with_path(change)
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, x in leaves if jnp.any(x != 0)}


def test_decay_is_of_matrices_alone():
    params = ones_of(partial(init_params, MODEL), jax.random.key(0))
    assert {"embed.embedding", "unembedding", "norm.scale", "layers_0.attention.q_proj.bias"} < set(flatten_dict(params, sep="."))
    assert shrunk(params) == {f"layers_0.attention.{x}_proj.kernel" for x in "qkvo"} | {
        f"layers_0.mlp.{x}_proj.kernel" for x in ("gate", "up", "down")
    }


def test_of_an_adapter_the_optimizer_holds_and_shrinks_the_factors_alone():
    params = ones_of(partial(init_params, MODEL), jax.random.key(0))
    adapter = jax.tree.map(jnp.ones_like, lora.init(params, jax.random.key(0), rank=1, alpha=1.0, projections=("q_proj",)))
    state = make_optimizer(Optimizer(), 10).init(adapter)
    assert sorted(x.size for x in jax.tree.leaves(state) if x.ndim) == [4, 4, 4, 4]  # two moments of [4, 1] and [1, 4]
    assert shrunk(adapter) == {"a.layers_0.attention.q_proj", "b.layers_0.attention.q_proj"}


def test_gradients_are_cut_to_their_global_norm():
    """Seen in what Adam remembers of the gradient: (1 - b1) g."""
    optimizer = make_optimizer(Optimizer(clip=1.0, b1=0.5), 10)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    for gradient, kept in (([30.0, -40.0], [0.6, -0.8]), ([0.3, -0.4], [0.3, -0.4])):
        _, state = optimizer.update({"a": jnp.array(gradient[:1]), "b": jnp.array(gradient[1:])}, optimizer.init(params), params)
        mean = optax.tree.get(state, "mu")
        np.testing.assert_allclose([mean["a"][0], mean["b"][0]], 0.5 * np.array(kept), rtol=1e-6)
