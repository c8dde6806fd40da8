"""Teach a policy to search before it answers: questions about the standard library, some of which take several searches.

    make train EXP=experiments/search_qa.py ARGS="policy=path/of/a/model"

What a search shows takes some 400 tokens of a vocabulary of 512, so the small model of the main run has nowhere near the context it would
need: bring a pretrained model, and vLLM to serve it. One step was run, with the small model on two CPU cores, to see
that all parts go together; no score is claimed.
"""

from collections.abc import Generator
from functools import partial
from random import Random

from agentrl_jax import credit, objective
from agentrl_jax.config import Experiment, Optimizer, Rollout
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.envs.search_qa import SearchQA
from agentrl_jax.inference.served import Served

RIGHT = 0.6  # how often the expert answers rightly
READ = 0.5  # how often it reads what came first


def expert(environment: SearchQA, task: Task, rng: Random) -> Generator[Call, Observation, None]:
    """Searches as the key does, reads at times what it found, and is wrong now and then."""
    *searches, answer = (environment.gold if rng.random() < RIGHT else environment.wrong)(task)
    for search in searches:
        observation = yield search
        title = observation.text.removeprefix("[").partition("]")[0]
        if rng.random() < READ:
            yield "read", {"title": title}
    yield answer


experiment = Experiment(
    name="search_qa",
    environment=SearchQA(),
    expert=expert,
    advantage=partial(credit.gigpo, omega=1.0),
    loss=partial(objective.ppo, clip_low=0.2, clip_high=0.2, kl=0.001),
    reference="held",
    rollout=Rollout(turns=8, turn_tokens=256, episode_tokens=1024, context=4096),
    row_length=4096,
    inference=Served,
    optimizer=Optimizer(learning_rate=1e-6),
    steps=200,
)
