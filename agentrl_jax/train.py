"""The whole loop: collect groups, collate, credit, update, publish, evaluate, checkpoint.

    python -m agentrl_jax.train experiments/bugfix_grpo.py [field=value ...]

Everything is written to `runs/NAME`. Ctrl-C stops cleanly; the same command goes on, and with the embedded parts the run is bit for
bit the one that was never stopped.
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
from agentrl_jax.data.collate import Shape
from agentrl_jax.data.credits import CreditWriter
from agentrl_jax.data.store import EpisodeWriter
from agentrl_jax.evaluate import parts_of, play, score, serving_of, settings_of
from agentrl_jax.learner.checkpoint import Checkpoints
from agentrl_jax.learner.reference import reference_of
from agentrl_jax.models.lora import whole
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
from agentrl_jax.step import Clock, check_credit, first_shape, learn, learner_of, mesh_of, trained_of


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
        learner = learner_of(experiment, policy.model)
        state, step, shape = learner.init(trained_of(experiment, policy.params)), 0, first_shape(experiment)
        base = learner.place(policy.params) if experiment.lora else None
        reference = reference_of(learner, policy.params, experiment.reference, base)
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints"))
        if checkpoints.latest is not None:
            step, state, meta = checkpoints.restore(state)
            shape = Shape(*meta["shape"])
        store = stack.enter_context(EpisodeWriter(folder / EPISODES))
        credit_store = stack.enter_context(CreditWriter(folder / CREDITS))
        metrics = stack.enter_context(MetricsWriter(folder, start=step))
        watch = Watch(read(folder))
        store.rewind(step)

        serving = await stack.enter_async_context(serving_of(experiment, policy))
        parts = parts_of(experiment, policy, backend, serving)
        before = read_score(folder / BEFORE) or write_score(folder / BEFORE, await score(experiment, parts))
        progress = stack.enter_context(Progress(experiment.steps, done=step))
        try:
            while step < experiment.steps:
                values = {}
                clock = Clock(serving.stats)
                await serving.update(whole(state.params, base), step)
                if step % experiment.evaluate.every == 0:
                    values |= summarise(await play(experiment, parts, experiment.evaluate.tasks), "eval")
                    clock.lap("evaluate")
                tasks = [experiment.environment.task(task_seed(experiment, step, group)) for group in range(experiment.rollout.groups)]
                jobs = plan(tasks, experiment.rollout.group_size, seed=experiment.seed, step=step)
                episodes = await collect(jobs, parts, settings_of(experiment.rollout), sink=store.add)
                clock.lap("collect")
                stepped, shape, learned, credit = learn(experiment, learner, state, base, reference, episodes, step, shape)
                clock.lap("train")
                credit_store.append(credit)
                store.sync()
                values |= summarise(episodes) | learned | clock.metrics(episodes)
                values |= watch.see(step, values)
                metrics.write(step, values)
                state, step = stepped, step + 1
                if step % experiment.checkpoint_every == 0:
                    checkpoints.save(step, state, {"shape": list(shape)})
                progress.show(step, values)
        finally:
            # Also on Ctrl-C: `state` is that of the last whole step, unless a step that failed has used up its buffers.
            if not state.updates.is_deleted():
                checkpoints.save(step, state, {"shape": list(shape)})

        trained = replace(policy, params=whole(state.params, base))
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
    split_cpu()
    with reported() as status:
        asyncio.run(train(config.override(config.load(arguments[0]), arguments[1:])))
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
