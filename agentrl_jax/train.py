"""The whole loop: collect groups, collate, credit, update, publish, evaluate, checkpoint.

    python -m agentrl_jax.train experiments/bugfix_grpo.py [field=value ...]

Everything is written to `runs/NAME`. Ctrl-C stops cleanly; the same command goes on, and with the embedded parts the run is bit for
bit the one that was never stopped.

Several processes, each started with this command, train together (docs/scaling.md): the first does all of this, the others learn with it.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl_jax import config
from agentrl_jax.config import Experiment
from agentrl_jax.data.credits import CreditWriter
from agentrl_jax.data.store import EpisodeWriter
from agentrl_jax.evaluate import parts_of, play, score, serving_of, settings_of
from agentrl_jax.models.distributed import broadcast, initialise_from_environment, leads
from agentrl_jax.models.sharding import sharding_of, split_cpu
from agentrl_jax.prepare import first_policy
from agentrl_jax.report import page
from agentrl_jax.report.audit import Watch
from agentrl_jax.report.load import CREDITS, EPISODES, TOKENIZER
from agentrl_jax.report.metrics import MetricsWriter, read
from agentrl_jax.report.progress import Progress, library_chatter_to
from agentrl_jax.report.score import table
from agentrl_jax.report.summary import summarise
from agentrl_jax.rollout.collector import collect, plan
from agentrl_jax.runs import AFTER, BEFORE, claim, read_score, reported, write_score
from agentrl_jax.step import Clock, check_credit, mesh_of
from agentrl_jax.training import Training, follow


async def train(experiment: Experiment) -> Path:
    """Run the experiment from where its folder stands to its last step. Returns the folder."""
    folder = experiment.folder
    check_credit(experiment)
    claim(folder, experiment)
    async with AsyncExitStack() as stack:
        stack.enter_context(library_chatter_to(folder / "train.log"))
        backend = await stack.enter_async_context(experiment.sandbox())
        policy = await first_policy(experiment, backend, folder, partial(sharding_of, mesh_of(experiment)))
        policy.tokenizer.save(folder / TOKENIZER)
        training = stack.enter_context(Training(experiment, policy))
        step = training.step
        store = stack.enter_context(EpisodeWriter(folder / EPISODES))
        credit_store = stack.enter_context(CreditWriter(folder / CREDITS))
        metrics = stack.enter_context(MetricsWriter(folder, start=step))
        watch = Watch(read(folder))
        store.rewind(step)

        serving = await stack.enter_async_context(serving_of(experiment, replace(policy, params=training.weights())))
        parts = parts_of(experiment, policy, backend, serving)
        before = read_score(folder / BEFORE) or write_score(folder / BEFORE, await score(experiment, parts))
        progress = stack.enter_context(Progress(experiment.steps, done=step))
        try:
            while step < experiment.steps:
                values = {}
                clock = Clock(serving.stats)
                await serving.update(training.weights(), step)
                if step % experiment.evaluate.every == 0:
                    values |= summarise(await play(experiment, parts, experiment.evaluate.tasks), "eval")
                    clock.lap("evaluate")
                tasks = [experiment.environment.task(task_seed(experiment, step, group)) for group in range(experiment.rollout.groups)]
                jobs = plan(tasks, experiment.rollout.group_size, seed=experiment.seed, step=step)
                episodes = await collect(jobs, parts, settings_of(experiment.rollout), sink=store.add)
                clock.lap("collect")
                learned, credit = training.learn(episodes)
                clock.lap("train")
                credit_store.append(credit)
                store.sync()
                values |= summarise(episodes) | learned | clock.metrics(episodes)
                values |= watch.see(step, values)
                metrics.write(step, values)
                step = training.step
                if step % experiment.checkpoint_every == 0:
                    training.save()
                progress.show(step, values)
        finally:
            # Also on Ctrl-C, but not a step of which something could not be written.
            if step == training.step and training.intact:
                training.save()

        trained = replace(policy, params=training.weights())
        await serving.update(trained.params, step)
        after = read_score(folder / AFTER) or write_score(folder / AFTER, await score(experiment, parts))
        if not (folder / "policy").exists():
            trained.write(folder / "policy", context_limit=experiment.rollout.context)
    print(table({"before": before, "after": after}))
    print(f"report: {page.build(folder)}")
    return folder


def task_seed(experiment: Experiment, step: int, group: int) -> int:
    """Seed of the task of a group: every step has tasks of its own."""
    return (experiment.seed << 24) + step * experiment.rollout.groups + group


def main(arguments: Sequence[str]) -> int:
    """Train, or go on training. Returns the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m agentrl_jax.train EXPERIMENT.py [field=value ...]", file=sys.stderr)
        return 2
    with reported() as status:
        initialise_from_environment()
        experiment = config.override(config.load(arguments[0]), arguments[1:])
        if experiment.policy is None:  # a small one
            split_cpu()
        if not leads():
            follow(experiment)
            return status.code
        try:
            asyncio.run(train(experiment))
        finally:
            broadcast()  # those that follow end too
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
