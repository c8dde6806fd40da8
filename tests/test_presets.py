"""Every published recipe makes an experiment, and trains what it should: losses and gradients on made-up episodes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import correction, credit, objective, presets, selection
from agentrl_jax.credit import Estimates
from agentrl_jax.data.collate import Shape, collate
from agentrl_jax.data.episode import Ending
from agentrl_jax.kernels import policy_loss, sequence_loss
from agentrl_jax.kernels.reduce import token_weights
from agentrl_jax.objective import PolicyInputs, Signals
from tests import tiny
from tests.data.strategies import make_episode

ARGUMENTS = {"dr_grpo": {"horizon": 64}, "deepswe": {"horizon": 64}, "deepseek_v32": {"delta": 0.05}}
NAMES = [
    name
    for name, value in vars(presets).items()
    if callable(value) and getattr(value, "__module__", "") == presets.__name__ and name != "Recipe"
]
CRITICS = {"search_r1_ppo", "sao", "ragen_bi_level"}
EPISODES = [
    make_episode("a", group="g", reward=1.0, turns=2, seed=1, states=["s", "t"], turn_rewards=[0.2, 0.0]),
    make_episode("b", group="g", reward=0.0, turns=3, seed=2, states=["s", "t", "u"], turn_rewards=[0.0, 0.1, 0.0]),
    make_episode("c", group="h", reward=0.5, turns=1, seed=3),
    make_episode("d", group="h", reward=1.0, turns=2, seed=4, ending=Ending.TURN_LIMIT),
    make_episode("e", group="i", reward=1.0, turns=1, seed=5),
    make_episode("f", group="i", reward=1.0, turns=1, seed=6),
]


@pytest.fixture(scope="module")
def batch():
    return jax.device_put(collate(EPISODES, row_length=64, at_least=Shape(rows=4))[0])


def sampled(tokens):
    return tokens.logprob


def recipe(name):
    return getattr(presets, name)(**ARGUMENTS.get(name, {}))


def noisy(batch, scale, seed):
    """The sampler's log-probs, moved."""
    return batch.tokens.logprob + scale * jax.random.normal(jax.random.key(seed), batch.tokens.logprob.shape)


def trained(batch, recipe, *, new=None):
    """(loss, its gradient at the log-probs) of the first minibatch of a recipe, put together as the learner does."""
    new = noisy(batch, 0.05, 1) if new is None else new
    proximal, reference = noisy(batch, 0.02, 2), noisy(batch, 0.1, 3)
    if recipe.get("rewrite"):
        batch = recipe["rewrite"](batch, lambda tokens: proximal)
    tokens, table = batch.tokens, batch.episodes
    values = jnp.where(tokens.mask, 0.3, jnp.nan)
    advantages = recipe["advantage"](batch, Estimates(proximal=proximal, values=values)).advantages
    signals = Signals(advantages, reference if recipe.get("reference") else None, proximal)
    mask = tokens.mask & table.in_loss[tokens.episode]
    if recipe.get("correction"):
        found = recipe["correction"](tokens, proximal, advantages)
        signals, mask = replace(signals, weight=found.weight, counted=found.counted), mask & found.counted
    weights = token_weights(mask, tokens.episode, table.group, reduction=recipe["reduction"], horizon=recipe.get("horizon"))

    def loss(new):
        inputs = PolicyInputs(new, jnp.ones_like(new), tokens.logprob, signals, mask, tokens.segment, tokens.turn)
        return jnp.sum(jnp.where(mask, weights * recipe["loss"](inputs).loss, 0.0))

    value, gradient = jax.value_and_grad(loss)(new)
    return float(value), np.asarray(gradient), np.asarray(advantages), np.asarray(mask)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_an_experiment(name):
    made = replace(tiny.experiment, **recipe(name))
    assert made.loss is not tiny.experiment.loss or made.advantage is not tiny.experiment.advantage or made.correction is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_teaches(name, batch):
    """The gradient is finite, stays on trained tokens, and on average raises what was good and lowers what was bad."""
    value, gradient, advantages, mask = trained(batch, recipe(name))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] * advantages[mask]).sum() < 0


@pytest.mark.parametrize("name", sorted(CRITICS))
def test_a_recipe_with_a_critic_says_that_it_needs_one(name, batch):
    with pytest.raises(ValueError, match=r"needs Estimates\.values"):
        recipe(name)["advantage"](batch, Estimates())


