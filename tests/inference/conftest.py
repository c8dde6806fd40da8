"""Samplers under test, and the model they sample from."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from agentrl_jax.inference.engine import Engine
from agentrl_jax.inference.protocol import Sampler
from agentrl_jax.models.decoder import Decoder, ModelConfig, Params, init_params, unembed

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, tie_embeddings=False
)


def weights(seed: int) -> Params:
    """Random, with logits spread widely enough that an error in the distribution would show."""
    params = init_params(CONFIG, jax.random.key(seed))
    return params | {"unembedding": 15 * params["unembedding"]}


def score(params: Params, tokens: NDArray[np.int32], temperature: float = 1.0) -> NDArray[np.float32]:
    """f32[n - 1, V]: log-probs of the token after each, by the way the trainer computes them."""
    row = jnp.asarray(tokens)[None]
    hidden = Decoder(CONFIG).apply({"params": params}, row, jnp.arange(len(tokens))[None], jnp.ones_like(row))
    return np.asarray(jax.nn.log_softmax(hidden[0] @ unembed(params).T / temperature, axis=-1))


@dataclass
class Subject:
    """A sampler, and the log-probs that its model ought to give: i32[n] and a temperature to f32[n, V]."""

    sampler: Sampler
    score: Callable[..., NDArray[np.float32]]
    vocab_size: int = CONFIG.vocab_size

    def prompt(self, n: int, seed: int = 0) -> NDArray[np.int32]:
        return np.random.default_rng(seed).integers(0, self.vocab_size, n).astype(np.int32)


@pytest.fixture(scope="session")
def params() -> Params:
    return weights(0)


@pytest.fixture
async def engine(params: Params) -> AsyncIterator[Engine]:
    async with Engine(CONFIG, params, context_limit=96, slots=8, version=3, prefill_size=128) as engine:
        yield engine


@pytest.fixture(params=["engine"])
async def subject(request: pytest.FixtureRequest, params: Params) -> AsyncIterator[Subject]:
    async with Engine(CONFIG, params, context_limit=96, slots=8, version=3, prefill_size=128) as engine:
        yield Subject(engine, lambda tokens, temperature=1.0: score(params, tokens, temperature))
