import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels.gae import gae
from agentrl_jax.kernels.group import group_relative
from agentrl_jax.kernels.turns import bi_level_gae, mt_grpo, to_tokens, to_turns

# Two rows: an episode of three turns with tool output between them, and one of a single turn, in its padding.
MASK = jnp.array([[0, 1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0]], bool)
EPISODE = jnp.array([[1] * 8, [0] * 8])
TURN = jnp.array([[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8])


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-5, rtol=2e-5)


def test_between_tokens_and_turns():
    x = jnp.where(MASK, jnp.arange(1.0, 17.0).reshape(2, 8), jnp.nan)
    close(to_turns(x, MASK, EPISODE, TURN, shape=(2, 3)), [[33, 0, 0], [5, 5, 15]])
    close(to_turns(x, MASK, EPISODE, TURN, shape=(2, 3), take="first"), [[10, 0, 0], [2, 5, 7]])
    close(to_turns(x, MASK, EPISODE, TURN, shape=(2, 3), take="last"), [[12, 0, 0], [3, 5, 8]])
    table = jnp.array([[1.0, jnp.nan, jnp.nan], [2.0, 3.0, 4.0]])
    close(to_tokens(table, MASK, EPISODE, TURN), [[0, 2, 2, 0, 3, 0, 4, 4], [0, 1, 1, 1, 0, 0, 0, 0]])
    close(to_tokens(table, MASK, EPISODE, TURN, at="last"), [[0, 0, 2, 0, 3, 0, 0, 4], [0, 0, 0, 1, 0, 0, 0, 0]])
    close(to_tokens(table, MASK, EPISODE, TURN, at="first"), [[0, 2, 0, 0, 3, 0, 4, 0], [0, 1, 0, 0, 0, 0, 0, 0]])


def test_14f_mtppo():
    # Two turns; .3 for the first, the outcome 1 for the second.
    mask, turn = jnp.array([[1, 1, 0, 1, 1]], bool), jnp.array([[0, 0, 0, 1, 1]])
    reward = to_tokens(jnp.array([[0.3, 1.0]]), mask, jnp.zeros_like(turn), turn, at="last")
    close(reward, [[0, 0.3, 0, 0, 1]])
    close(gae(reward, jnp.array([[0.2, 0.3, 9.0, 0.5, 0.6]]), mask, lam=0.9).advantages, [[0.9226, 0.914, 0, 0.46, 0.4]])


def bi_level(reward, value, turn, mask=None, **options):
    options = {"turn_discount": 0.95} | options
    mask = jnp.ones((1, len(reward)), bool) if mask is None else jnp.asarray(mask, bool)[None]
    row = [jnp.asarray(x, jnp.float32)[None] for x in (reward, value)]
    return jax.tree.map(lambda x: x[0], bi_level_gae(*row, mask, jnp.asarray(turn)[None], **options))


VALUES = np.arange(1, 11) / 10


def test_5a_ragen_unit_example():
    out = bi_level([0, 0, 0, 0, 1, 0, 0, 0, 0, 1], VALUES, [0] * 5 + [1] * 5)
    close(out.advantages, [1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0])
    close(out.returns, [1.95] * 5 + [1] * 5)


def test_5b_bilevel_zero_reward_turn():
    out = bi_level([0] * 9 + [1], VALUES, [0] * 5 + [1] * 5)
    close(out.advantages, [0.85, 0.75, 0.65, 0.55, 0.45, 0.4, 0.3, 0.2, 0.1, 0])
    merged = bi_level([0] * 9 + [1], VALUES, [0] * 10)
    close(merged.advantages, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0])


def test_rewards_count_wherever_in_their_turn_they_stand():
    want = bi_level([0, 0, 3, 0, 0, 4], VALUES[:6], [0, 0, 0, 1, 1, 1]).advantages
    close(bi_level([1, 2, 0, 4, 0, 0], VALUES[:6], [0, 0, 0, 1, 1, 1]).advantages, want)
    # ... and behind it, on tool output
    out = bi_level([0, 0, 0, 3, 0, 0, 0, 4], [0.1, 0.2, 0.3, 9, 0.4, 0.5, 0.6, 9], [0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 0])
    close(out.advantages, [*want[:3], 0, *want[3:], 0])


def test_value_of_a_turn_before_its_action():
    # Turn targets by hand: turn 2 earns 1; turn 1 .5 * (1 - .3) + .5 * .3 + ... with gamma .5 and lambda .8 over turns.
    out = bi_level([0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1], value_at="first", turn_discount=0.5, turn_lam=0.8)
    second = 1 - 0.3
    first = 0.5 * 0.3 - 0.1 + 0.4 * second
    close(out.returns, [first + 0.1, first + 0.1, 1, 1])


def test_a_truncated_last_turn_has_a_value_behind_it():
    options = {"truncated": jnp.array([True]), "bootstrap_value": jnp.array([0.8])}
    close(bi_level([0, 0, 0, 0], [0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1], turn_discount=0.5, **options).returns, [0.2, 0.2, 0.4, 0.4])


def test_3a_mtgrpo_of_two_turns():
    in_stats, group = jnp.ones(4, bool), jnp.zeros(4, jnp.int32)
    reward = jnp.array([[1.0, 0], [0, 0], [0, 0], [0, 0]])
    own = jax.vmap(group_relative, (1, None, None), 1)(reward, group, in_stats)
    outcome = group_relative(jnp.array([1.0, 0, 1, 1]), group, in_stats)
    exists = jnp.ones((4, 2), bool)
    paper = mt_grpo(own, outcome, exists, weight=0.5)
    close(paper[:, 0], [2.0207259, -1.4433757, -0.2886751, -0.2886751])
    close(paper[:, 1], outcome)
    code = mt_grpo(own, outcome, exists, on="turn")
    close(code[:, 0], [2.3094011, -2.3094011, 0, 0])
    close(code[:, 1], outcome)


def test_3b_mtgrpo_of_three_turns():
    own, exists = jnp.array([[0.4, -0.2, 7.0], [9.0, jnp.nan, jnp.nan]]), jnp.array([[True] * 3, [True, False, False]])
    # The second episode has one turn: its advantage is the outcome's.
    close(mt_grpo(own, jnp.array([1.0, 2.0]), exists, weight=0.5), [[0.55, 0.3, 1], [2, 0, 0]])
    close(mt_grpo(own, jnp.array([1.0, 2.0]), exists, weight=0.5, on="turn"), [[1.2, 0.9, 1], [2, 0, 0]])


bi_level_run, gae_run = jax.jit(bi_level_gae), jax.jit(gae)


@hypothesis.given(hypothesis.extra.numpy.arrays(np.float32, (2, 8), elements=st.floats(-2, 2, width=16)))
def test_one_turn_over_all_is_token_gae_of_the_outcome(x):
    reward, value = jnp.asarray(x[:, None])
    mask = jnp.array([[1, 1, 0, 1, 1, 0, 0, 1]], bool)
    got = bi_level_run(reward, value, mask, jnp.zeros((1, 8), jnp.int32), discount=0.9, lam=0.8)
    outcome = jnp.zeros((1, 8)).at[0, 7].set(jnp.sum(reward))
    close(got.advantages, gae_run(outcome, value, mask, discount=0.9, lam=0.8).advantages)


def test_nonsense_is_refused():
    with pytest.raises((ValueError, TypeError), match="outcome"):
        mt_grpo(jnp.zeros((1, 1)), jnp.zeros(1), jnp.ones((1, 1), bool), on="both")
