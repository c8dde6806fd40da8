"""Rewards of turns, from the experiment that names a rule to the credit of each token."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from agentrl_jax import credit
from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.chat.toolcalls import render_call
from agentrl_jax.data.collate import collate
from agentrl_jax.envs.turn_rewards import by_tests
from agentrl_jax.evaluate import parts_of, settings_of
from agentrl_jax.models.decoder import init_params
from agentrl_jax.models.policy import Policy
from agentrl_jax.rollout.collector import collect, plan
from agentrl_jax.rollout.scripted import ScriptedSampler
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.step import first_shape, learn, learner_of
from experiments.chaos import tiny

rollout = replace(tiny.experiment.rollout, turns=4, turn_tokens=100, episode_tokens=300, context=400)
experiment = replace(
    tiny.experiment,
    rollout=rollout,
    row_length=400,
    advantage=credit.mt_grpo,
    turn_reward=partial(by_tests, looked=0.25, passing=0.0, refused=-0.5),
)
# One member of a group tests, the others ask for a function that is not there; none of them solves anything.
CALLS = [("test", {}), ("edit", {"function": "nothing", "old": "a", "new": "b"}), ("read", {"function": "nothing"})]
REWARDS = [0.25, -0.5, -0.5]


def scripts(key):
    yield CALLS[int(key.rpartition("-")[2])]
    yield "submit", {}


@pytest.mark.real("bwrap")
async def test_they_reach_the_batch_and_the_credit_of_the_turns_tokens():
    tasks = [experiment.environment.task(seed) for seed in range(2)]
    texts = [*(task.prompt for task in tasks), *(render_call(*call) for call in CALLS)]
    policy = Policy(
        experiment.model,
        init_params(experiment.model, jax.random.key(0)),
        tokenizer.train(texts, experiment.model.vocab_size, scaffolding(experiment.environment.tools)),
    )
    sampler = ScriptedSampler(Renderer(policy.tokenizer), scripts, rollout.context)
    async with Bubblewrap() as backend:
        parts = parts_of(experiment, policy, backend, sampler)
        episodes = await collect(plan(tasks, 3, seed=0, step=0), parts, settings_of(rollout))
    assert [[turn.reward for turn in episode.turns] for episode in episodes] == [[reward, None] for reward in REWARDS] * 2
    assert {episode.reward for episode in episodes} == {0.0}

    host, _ = collate(episodes, row_length=experiment.row_length)
    np.testing.assert_array_equal(host.episodes.turn_reward[:6, :2], [[reward, 0] for reward in REWARDS] * 2)

    learner = learner_of(experiment, policy.model)
    state, shape = learner.init(policy.params), first_shape(experiment)
    _, _, values, found = learn(experiment, learner, state, None, None, episodes, 0, shape)
    assert values["train/gradient_norm"] > 0
    # 0.25 and twice -0.5: by their group's mean and standard deviation, on the tokens of the first turn alone.
    for episode, expected in zip(episodes, [2**0.5, -(0.5**0.5), -(0.5**0.5)] * 2, strict=True):
        (advantages,) = found[episode.id]
        first, second = (np.flatnonzero(mask) for mask in spans_of(episode))
        np.testing.assert_allclose(advantages[first], expected, atol=1e-5)
        np.testing.assert_allclose(advantages[second], 0, atol=1e-5)


def spans_of(episode):
    """bool[n] of the tokens that the policy wrote in the first and in the second turn."""
    segment = episode.segments[0]
    turns = np.concatenate([np.full(len(span.tokens), span.turn) for span in segment.spans])
    return segment.mask & (turns == 0), segment.mask & (turns == 1)
