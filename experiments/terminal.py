"""Teach a policy to work in a shell: count, rename, pack, sort, extract, mend.

    make train EXP=experiments/terminal.py ARGS="policy=path/of/a/model"

Commands have to be written, not copied, so bring a pretrained model, and vLLM to serve it. It has not been run to the end; no score is
claimed. Task folders of others take its place by `environment=Harbor("path/of/folders")` and, for their images, `sandbox=Docker`.
"""

from collections.abc import Generator
from functools import partial
from random import Random

from agentrl_jax import credit, objective
from agentrl_jax.config import Experiment, Optimizer, Rollout
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.envs.terminal import Terminal
from agentrl_jax.inference.served import Served

RIGHT = 0.6  # how often the expert is right


def expert(environment: Terminal, task: Task, rng: Random) -> Generator[Call, Observation, None]:
    """Looks at the files, does the job or nearly does it, and looks again."""
    *commands, submit = (environment.gold if rng.random() < RIGHT else environment.wrong)(task)
    for command in (("run", {"command": "find . -type f | sort | head -n 20"}), *commands, ("run", {"command": "ls -l"}), submit):  # noqa: UP028
        yield command


experiment = Experiment(
    name="terminal",
    environment=Terminal(),
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
