"""Where the policy of a run comes from: a folder that the experiment names, or a small model taught by the scripted expert."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from agentrl_jax.chat.renderer import scaffolding
from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.chat.tokenizer import train as train_tokenizer
from agentrl_jax.chat.toolcalls import render_call
from agentrl_jax.config import ConfigError, Experiment
from agentrl_jax.data.store import EpisodeWriter
from agentrl_jax.envs.protocol import Environment
from agentrl_jax.evaluate import parts_of, play, renderer_of, settings_of, successes
from agentrl_jax.inference.serving import embedded
from agentrl_jax.learner.warmstart import imitate
from agentrl_jax.models.decoder import init_params
from agentrl_jax.models.hub import model_folder
from agentrl_jax.models.policy import Policy
from agentrl_jax.models.pretrained import ShardingFn, on_one_device
from agentrl_jax.report.progress import Progress
from agentrl_jax.rollout.collector import plan
from agentrl_jax.rollout.scripted import demonstrate
from agentrl_jax.sandbox.protocol import Backend
from agentrl_jax.step import trained_of

FIRST_TASK = 1 << 40  # demonstrations are of training tasks that no step reaches
WARM = "warmstart"  # folder of the policy that the warm start ended with
TEXTS = 400  # tasks whose texts the tokenizer is trained on


async def first_policy(experiment: Experiment, backend: Backend, folder: Path, sharding: ShardingFn) -> Policy:
    """The policy that training starts from: `experiment.policy` or a new one, after its warm start, which is made once per run folder.

    sharding: where its weights are to lie
    """
    if (found := ready_policy(experiment, folder, sharding)) is not None:
        return found
    if experiment.policy is None:
        params = init_params(experiment.model, jax.random.key(experiment.seed))
        policy = Policy(experiment.model, params, tokenizer_of(experiment))
    else:
        policy = read_policy(experiment, experiment.policy, on_one_device)
    policy = await warm_start(experiment, policy, backend, folder)
    policy.write(folder / WARM, context_limit=experiment.rollout.context)
    return Policy.read(folder / WARM, sharding)


def ready_policy(experiment: Experiment, folder: Path, sharding: ShardingFn) -> Policy | None:
    """`first_policy` where nothing has to be taught for it, or has been already; else None."""
    if (folder / WARM).exists():
        return Policy.read(folder / WARM, sharding)
    if experiment.policy is None or experiment.warmstart.named:
        return None
    return read_policy(experiment, experiment.policy, sharding)


def read_policy(experiment: Experiment, name: str, sharding: ShardingFn) -> Policy:
    """A policy of another's making, with what its chat template does to the history said."""
    policy = Policy.read(model_folder(name), sharding)
    if policy.tokenizer.vocab_size > policy.model.vocab_size:
        raise ConfigError(f"{name}: the tokenizer has more ids than the model; it belongs to another model")
    if policy.template.breaks:
        rewritten = ", ".join(found.what for found in policy.template.breaks)
        how = "they stay as sampled" if experiment.rollout.history == "sampled" else "each time it does, a new segment begins"
        Progress().say(f"the chat template would rewrite earlier turns ({rewritten}); {how}")
    return policy


async def warm_start(experiment: Experiment, policy: Policy, backend: Backend, folder: Path) -> Policy:
    """Imitate the expert, round after round, until the sampled success on training tasks reaches the threshold.

    Raises ConfigError where it never does: reinforcement learning does not start from nothing.
    """
    settings, environment, rollout = experiment.warmstart, experiment.environment, experiment.rollout
    progress = Progress()
    tasks = [environment.task(FIRST_TASK + experiment.seed * settings.episodes + i) for i in range(settings.episodes)]
    with EpisodeWriter(folder / "expert.store") as store:
        store.rewind(0)
        episodes = await demonstrate(
            plan(tasks, 1, seed=experiment.seed, step=0, phase="expert"),
            environment,
            backend,
            renderer_of(experiment, policy),
            settings_of(rollout),
            expert=partial(experiment.expert, environment),
            progress=lambda done, total, _: progress.count("expert episodes", done, total),
        )
        store.append(*episodes)
    won, graded = successes(episodes)
    progress.say(f"expert: {won} of {graded} episodes succeed ({won / max(graded, 1):.2f}); the warm start imitates them all")

    def imitated(done: int, nll: float) -> None:
        progress.count(f"warm start, {nll:.3f} nats/token", done, settings.updates)
        if (task := asyncio.current_task()) and task.cancelling():
            raise asyncio.CancelledError  # Ctrl-C, which else would wait for the next await

    for number in range(settings.rounds):
        params = imitate(
            policy.model,
            trained_of(experiment, policy.params),
            episodes,
            settings,
            row_length=experiment.row_length,
            seed=experiment.seed + number,
            compute=experiment.compute,
            accumulate=experiment.optimizer.accumulate,
            progress=imitated,
            base=policy.params if experiment.lora else None,
        )
        policy = replace(policy, params=params)
        async with embedded(policy, context_limit=rollout.context, slots=rollout.slots) as engine:
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
