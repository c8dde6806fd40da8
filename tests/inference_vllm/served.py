"""A small policy in a Hugging Face folder, and what our own forward says of it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat import tokenizer
from agentrl_jax.models.decoder import Decoder, ModelConfig, Params, init_params, unembed
from agentrl_jax.models.policy import Policy

# vLLM's attention on CPUs wants heads of 32, 64, ... and its matrices sizes of 32.
CONFIG = ModelConfig(vocab_size=640, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256)


def weights(config: ModelConfig, seed: int) -> Params:
    """Random, with logits spread widely enough that no other weights could pass for these."""
    params = init_params(config, jax.random.key(seed))
    name = "embed" if config.tie_embeddings else "unembedding"
    return params | {name: jax.tree.map(lambda x: 3 * x, params[name])}


def write(folder: Path, config: ModelConfig, params: Params) -> Path:
    Policy(config, params, tokenizer.train(["two words"], 300)).write(folder, context_limit=1024)
    return folder


def score(config: ModelConfig, params: Params, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """f32[n - 1]: log-prob of each token after the first, by the trainer's forward."""
    row = jnp.asarray(tokens)[None]
    hidden = Decoder(config).apply({"params": params}, row, jnp.arange(len(tokens))[None], jnp.ones_like(row))
    logits = hidden[0, :-1] @ unembed(params).T
    return np.asarray(jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), row[0, 1:, None], axis=-1)[:, 0])
