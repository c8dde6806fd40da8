from functools import partial

from agentrl_jax import credit, objective
from agentrl_jax.config import Experiment, Optimizer
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.expert import expert

experiment = Experiment(
    name="bugfix_grpo",
    environment=BugFix(level=0),
    expert=expert,
    advantage=credit.grpo,
    loss=partial(objective.ppo, clip_low=0.2, clip_high=0.2, kl=0.02),
    reference=True,
    optimizer=Optimizer(learning_rate=5e-4),
    steps=40,
)
