"""The main run with a critic: GAE instead of group-relative advantages.

make train EXP=experiments/bugfix_ppo.py
"""

from dataclasses import replace
from functools import partial

from agentrl_jax import credit
from agentrl_jax.config import Critic
from experiments import bugfix_grpo

experiment = replace(
    bugfix_grpo.experiment,
    name="bugfix_ppo",
    advantage=partial(credit.gae, gamma=1.0, lam=0.95, normalise=True),
    critic=Critic(learning_rate=1e-3, warmup=8),
)
