"""Which tokens the reward is credited to. A credit rule is a pure function: `Batch, Estimates -> Credit`.

Use them with `functools.partial`, or write your own:

    def my_rule(batch, estimates):
        episodes = batch.episodes
        return Credit(on_tokens(batch, my_numbers_per_episode))

Rules over episodes and turns work on the table and lay their numbers on tokens by one gather. Rules over tokens walk the tokens that
the policy wrote, episode after episode (`walk`), so neither tool output nor packing nor a rewritten history can change them.
The kernels do the arithmetic; formulas and sources stand there.
"""

from agentrl_jax.credit.base import AdvantageFn, Credit, Estimates, Walk, actions, on_tokens, on_turns, turn_rewards, walk
from agentrl_jax.credit.critic import bi_level_gae, gae, turn_gae, v_trace
from agentrl_jax.credit.episodes import (
    gdpo,
    gpg,
    grpo,
    max_rl,
    optimal_token_baseline,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)
from agentrl_jax.credit.of_turns import decayed, gigpo, mt_grpo

__all__ = [
    "AdvantageFn",
    "Credit",
    "Estimates",
    "Walk",
    "actions",
    "bi_level_gae",
    "decayed",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "max_rl",
    "mt_grpo",
    "on_tokens",
    "on_turns",
    "optimal_token_baseline",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "turn_gae",
    "turn_rewards",
    "v_trace",
    "walk",
]
