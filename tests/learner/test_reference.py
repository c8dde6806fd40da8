"""The reference policy stays the one of the start, wherever its weights are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax import credit, objective
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.reference import reference_of
from agentrl_jax.learner.update import Learner
from agentrl_jax.models import lora
from agentrl_jax.models.decoder import ModelConfig, init_params
from tests.data.strategies import make_episode

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
LEARNER = Learner(MODEL, optax.sgd(1.0), credit.grpo, objective.ppo)
EPISODES = [make_episode(f"e{i}", group="g", reward=float(i), turns=2, seed=i) for i in range(2)]


@pytest.mark.parametrize("how", ["held", "offloaded", "base"])
def test_it_is_the_policy_of_the_start_before_and_after_updates(how):
    batch = jax.device_put(collate(EPISODES, row_length=64)[0])
    start = init_params(MODEL, jax.random.key(0))
    expected = np.asarray(LEARNER.logprobs(start, batch.tokens))
    base = LEARNER.place(start) if how == "base" else None
    reference = reference_of(LEARNER, start, "held" if base else how, base)
    state = LEARNER.init(lora.init(start, jax.random.key(1), rank=2, alpha=4.0) if base else start)
    rows = jnp.arange(len(batch.tokens.ids), dtype=jnp.int32)
    with jax.transfer_guard("disallow"):
        before = reference(batch.tokens)
        state, metrics = LEARNER.update(state, batch, LEARNER.signals(batch), rows, base)
        after = reference(batch.tokens)
    assert metrics["update_norm"] > 0
    assert np.abs(LEARNER.logprobs(state.params, batch.tokens, base) - expected).max() > 1e-3
    for found in (before, after):
        np.testing.assert_array_equal(found, expected)


def test_none_is_made_where_none_is_asked_for():
    assert reference_of(LEARNER, init_params(MODEL, jax.random.key(0)), "none") is None
