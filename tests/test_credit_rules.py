"""What must hold of every credit rule, on the same episodes laid out in different ways; and the rules over tokens against plain rows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import credit
from agentrl_jax.credit import Estimates
from agentrl_jax.data.collate import Shape, collate, unpack
from agentrl_jax.data.episode import Ending
from agentrl_jax.kernels import gae as gae_kernels
from tests.data.strategies import make_episode

RULES = {
    "grpo": credit.grpo,
    "dr_grpo": partial(credit.grpo, std="none"),
    "rloo": partial(credit.grpo, baseline="leave_one_out", std="none"),
    "opo": partial(credit.grpo, baseline="length", std="none"),
    "gpg": credit.gpg,
    "pass_at_k": credit.pass_at_k,
    "max_rl": credit.max_rl,
    "gdpo": partial(credit.gdpo, weights=(1.0, 0.5)),
    "gdpo_tokens": partial(credit.gdpo, weights=(1.0, 0.5), over="tokens"),
    "remax": credit.remax,
    "reinforce_pp": partial(credit.reinforce_pp, gamma=0.9),
    "reinforce_pp_baseline": credit.reinforce_pp_baseline,
    "optimal_token_baseline": partial(credit.optimal_token_baseline, max_actions=16),
    "gigpo": credit.gigpo,
    "gigpo_rows": partial(credit.gigpo, stats="rows", std="sample"),
    "mt_grpo": partial(credit.mt_grpo, weight=0.5),
    "decayed": credit.decayed,
    "gae": partial(credit.gae, gamma=0.9, lam=0.8, bootstrap=True),
    "gae_adaptive": partial(credit.gae, adaptive=1.5, value_lam=1.0, normalise=True),
    "turn_gae": partial(credit.turn_gae, gamma=0.9, lam=0.8),
    "bi_level_gae": partial(credit.bi_level_gae, gamma=0.95, lam=0.9),
    "v_trace": partial(credit.v_trace, gamma=0.9, lam=0.8, bootstrap=True),
}
MAKES = [
    ("a", "g", 1.0, 3, 1),
    ("b", "g", 0.0, 2, 2),
    ("c", "g", 0.5, 1, 1),
    ("d", "h", 1.0, 4, 2),
    ("e", "h", 0.25, 2, 1),
    ("f", "i", 1.0, 2, 1),
]
LENGTH = 96
SHAPE = Shape(rows=8, length=LENGTH, predict=24, episodes=8, turns=4)  # one for all layouts: each rule is compiled once


def episodes(observation=4, prompt=5):
    """Two groups and a loner, of 1 to 4 turns in one or two segments; two turns of `g` start alike; one was cut off."""
    made = []
    for i, (name, group, reward, turns, segments) in enumerate(MAKES):
        options = {
            "turns": turns,
            "segments": segments,
            "observation": observation,
            "prompt": prompt,
            "states": [f"s{k if k < 2 else (k, name)}" for k in range(turns)],
            "turn_rewards": [0.1 * (k + i) for k in range(turns)],
            "components": {"passed": reward, "tidy": float(i % 2)},
            "ending": Ending.TURN_LIMIT if name == "d" else Ending.SUBMITTED,
            "action": 2 + i % 2,
        }
        made.append(make_episode(name, group=group, reward=reward, seed=i, **options))
    return made


def estimates(batch, names):
    """The same number for the same action of the same episode, wherever it lies; NaN where the policy wrote nothing."""
    index = {name: i for i, (name, *_) in enumerate(MAKES)}
    row = jnp.array([index.get(name, 0) for name in names] + [0] * (batch.episodes.group.shape[0] - len(names)))
    mask = batch.tokens.mask
    who, action = (x.astype(jnp.float32) for x in (row[batch.tokens.episode], batch.tokens.action))

    def of(salt, low, high):
        wave = jnp.sin(1.7 * who + 0.9 * action + salt)
        return jnp.where(mask, low + (high - low) * (wave + 1) / 2, jnp.nan)

    return Estimates(
        proximal=of(1, -2.0, -0.1),
        values=of(2, -0.5, 1.0),
        bootstrap=0.3 + 0.1 * row.astype(jnp.float32),
        greedy_reward=jnp.full(row.shape, 0.5),
        sum_pi_squared=of(3, 0.1, 0.9),
    )


def credited(rule, episodes, **options):
    """{episode: its advantages, segment after segment}; tokens that the policy did not write must have none."""
    host, packing = collate(episodes, row_length=LENGTH, components=("passed", "tidy"), at_least=SHAPE, **options)
    batch = jax.device_put(host)
    guess = estimates(batch, [e.id for e in episodes])
    batch = replace(batch, tokens=replace(batch.tokens, logprob=guess.proximal - 0.2 * guess.sum_pi_squared))
    found = jax.jit(rule)(batch, guess)
    advantages = np.asarray(found.advantages)
    assert advantages.dtype == np.float32
    assert (advantages[~np.asarray(host.tokens.mask)] == 0).all()
    masks = unpack(np.asarray(host.tokens.mask), packing)
    return {
        e.id: np.concatenate([a[m] for a, m in zip(of, mask, strict=True)]) if of else None
        for e, of, mask in zip(episodes, unpack(advantages, packing), masks, strict=True)
    }


def assert_same(ours, theirs):
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


def test_packed_rows_are_padded_rows(rule):
    assert_same(credited(rule, episodes()), credited(rule, episodes(), pack=False))


def test_tool_output_and_prompts_of_any_length(rule):
    assert_same(credited(rule, episodes(observation=9, prompt=13)), credited(rule, episodes()))


def test_episodes_in_any_order(rule):
    assert_same(credited(rule, episodes()[::-1]), credited(rule, episodes()))


def test_a_crashed_episode_is_as_good_as_absent(rule):
    crashed = make_episode("x", group="g", reward=None, ending=Ending.SANDBOX_FAILED, turns=2)
    ours = credited(rule, [*episodes(), crashed])
    assert ours.pop("x") is None
    assert_same(ours, credited(rule, episodes()))


def test_an_episode_without_influence_gets_nothing(rule):
    """Left out of the statistics, and out of the loss, by the limit it ran into."""
    ours = credited(rule, episodes(), limits="drop")
    assert (ours.pop("d") == 0).all()
    assert_same(ours, credited(rule, [e for e in episodes() if e.id != "d"]))


def flat(name):
    """One episode of `name` with rewards, values and the rest as plain arrays over its actions."""
    (episode,) = [e for e in episodes() if e.id == name]
    batch = jax.device_put(collate([episode], row_length=LENGTH)[0])
    guess = estimates(batch, [name])
    order = np.argsort(np.asarray(batch.tokens.action)[np.asarray(batch.tokens.mask)])
    values = np.asarray(guess.values)[np.asarray(batch.tokens.mask)][order]
    turns = np.asarray(batch.tokens.turn)[np.asarray(batch.tokens.mask)][order]
    reward = np.zeros(len(values), np.float32)
    for k, earned in enumerate(episode.turns):
        reward[np.flatnonzero(turns == k)[-1]] += earned.reward or 0.0
    reward[-1] += episode.reward
    return reward, values, turns, float(guess.bootstrap[0])


@pytest.mark.parametrize("name", ["a", "b", "d"])
def test_token_gae_is_gae_over_the_actions_alone(name):
    reward, values, _, behind = flat(name)
    expected, later, gamma, lam = np.zeros(len(values)), 0.0, 0.9, 0.8
    following = behind if name == "d" else 0.0
    for t in reversed(range(len(values))):
        later = reward[t] + gamma * following - values[t] + gamma * lam * later
        expected[t], following = later, values[t]
    found = credited(partial(credit.gae, gamma=gamma, lam=lam, bootstrap=True), episodes())[name]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["a", "b"])
def test_turn_gae_looks_at_turns_alone(name):
    reward, values, turns, _ = flat(name)
    first = [int(np.flatnonzero(turns == k)[0]) for k in range(turns[-1] + 1)]
    earned = jnp.array([reward[turns == k].sum() for k in range(turns[-1] + 1)])
    whole = gae_kernels.gae(earned, jnp.asarray(values[first]), jnp.ones(len(first), bool), discount=0.9, lam=0.8)
    found = credited(partial(credit.turn_gae, gamma=0.9, lam=0.8), episodes())[name]
    np.testing.assert_allclose(found, np.asarray(whole.advantages)[turns], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [credit.remax, credit.gae, credit.v_trace, credit.turn_gae, credit.bi_level_gae])
def test_what_a_rule_needs_is_asked_for_by_name(rule):
    batch = jax.device_put(collate(episodes(), row_length=LENGTH)[0])
    with pytest.raises(ValueError, match=r"credit\.\w+ needs Estimates\.\w+"):
        rule(batch, Estimates())


def test_on_policy_v_trace_is_gae():
    host, _ = collate(episodes(), row_length=LENGTH)
    batch = jax.device_put(host)
    guess = replace(estimates(batch, [e.id for e in episodes()]), proximal=batch.tokens.logprob)
    trace = credit.v_trace(batch, guess, gamma=0.9, lam=0.8)
    plain = credit.gae(batch, guess, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(trace.returns, plain.returns, rtol=1e-5, atol=1e-6)
