"""Values of states: read off the right hidden state, the same wherever a segment lies."""

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax import credit
from agentrl_jax.data.collate import Shape, collate, unpack
from agentrl_jax.models.decoder import Decoder, ModelConfig, init_params
from agentrl_jax.models.heads import init_value_head, values_at_end, values_before, values_behind
from tests.data.strategies import make_episode

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
EPISODES = [
    make_episode("a", turns=3, seed=1),
    make_episode("b", turns=4, segments=2, seed=2),
    make_episode("c", turns=1, prompt=9, action=5, seed=3),
    make_episode("d", turns=2, observation=7, seed=4),
]
ROWS = 6
HEAD = {"kernel": jax.random.normal(jax.random.key(1), (32,)), "bias": jnp.float32(0.25)}


@jax.jit
def behind_of(params, ids, position, segment):
    return values_behind(HEAD, Decoder(MODEL).apply({"params": params}, ids, position, segment))


def valued(params, batch):
    """Values before all tokens, and where the episodes were left."""
    tokens = batch.tokens
    behind = behind_of(params, tokens.ids, tokens.position, tokens.segment)
    last = tokens.mask & (tokens.action == credit.actions(batch)[tokens.episode] - 1)
    end = values_at_end(behind, tokens.segment, tokens.episode, last, episodes=len(batch.episodes.group))
    return values_before(behind, tokens.position), end


def test_a_new_head_says_0_of_everything_in_float32():
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 8)).astype(jnp.bfloat16)
    values = values_behind(init_value_head(8), hidden)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, np.zeros((2, 3)))


def test_values_are_summed_in_float32_whatever_the_decoder_computes_in():
    hidden = jnp.full((1, 1, 512), 1.0, jnp.bfloat16)
    head = {"kernel": jnp.full(512, 1.0 + 2.0**-12), "bias": jnp.float32(-512.0)}
    np.testing.assert_allclose(values_behind(head, hidden), [[512 * 2.0**-12]], rtol=1e-3)


def test_they_are_those_of_the_state_before_each_token_wherever_it_lies():
    """Against each segment alone, token by token: what the prefix before a token is worth; packed, and one segment a row."""
    params = init_params(MODEL, jax.random.key(0))
    packed, padded = (collate(EPISODES, row_length=64, pack=pack, at_least=Shape(rows=ROWS)) for pack in (True, False))
    assert packed[1].row.max() < padded[1].row.max()
    for host, packing in (packed, padded):
        values, end = valued(params, jax.device_put(host))
        for episode, segments, left in zip(EPISODES, unpack(np.asarray(values), packing), end, strict=False):
            for segment, found in zip(episode.segments, segments, strict=True):
                alone = behind_of(params, *_line(segment.tokens))[0, : len(segment)]
                np.testing.assert_allclose(found, np.concatenate([[0.0], alone[:-1]]), atol=1e-4)
            np.testing.assert_allclose(left, alone[-1], atol=1e-4)


def _line(ids):
    """A segment in the first of so many rows as all layouts have here."""
    n = len(ids)
    row = jnp.pad(jnp.stack([jnp.asarray(ids), jnp.arange(n), jnp.ones(n, jnp.int32)]), ((0, 0), (0, 64 - n)))
    return jnp.broadcast_to(row[:, None], (3, ROWS, 64))


def test_an_episode_is_left_behind_the_tool_output_that_follows_its_last_action():
    behind = jnp.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.0], [0.6, 0.7, 0.8, 0.9, 1.0, 1.1]])
    segment = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    episode = jnp.array([[0, 0, 0, 1, 1, 0], [2, 2, 2, 2, 2, 2]])
    last = jnp.array([[0, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]], bool)
    for function in (values_at_end, jax.jit(values_at_end, static_argnames="episodes")):
        np.testing.assert_allclose(function(behind, segment, episode, last, episodes=4), [0.3, 0.5, 1.1, 0.0])


def test_a_token_that_begins_a_segment_has_no_state_before_it():
    np.testing.assert_allclose(values_before(jnp.array([[0.1, 0.2, 0.3, 0.4]]), jnp.array([[0, 1, 0, 1]])), [[0.0, 0.1, 0.0, 0.3]])
