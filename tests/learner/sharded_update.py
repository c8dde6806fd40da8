"""`python -m tests.learner.sharded_update FILE [KIND:]DATAxFSDPxTENSORxSEQUENCE[xPIECES]...`: updates on meshes.

KIND: "lora" for updates of an adapter. Devices are as the environment says: XLA_FLAGS.
"""

import sys
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
import optax

from agentrl_jax import credit, objective
from agentrl_jax.config import Mesh
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.update import Learner
from agentrl_jax.models import lora
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.sharding import make_mesh, rows_mesh
from tests.data.strategies import make_episode

MODEL = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=4, intermediate_size=32)
EPISODES = [make_episode(f"e{i}", group=f"g{i % 2}", reward=float(i % 3 == 0), turns=1 + i % 3, seed=i) for i in range(14)]


def updates(mesh: jax.sharding.Mesh, accumulate: int, *, adapter: bool) -> tuple[dict[str, Any], int]:
    """State, metrics and log-probs after two updates, and the programs that were compiled for them."""
    # Plain descent: the weights move by their gradient, and rounding is not blown up by a division.
    learner = Learner(MODEL, optax.sgd(0.1, momentum=0.9), credit.grpo, objective.ppo, accumulate=accumulate, mesh=mesh)
    host = collate(EPISODES, row_length=64, row_multiple=16, pack=False)[0]
    batch, rows = learner.place((host, np.arange(16, dtype=np.int32)[::-1]))
    params = init_params(MODEL, jax.random.key(0))
    base = learner.place(params) if adapter else None
    state = learner.init(lora.init(params, jax.random.key(1), rank=2, alpha=4.0) if adapter else params)
    before, metrics, kept = programs(), {}, [jax.tree.map(lambda x: x.sharding, state)]
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            proximal = learner.logprobs(state.params, batch.tokens, base)
            old, (state, metrics) = state, learner.update(state, batch, learner.signals(batch, proximal), rows, base)
            assert all(x.is_deleted() for x in jax.tree.leaves(old)), "buffers of the old state were not donated"
            kept.append(jax.tree.map(lambda x: x.sharding, state))
    assert kept[0] == kept[1] == kept[2], "an update laid the state out in another way"
    found = {"state": state, "metrics": metrics, "logprobs": learner.logprobs(state.params, batch.tokens, base)}
    return found, programs() - before


def programs() -> int:
    return sum(method._cache_size() for method in (Learner.logprobs, Learner.signals, Learner.update))


def main() -> None:
    file, *shapes = sys.argv[1:]
    found: dict[str, Any] = {}
    for shape in shapes:
        kind, _, sizes = shape.rpartition(":")
        *axes, pieces = map(int, f"{sizes}x1".split("x")[:5])
        asked = Mesh(*axes)
        mesh = rows_mesh(1) if asked == Mesh(1) else make_mesh(**asdict(asked))
        results, compiled = updates(mesh, pieces, adapter=kind == "lora")
        leaves = jax.tree_util.tree_leaves_with_path(results)
        found |= {f"{shape}/{jax.tree_util.keystr(path)}": np.asarray(x) for path, x in leaves} | {f"{shape}/programs": np.array(compiled)}
    np.savez(file, **found)


if __name__ == "__main__":
    main()
