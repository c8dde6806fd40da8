"""Ways to compute one decoder: bfloat16 is float32 to rounding, and layers computed again change nothing but memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models.decoder import Compute, Decoder, ModelConfig, init_cache, init_params

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48)
T = 24


def apart(one, other):
    """Norm of the difference, as a share of that of `other`."""
    return jnp.linalg.norm(one.astype(jnp.float32) - other) / jnp.linalg.norm(other)


def hidden_and_gradient(compute, config=CONFIG, rows=2):
    params = init_params(config, jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (rows, T), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), ids.shape)
    direction = jax.random.normal(jax.random.key(2), (rows, T, config.hidden_size))

    def loss(params):
        hidden = Decoder(config, compute).apply({"params": params}, ids, positions, jnp.ones_like(ids))
        return jnp.mean(hidden.astype(jnp.float32) * direction), hidden

    return jax.jit(jax.grad(loss, has_aux=True)).lower(params), params


def test_layers_computed_again_give_the_same_gradient():
    plain, again = (hidden_and_gradient(Compute(remat=remat)) for remat in (False, True))
    (one, hidden), (other, same) = (lowered.compile()(params) for lowered, params in (plain, again))
    np.testing.assert_allclose(hidden, same, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, other)


def test_layers_computed_again_take_less_memory():
    """In the schedule that XLA makes for memory: the CPU's default one, made for concurrency, runs early what is computed again."""
    deep = replace(CONFIG, num_layers=4)
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    whole, again = (
        hidden_and_gradient(Compute(remat=remat), deep, rows=64)[0].compile(compiler_options=options).memory_analysis().temp_size_in_bytes
        for remat in (False, True)
    )
    assert 1.5 * again < whole


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, qk_norm=False, attention_bias=True)], ids=["qwen3", "qwen2"])
def test_bfloat16_is_float32_to_rounding(config):
    """Hidden states to 2 % of their norm and gradients to 4 % of that of their array; parameters and gradients stay f32."""
    wide, narrow = (hidden_and_gradient(Compute(dtype), config) for dtype in ("float32", "bfloat16"))
    (gradient, hidden), (rounded, near) = (lowered.compile()(params) for lowered, params in (wide, narrow))
    assert near.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((narrow[1], rounded)))
    assert apart(near, hidden) < 0.02
    jax.tree.map(lambda a, b: np.testing.assert_array_less(apart(a, b), 0.04), rounded, gradient)


def test_bfloat16_appends_to_a_cache():
    _, params = hidden_and_gradient(Compute())
    ids = jax.random.randint(jax.random.key(1), (2, T), 0, 64)
    outs = []
    for dtype in ("float32", "bfloat16"):
        model = Decoder(CONFIG, Compute(dtype))
        hidden, _ = model.apply({"params": params}, ids, jnp.zeros(2, jnp.int32), init_cache(CONFIG, 2, T), method=model.extend)
        outs.append(hidden.astype(jnp.float32))
    np.testing.assert_allclose(outs[1], outs[0], atol=0.05)