def test_what_selects_groups_selects_them(batch):
    group = np.asarray(batch.episodes.group)[:6]

    def kept(rule):
        return np.asarray(rule(batch, sampled).episodes.in_loss)[:6]

    np.testing.assert_array_equal(kept(selection.informative), [True, True, True, True, False, False])
    np.testing.assert_array_equal(kept(partial(selection.most_uncertain, fraction=0.25)), group == group[0])
    np.testing.assert_array_equal(kept(partial(selection.variance_nucleus, share=0.5)), group == group[0])
    assert kept(selection.mostly_valid).all()


def test_a_group_that_lost_most_of_its_members_is_left_out():
    lost = [make_episode(f"x{i}", group="c", reward=None, ending=Ending.SANDBOX_FAILED) for i in range(3)]
    batch = jax.device_put(collate([*EPISODES, *lost], row_length=64)[0])
    assert selection.mostly_valid(batch, sampled).episodes.in_loss[:6].all()
    batch = jax.device_put(collate([replace(e, group="g") for e in lost] + EPISODES, row_length=64)[0])
    assert not selection.mostly_valid(batch, sampled).episodes.in_loss[3:5].any()


def test_the_overlong_penalty_counts_the_policys_tokens_or_all(batch):
    own = selection.overlong_penalty(batch, sampled, limit=8, margin=4).episodes.reward
    both = selection.overlong_penalty(batch, sampled, limit=8, margin=4, tools=True).episodes.reward
    assert float(own[1] - batch.episodes.reward[1]) == -1.0  # nine tokens: bounded
    assert float(own[2] - batch.episodes.reward[2]) == 0.0  # three
    assert float(both[2] - batch.episodes.reward[2]) == -1.0  # and a prompt of five


def test_a_loss_is_given_what_its_parameters_are_named_after(batch):
    def odd(logprob, advantage, colour):
        return logprob * advantage

    with pytest.raises(ValueError, match="the loss asks for colour; there are logprob, log_ratio"):
        trained(batch, {"advantage": credit.grpo, "loss": partial(objective.policy, term=odd), "reduction": "token"})


def test_ppo_is_the_policy_loss_with_its_clip(batch):
    base = {"advantage": credit.grpo, "reduction": "token"}
    far = noisy(batch, 0.5, 7)
    ours = trained(batch, base | {"loss": partial(objective.ppo, clip_high=0.3)}, new=far)
    same = trained(batch, base | {"loss": partial(objective.policy, term=partial(policy_loss.ppo_clip, clip_high=0.3))}, new=far)
    np.testing.assert_array_equal(ours[1], same[1])


def test_a_sequence_may_be_a_turn(batch):
    base = {"advantage": credit.grpo, "reduction": "episode"}
    term = partial(sequence_loss.gspo, clip_low=0.2, clip_high=0.2)
    of_segments, of_turns = (trained(batch, base | {"loss": partial(objective.policy, term=term, unit=u)}) for u in ("segment", "turn"))
    assert not np.allclose(of_segments[1], of_turns[1])


def test_a_kl_without_a_reference_is_refused(batch):
    with pytest.raises(ValueError, match="reference=held"):
        trained(batch, {"advantage": credit.grpo, "loss": partial(objective.ppo, kl=0.1), "reduction": "token"})


@pytest.mark.parametrize(("denominator", "expected"), [("original", -1 / 3), ("kept", -1.0)])
def test_what_is_rejected_counts_or_not(denominator, expected):
    """Three tokens of loss -1 with ratios 3, 1 and 1/4, of which one is between 1/2 and 2."""
    episode = make_episode("a", turns=1, action=3)
    batch = jax.device_put(collate([episode], row_length=16)[0])
    ratio = jnp.log(jnp.array([3.0, 1.0, 0.25]))
    proximal = batch.tokens.logprob.at[batch.tokens.mask].add(ratio)
    found = correction.importance(
        batch.tokens,
        proximal,
        batch.tokens.logprob,
        upper=None,
        mode="raw",
        keep_level="token",
        keep_lower=0.5,
        keep_upper=2.0,
        denominator=denominator,
    )
    weights = token_weights(batch.tokens.mask & found.counted, batch.tokens.episode, batch.episodes.group)
    np.testing.assert_allclose(jnp.sum(weights * found.weight * -1.0), expected, rtol=1e-6)
