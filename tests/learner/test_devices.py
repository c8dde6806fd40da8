"""One update over several devices is the same update."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from agentrl_jax import credit, objective
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.sharding import rows_mesh
from tests.data.strategies import make_episode

MODEL = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32)
EPISODES = [make_episode(f"e{i}", group=f"g{i % 2}", reward=float(i % 3 == 0), turns=1 + i % 3, seed=i) for i in range(6)]


@pytest.mark.parametrize(("devices", "accumulate"), [(2, 1), (4, 1), (2, 2)])
def test_devices_share_the_rows_of_one_update(devices, accumulate):
    """Ragged shares: some devices have only rows of padding."""
    one = Learner(MODEL, optax.sgd(1.0), credit.grpo, objective.ppo)
    many = replace(one, mesh=rows_mesh(devices), accumulate=accumulate)
    params = init_params(MODEL, jax.random.key(0))
    host = collate(EPISODES, row_length=64, row_multiple=8, pack=False)[0]
    found = []
    for learner in (one, many):
        batch, rows = learner.place((host, np.arange(8, dtype=np.int32)))
        state = learner.init(params)
        with jax.transfer_guard("disallow"):
            logprobs = learner.logprobs(state.params, batch.tokens)
            signals = learner.signals(batch)
            found.append((logprobs, *learner.update(state, batch, signals, rows)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "devices"), [("None", min(os.cpu_count() or 1, 4)), ("jax.devices()", 1)])
def test_cores_become_devices_unless_jax_is_in_use(before, devices):
    code = f"import jax; from agentrl_jax.models.sharding import split_cpu; {before}; split_cpu(); print(jax.device_count())"
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == devices
