"""The main run in small: every part of it, in under two minutes on two cores. Too short a warm start to succeed often.

make smoke
"""

from dataclasses import replace

from agentrl_jax.config import Rollout, WarmStart
from experiments import bugfix_grpo

experiment = replace(
    bugfix_grpo.experiment,
    name="bugfix_smoke",
    warmstart=WarmStart(episodes=256, updates=120, rows=8, threshold=0.0, tasks=16),
    rollout=Rollout(groups=4),
    evaluate=replace(bugfix_grpo.experiment.evaluate, every=4, tasks=16, final=16),
    steps=4,
)
