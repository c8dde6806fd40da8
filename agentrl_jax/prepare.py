"""Where the policy of a run comes from: a folder that the experiment names, or a small model taught by the scripted expert."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.chat.tokenizer import train as train_tokenizer
from agentrl_jax.chat.toolcalls import render_call
from agentrl_jax.config import ConfigError, Experiment
from agentrl_jax.data.store import EpisodeWriter
from agentrl_jax.envs.protocol import Environment
from agentrl_jax.evaluate import parts_of, play, settings_of, successes
from agentrl_jax.inference.serving import embedded
from agentrl_jax.learner.warmstart import imitate
from agentrl_jax.models.decoder import init_params
from agentrl_jax.models.hub import model_folder
from agentrl_jax.models.policy import Policy
from agentrl_jax.report.progress import Progress
from agentrl_jax.rollout.collector import plan
from agentrl_jax.rollout.scripted import demonstrate
from agentrl_jax.sandbox.protocol import Backend

FIRST_TASK = 1 << 40  # demonstrations are of training tasks that no step reaches
TEXTS = 400  # tasks whose texts the tokenizer is trained on


async def first_policy(experiment: Experiment, backend: Backend, folder: Path) -> Policy:
    """The policy that training starts from: `experiment.policy`, else that of the warm start, made once per run folder."""
    if experiment.policy is not None:
        policy = Policy.read(model_folder(experiment.policy))
        if policy.tokenizer.vocab_size > policy.model.vocab_size:
            raise ConfigError(f"{experiment.policy}: the tokenizer has more ids than the model; it belongs to another model")
        if policy.template.breaks:
            rewritten = ", ".join(found.what for found in policy.template.breaks)
            how = "they stay as sampled" if experiment.rollout.history == "sampled" else "each time it does, a new segment begins"
            Progress().say(f"the chat template would rewrite earlier turns ({rewritten}); {how}")
        return policy
    target = folder / "warmstart"
    if not target.exists():
        policy = await warm_start(experiment, backend, folder)
        policy.write(target, context_limit=experiment.rollout.context)
    return Policy.read(target)


async def warm_start(experiment: Experiment, backend: Backend, folder: Path) -> Policy:
    """Imitate the expert, round after round, until the sampled success on training tasks reaches the threshold.

    Raises ConfigError where it never does: reinforcement learning does not start from nothing.
    """
    settings, environment, rollout = experiment.warmstart, experiment.environment, experiment.rollout
    progress = Progress()
    tokenizer = tokenizer_of(experiment)
    tasks = [environment.task(FIRST_TASK + experiment.seed * settings.episodes + i) for i in range(settings.episodes)]
    with EpisodeWriter(folder / "expert.store") as store:
        store.rewind(0)
        episodes = await demonstrate(
            plan(tasks, 1, seed=experiment.seed, step=0, phase="expert"),
            environment,
            backend,
            Renderer(tokenizer),
            settings_of(rollout),
            expert=partial(experiment.expert, environment),
            progress=lambda done, total, _: progress.count("expert episodes", done, total),
        )
        store.append(*episodes)
    won, graded = successes(episodes)
    progress.say(f"expert: {won} of {graded} episodes succeed ({won / max(graded, 1):.2f}); the warm start imitates them all")
    policy = Policy(experiment.model, init_params(experiment.model, jax.random.key(experiment.seed)), tokenizer)

    def imitated(done: int, nll: float) -> None:
        progress.count(f"warm start, {nll:.3f} nats/token", done, settings.updates)
        if (task := asyncio.current_task()) and task.cancelling():
            raise asyncio.CancelledError  # Ctrl-C, which else would wait for the next await

    for number in range(settings.rounds):
        params = imitate(
            policy.model,
            policy.params,
            episodes,
            settings,
            row_length=experiment.row_length,
            seed=experiment.seed + number,
            compute=experiment.compute,
            progress=imitated,
        )
        policy = replace(policy, params=params)
        async with embedded(policy, context_limit=experiment.rollout.context, slots=experiment.rollout.slots) as engine:
            parts = parts_of(experiment, policy, backend, engine)
            won, graded = successes(await play(experiment, parts, settings.tasks, split="train", phase="warmstart"))
        progress.say(f"warm start, round {number + 1}: {won} of {graded} sampled episodes succeed ({won / max(graded, 1):.2f})")
        if graded and won >= settings.threshold * graded:
            return policy
    raise ConfigError(
        f"warmstart: {won} of {graded} episodes succeed after {settings.rounds} rounds, below warmstart.threshold={settings.threshold}; "
        "raise warmstart.updates, warmstart.episodes or the size of the model"
    )


def tokenizer_of(experiment: Experiment) -> ChatTokenizer:
    """The tokenizer of a policy that starts from nothing, trained on texts of the environment."""
    environment = experiment.environment
    return train_tokenizer(corpus(environment), experiment.model.vocab_size, scaffolding(environment.tools))


def corpus(environment: Environment) -> Iterable[str]:
    """What a policy of this environment reads and writes, for the tokenizer: prompts, files and the calls that solve the tasks."""
    for i in range(TEXTS):
        task = environment.task(FIRST_TASK + i)
        yield task.prompt
        yield from (content.decode("utf-8", "replace") for content in task.files.values())
        yield from (render_call(name, arguments) for name, arguments in environment.gold(task))
