"""How good a fixed policy is, on tasks that it was never trained on.

    python -m agentrl_jax.evaluate experiments/bugfix_grpo.py [field=value ...]

measures the policy that a finished run left in its folder; `policy=FOLDER` measures any other.
"""

import asyncio
import sys
from collections.abc import Sequence

from agentrl_jax import config
from agentrl_jax.chat.renderer import OURS, Renderer
from agentrl_jax.config import Experiment, Rollout
from agentrl_jax.data.episode import Episode
from agentrl_jax.inference.protocol import Sampler
from agentrl_jax.inference.serving import Serving
from agentrl_jax.models.hub import model_folder
from agentrl_jax.models.policy import Policy
from agentrl_jax.report.score import Score, table
from agentrl_jax.rollout.agent import Parts, RolloutLimits
from agentrl_jax.rollout.collector import RolloutSettings, collect, plan
from agentrl_jax.runs import reported
from agentrl_jax.sandbox.protocol import Backend


def settings_of(rollout: Rollout, *, temperature: float | None = None) -> RolloutSettings:
    """The collector's settings; evaluations may sample at a temperature of their own."""
    limits = RolloutLimits(rollout.turns, rollout.turn_tokens, rollout.episode_tokens, rollout.context, rollout.seconds)
    used = rollout.temperature if temperature is None else temperature
    return RolloutSettings(limits, slots=rollout.slots, temperature=used, retries=rollout.retries)


def renderer_of(experiment: Experiment, policy: Policy) -> Renderer:
    """A policy of another's making is told its tools, in the way of its template; ours has learnt them."""
    tools = () if policy.template == OURS else tuple(experiment.environment.tools)
    return Renderer(policy.tokenizer, policy.template, tools=tools)


def parts_of(experiment: Experiment, policy: Policy, backend: Backend, serving: Sampler) -> Parts:
    """What episodes of an experiment run on."""
    rewrites = experiment.rollout.history == "template"
    return Parts(experiment.environment, backend, serving, renderer_of(experiment, policy), experiment.turn_reward, rewrites)


def serving_of(experiment: Experiment, policy: Policy) -> Serving:
    """What the experiment samples from, with a slot for each episode in flight."""
    return experiment.inference(policy, context_limit=experiment.rollout.context, slots=experiment.rollout.slots)


async def play(
    experiment: Experiment, parts: Parts, tasks: int, *, split: str = "held_out", temperature: float | None = None, phase: str = "eval"
) -> list[Episode]:
    """One episode on each of the first `tasks` tasks of a split. The same tasks and seeds for every policy and every run."""
    jobs = plan([experiment.environment.task(i, split) for i in range(tasks)], 1, seed=0, step=0, phase=f"{phase}-{split}")
    return await collect(jobs, parts, settings_of(experiment.rollout, temperature=temperature))


def successes(episodes: Sequence[Episode]) -> tuple[int, int]:
    """(successes, graded episodes); what infrastructure spoilt is in neither."""
    graded = [e.outcome.true_success for e in episodes if e.outcome is not None and e.outcome.true_success is not None]
    return sum(graded), len(graded)


async def score(experiment: Experiment, parts: Parts) -> Score:
    """Success on each split, sampled at the training temperature and greedy."""
    return {
        f"{split}, {way}": successes(await play(experiment, parts, experiment.evaluate.final, split=split, temperature=temperature))
        for split in experiment.evaluate.splits
        for way, temperature in (("sampled", None), ("greedy", 0.0))
    }


async def _score_of(experiment: Experiment) -> Score:
    policy = Policy.read(model_folder(experiment.policy) if experiment.policy else experiment.folder / "policy")
    async with experiment.sandbox() as backend, serving_of(experiment, policy) as serving:
        return await score(experiment, parts_of(experiment, policy, backend, serving))


def main(arguments: Sequence[str]) -> int:
    """Print the success rates. Returns the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m agentrl_jax.evaluate EXPERIMENT.py [field=value ...]", file=sys.stderr)
        return 2
    with reported() as status:
        experiment = config.override(config.load(arguments[0]), arguments[1:])
        print(table({experiment.name: asyncio.run(_score_of(experiment))}))
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
