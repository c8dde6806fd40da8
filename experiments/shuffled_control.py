"""Is it the credit that teaches? The main run against the same run with rewards shuffled among the episodes of each step.

    python -m experiments.shuffled_control [seeds] [field=value ...]

All start from the warm start of the main run. Prints success before and after for each seed. Exits with 1 unless every seed of the
main run gains at least 0.30 and doubles, and every shuffled one gains at most 0.05.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentrl_jax.config import Experiment, override
from agentrl_jax.data.batch import Batch, Tokens
from agentrl_jax.models.sharding import split_cpu
from agentrl_jax.runs import reported
from experiments.arms import BAR, arm, gain, run, scores, table
from experiments.bugfix_grpo import experiment


@jax.jit
def _shuffled(batch: Batch) -> Batch:
    """The rewards of the episodes in the statistics, dealt among them at random; the versions of the weights are the seed."""
    e = batch.episodes
    chance = jax.random.uniform(jax.random.fold_in(jax.random.key(0), jnp.max(batch.tokens.version)), e.reward.shape)
    members, dealt = jnp.argsort(~e.in_stats, stable=True), jnp.argsort(jnp.where(e.in_stats, chance, 2.0))
    return replace(batch, episodes=replace(e, reward=e.reward.at[members].set(e.reward[dealt])))


def shuffle(batch: Batch, logprobs: Callable[[Tokens], Float[Array, "B T"]]) -> Batch:
    """`Experiment.rewrite` of the control."""
    del logprobs
    return _shuffled(batch)


def compare(base: Experiment, seeds: range) -> bool:
    """Train all arms, print the tables, and tell whether the credit is what teaches."""
    trained = [run(arm(base, "seed", seed)) for seed in seeds]
    control = [run(arm(base, "shuffled", seed, rewrite=shuffle)) for seed in seeds]
    print(table("rewards as they are", trained))
    print(table("rewards shuffled among episodes", control))
    doubled = all(after[BAR][0] * before[BAR][1] >= 2 * before[BAR][0] * after[BAR][1] for before, after in map(scores, trained))
    learnt, flat = min(map(gain, trained)) >= 0.30, max(map(gain, control)) <= 0.05
    print(f"gains at least 0.30: {learnt}   doubled: {doubled}   shuffled gains at most 0.05: {flat}")
    return learnt and doubled and flat


def main(arguments: list[str]) -> int:
    split_cpu()
    holds = False
    with reported() as status:
        holds = compare(override(experiment, arguments[1:]), range(int(arguments[0]) if arguments else 5))
    return status.code or int(not holds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
