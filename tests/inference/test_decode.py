"""The jitted functions by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.inference.decode import Rows, decode, grow, prefill, sample
from agentrl_jax.models.decoder import Decoder, Params, init_cache
from tests.inference.conftest import CONFIG, score


def seeds(n: int) -> jax.Array:
    return jnp.stack([jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)], axis=1)


@pytest.mark.parametrize("jit", [True, False])
def test_sample_draws_in_proportion(jit: bool):
    logits, n = jnp.log(jnp.array([0.5, 0.0, 0.3, 0.2])), 20_000
    draw = jax.jit(sample) if jit else sample
    token, logprob = draw(jnp.tile(logits, (n, 1)), seeds(n), jnp.zeros(n, jnp.int32), jnp.ones(n))
    # 4 standard errors of the largest share
    np.testing.assert_allclose(np.bincount(token, minlength=4) / n, [0.5, 0.0, 0.3, 0.2], atol=4 * 0.5 / np.sqrt(n))
    np.testing.assert_allclose(logprob, logits[token], atol=1e-6)


def test_sample_follows_temperature():
    logits = jnp.array([[0.0, 1.0, 2.0]])
    _, greedy = sample(logits, seeds(1), jnp.zeros(1, jnp.int32), jnp.zeros(1))
    np.testing.assert_allclose(greedy, jax.nn.log_softmax(logits)[:, 2])
    n = 20_000
    token, _ = sample(jnp.tile(logits, (n, 1)), seeds(n), jnp.zeros(n, jnp.int32), jnp.full(n, 0.5))
    np.testing.assert_allclose(np.bincount(token) / n, jax.nn.softmax(2 * logits[0]), atol=4 * 0.5 / np.sqrt(n))


def test_sample_depends_on_seed_and_index_alone():
    n = 50
    logits = jnp.zeros((n, 1000))
    token, _ = sample(logits, seeds(n), jnp.arange(n), jnp.ones(n))
    back, _ = sample(logits, seeds(n)[::-1], jnp.arange(n)[::-1], jnp.ones(n))
    np.testing.assert_array_equal(token, back[::-1])
    other, _ = sample(logits, seeds(n), jnp.arange(n) + 1, jnp.ones(n))
    assert np.mean(np.asarray(token) == np.asarray(other)) < 0.1


def test_sample_reports_nan():
    _, logprob = sample(jnp.array([[0.0, jnp.nan], [0.0, 0.0]]), seeds(2), jnp.zeros(2, jnp.int32), jnp.ones(2))
    assert np.isnan(logprob).tolist() == [True, False]


def test_prefill_in_any_chunks_then_decode_is_the_whole_forward(params: Params):
    """Row 2 of 4 gets 30 tokens in chunks of 8 (the last one padded, and reaching past the end of the cache), then decodes."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 30).astype(np.int32)
    decoder, cache = Decoder(CONFIG), init_cache(CONFIG, 4, 20)
    for start in range(0, 29, 8):
        if start == 16:
            cache = grow(cache, length=31)
        chunk = np.zeros((2, 8), np.int32)
        part = tokens[start : min(start + 8, 29)]
        chunk[:, : len(part)] = part
        twice = np.full(2, 2, np.int32)
        cache = prefill(decoder, params, cache, twice, chunk, np.full(2, start, np.int32))
    rows = Rows.idle(4, 1)
    rows.token[2], rows.length[2], rows.active[2], rows.budget[2] = tokens[-1], 29, True, 2
    _, out = decode(decoder, params, cache, rows, steps=5)
    assert out.count.tolist() == [0, 0, 2, 0]
    sampled = np.asarray(out.tokens[2, :2])
    expected = score(params, np.concatenate([tokens, sampled]))[29:31]
    np.testing.assert_array_equal(sampled, expected.argmax(axis=-1))
    np.testing.assert_allclose(out.logprobs[2, :2], expected.max(axis=-1), atol=1e-5)


def test_decode_stops_at_stop_ids_and_budgets_row_by_row(params: Params):
    cache = init_cache(CONFIG, 3, 16)
    rows = Rows.idle(3, 2)
    rows.active[:2], rows.budget[:] = True, (4, 6, 6)
    rows.seed[:, 1] = (1, 2, 3)
    rows.temperature[:] = 1
    _, free = decode(Decoder(CONFIG), params, cache, rows, steps=6)
    assert free.count.tolist() == [4, 6, 0]
    rows.stop[1, 1] = free.tokens[1, 2]
    first = int(np.argmax(np.asarray(free.tokens[1]) == rows.stop[1, 1]))
    _, stopped = decode(Decoder(CONFIG), params, init_cache(CONFIG, 3, 16), rows, steps=6)
    assert stopped.count.tolist() == [4, first + 1, 0]
    np.testing.assert_array_equal(stopped.tokens[1, : first + 1], free.tokens[1, : first + 1])
