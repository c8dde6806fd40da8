"""Two ways through the same weights, and packed rows against padded ones."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models.decoder import Decoder, ModelConfig, init_cache, init_params, unembed

QWEN3 = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48)
QWEN2 = replace(QWEN3, qk_norm=False, attention_bias=True)
LENGTH = 24


def params_of(config):
    params = init_params(config, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def forward(config, tokens, positions, segments):
    return jax.jit(Decoder(config).apply)({"params": params_of(config)}, tokens, positions, segments)


def whole_rows(config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(config, tokens, positions, jnp.ones_like(tokens))


def some_tokens(rows=3):
    return jax.random.randint(jax.random.key(1), (rows, LENGTH), 0, 64)


@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_a_prefill_in_chunks_is_the_whole_row(config):
    tokens, model, params = some_tokens(), Decoder(config), params_of(config)
    extend = jax.jit(lambda *inputs: model.apply({"params": params}, *inputs, method=model.extend))
    cache, parts = init_cache(config, len(tokens), LENGTH), []
    for begin, end in ((0, 7), (7, 8), (8, LENGTH)):
        hidden, cache = extend(tokens[:, begin:end], jnp.full(len(tokens), begin, jnp.int32), cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole_rows(config, tokens), atol=1e-5)


def test_rows_of_a_cache_are_at_different_places():
    """Each row continues at its own position; what lies behind it in the cache does not matter."""
    tokens, model, params = some_tokens(), Decoder(QWEN3), params_of(QWEN3)
    start = jnp.array([3, 9, 15], jnp.int32)
    apply = jax.jit(lambda *inputs: model.apply({"params": params}, *inputs, method=model.extend))
    _, cache = apply(tokens, jnp.zeros(3, jnp.int32), init_cache(QWEN3, 3, LENGTH))
    chunk = jnp.take_along_axis(tokens, start[:, None] + jnp.arange(4, dtype=jnp.int32)[None], axis=1)
    hidden, _ = apply(chunk, start, cache)
    expected = whole_rows(QWEN3, tokens)
    for row, begin in enumerate(start):
        np.testing.assert_allclose(hidden[row], expected[row, begin : begin + 4], atol=1e-5)


@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_packed_rows_are_padded_ones(config):
    tokens = some_tokens()
    lengths = (9, 5, 7)
    padded = whole_rows(config, tokens)
    ids, positions, segments = (np.zeros((1, LENGTH), np.int32) for _ in range(3))
    begin = 0
    for i, n in enumerate(lengths):
        ids[0, begin : begin + n], positions[0, begin : begin + n] = tokens[i, :n], np.arange(n)
        segments[0, begin : begin + n] = i + 1
        begin += n
    packed = forward(config, ids, positions, segments)
    expected = jnp.concatenate([padded[i, :n] for i, n in enumerate(lengths)])
    np.testing.assert_allclose(packed[0, :begin], expected, atol=1e-5)
    changed = forward(config, np.where(segments == 2, 1, ids), positions, segments)
    others = (segments != 2)[0]
    np.testing.assert_array_equal(changed[0, others], packed[0, others])


def test_a_later_token_changes_nothing_before_it():
    tokens = some_tokens(1)
    changed = tokens.at[0, 10].set((tokens[0, 10] + 1) % 64)
    before, after = whole_rows(QWEN3, tokens), whole_rows(QWEN3, changed)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert not np.allclose(before[:, 10:], after[:, 10:])


def test_untied_embeddings_are_a_matrix_of_their_own():
    tied, untied = params_of(QWEN3), params_of(replace(QWEN3, tie_embeddings=False))
    assert unembed(tied) is tied["embed"]["embedding"]
    assert unembed(untied) is untied["unembedding"]
    assert unembed(untied).shape == (64, 32)
