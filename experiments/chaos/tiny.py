"""The smallest experiment that goes through everything: real boxes, the real engine, a model that was hardly taught anything.

It never succeeds, so its credit does not come from the reward: each step changes the weights, and a run that resumed wrongly would show.
"""

import jax.numpy as jnp

from agentrl_jax import objective
from agentrl_jax.config import Evaluate, Experiment, Optimizer, Rollout, WarmStart
from agentrl_jax.credit import Credit, Estimates, on_tokens
from agentrl_jax.data.batch import Batch
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.expert import expert
from agentrl_jax.models.decoder import ModelConfig


def by_number(batch: Batch, estimates: Estimates) -> Credit:
    """Credit that differs between episodes whatever they earned."""
    return Credit(on_tokens(batch, jnp.cos(jnp.arange(len(batch.episodes.reward), dtype=jnp.float32))))


experiment = Experiment(
    name="tiny",
    environment=BugFix(level=0),
    expert=expert,
    advantage=by_number,
    loss=objective.ppo,
    steps=5,
    row_length=256,
    model=ModelConfig(vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64),
    warmstart=WarmStart(episodes=4, updates=4, rows=2, warmup=0, threshold=0.0, rounds=1, tasks=2),
    rollout=Rollout(groups=2, group_size=2, turns=3, turn_tokens=12, episode_tokens=36, context=256, slots=4),
    optimizer=Optimizer(learning_rate=3e-3, minibatches=2),
    evaluate=Evaluate(every=2, tasks=2, final=1, splits=("held_out", "held_out_functions")),
    checkpoint_every=2,
)
