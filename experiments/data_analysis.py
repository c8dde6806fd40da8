"""Learn to answer questions about tables by code that is run, from episodes of which half overlook something.

    make train EXP=experiments/data_analysis.py

The expert takes the right way or the one with a slip; which of them pays is what reinforcement learning is left to find out. A policy from
nothing could at best get to know the kinds of questions of level 0, not Python. After 150 updates on 600 of the expert's episodes it
answered 4 of 48 questions; a whole run has not been measured. For more, name a model that can write Python, `policy="..."`, and let its
boxes have packages, `sandbox=partial(Bubblewrap, packages=("numpy", "pandas"))`.
"""

from collections.abc import Generator
from functools import partial
from random import Random

from agentrl_jax import credit, objective
from agentrl_jax.config import Evaluate, Experiment, Optimizer, Rollout
from agentrl_jax.envs.data_analysis import DataAnalysis
from agentrl_jax.envs.protocol import Call, Observation, Task

RIGHT = 0.5  # how often the expert overlooks nothing


def expert(environment: DataAnalysis, task: Task, rng: Random) -> Generator[Call, Observation, None]:
    """The right way, or the one with a slip."""
    calls = environment.gold(task) if rng.random() < RIGHT else environment.wrong(task)
    for call in calls:  # noqa: UP028 - `yield from` a list cannot be sent to
        yield call


experiment = Experiment(
    name="data_analysis",
    environment=DataAnalysis(level=0),
    expert=expert,
    advantage=credit.grpo,
    loss=partial(objective.ppo, clip_low=0.2, clip_high=0.2, kl=0.02),
    reference="held",
    optimizer=Optimizer(learning_rate=5e-4),
    rollout=Rollout(turns=6, turn_tokens=160, episode_tokens=320),
    evaluate=Evaluate(every=10, final=100),
    steps=40,
)
