"""Samplers under test, and the model they sample from."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from agentrl_jax.chat import tokenizer
from agentrl_jax.inference.engine import Engine
from agentrl_jax.inference.protocol import Sampler
from agentrl_jax.inference.vllm import VLLM
from agentrl_jax.inference.vllm_server import serve
from agentrl_jax.models.decoder import Decoder, ModelConfig, Params, init_params, unembed
from agentrl_jax.models.policy import Policy

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, tie_embeddings=False
)
# Room for a byte-level tokenizer, and heads of a size that vLLM has kernels for.
SERVED = ModelConfig(
    vocab_size=320, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128, tie_embeddings=False
)
LIMIT, VERSION = 96, 3


def weights(seed: int, config: ModelConfig = CONFIG) -> Params:
    """Random, with logits spread widely enough that an error in the distribution would show."""
    params = init_params(config, jax.random.key(seed))
    return params | {"unembedding": 15 * params["unembedding"]}


LONGEST = 320  # tokens that `score` has room for: one program, whatever their number


def score(params: Params, tokens: NDArray[np.int32], temperature: float = 1.0, config: ModelConfig = CONFIG) -> NDArray[np.float32]:
    """f32[n - 1, V]: log-probs of the token after each, by the way the trainer computes them."""
    row = jnp.asarray(np.pad(tokens, (0, LONGEST - len(tokens))))[None]
    return np.asarray(_score(config, params, row, jnp.int32(len(tokens)), jnp.float32(temperature)))[: len(tokens)]


@partial(jax.jit, static_argnums=0)
def _score(config: ModelConfig, params: Params, row: jax.Array, length: jax.Array, temperature: jax.Array) -> jax.Array:
    positions = jnp.arange(LONGEST, dtype=jnp.int32)[None]
    hidden = jnp.asarray(Decoder(config).apply({"params": params}, row, positions, (positions < length).astype(jnp.int32)))
    return jax.nn.log_softmax(hidden[0] @ unembed(params).T / temperature, axis=-1)


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
    async with Engine(CONFIG, params, context_limit=LIMIT, slots=8, version=VERSION, prefill_size=128) as engine:
        yield engine


@pytest.fixture(scope="session")
def served() -> Params:
    return weights(0, SERVED)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_url(served: Params, vllm_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A real vLLM server of `served`. Tests that use it are marked `real("vllm")`; they leave it as they found it."""
    folder = tmp_path_factory.mktemp("vllm") / "policy"
    Policy(SERVED, served, tokenizer.train(["two words"], SERVED.vocab_size)).write(folder, context_limit=LIMIT)
    async with serve(folder, venv=vllm_venv, version=VERSION) as server:
        yield server.url


@pytest.fixture
def embedded(engine: Engine, params: Params) -> Subject:
    return Subject(engine, lambda tokens, temperature=1.0: score(params, tokens, temperature))


@pytest.fixture
async def over_http(vllm_url: str, served: Params) -> AsyncIterator[Subject]:
    async with VLLM([vllm_url], version=VERSION, concurrency=64) as client:
        yield Subject(client, lambda tokens, temperature=1.0: score(served, tokens, temperature, SERVED), SERVED.vocab_size)


@pytest.fixture(params=["embedded", pytest.param("over_http", marks=[pytest.mark.real("vllm"), pytest.mark.slow])])
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(request.param)
