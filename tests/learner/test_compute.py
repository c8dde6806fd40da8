"""A learner that computes in bfloat16, or its layers again, makes the update of one that does neither."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentrl_jax import credit, objective
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.update import Learner
from agentrl_jax.models import lora
from agentrl_jax.models.decoder import Compute, ModelConfig, init_params
from tests.data.strategies import make_episode

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
LEARNER = Learner(MODEL, optax.sgd(1.0, momentum=0.9), credit.grpo, objective.ppo)
EPISODES = [make_episode(f"e{i}", group=f"g{i % 2}", reward=float(i > 1), turns=2, seed=i) for i in range(4)]


@cache
def weights():
    return init_params(MODEL, jax.random.key(0))


def batch():
    return jax.device_put(collate(EPISODES, row_length=64)[0])


def update(compute, trained=None, base=None):
    """Log-probs before, and state and metrics after."""
    learner, found = replace(LEARNER, compute=compute), batch()
    state = learner.init(weights() if trained is None else trained)
    rows = jnp.arange(len(found.tokens.ids), dtype=jnp.int32)
    return learner.logprobs(state.params, found.tokens, base), *learner.update(state, found, learner.signals(found), rows, base)


def test_in_bfloat16():
    """Log-probs to 0.05 nats, the gradient's norm to 2 %; weights and momentum are f32, and so are log-probs."""
    (wide, _, expected), (narrow, state, metrics) = update(Compute()), update(Compute("bfloat16"))
    assert narrow.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))
    assert 0 < np.abs(narrow - wide).max() < 0.05
    np.testing.assert_allclose(metrics["gradient_norm"], expected["gradient_norm"], rtol=0.02)


def test_an_adapter_with_layers_computed_again():
    trained = lora.init(weights(), jax.random.key(1), rank=2, alpha=4.0)
    (_, one, metrics), (_, other, expected) = (update(Compute(remat=remat), trained, weights()) for remat in (True, False))
    assert metrics["gradient_norm"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), (one, metrics), (other, expected))
