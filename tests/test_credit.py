from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax import credit
from agentrl_jax.data.batch import Batch, Episodes, Tokens

# The seeds' worked example: a bug in parse_date, four trajectories of three turns, rewards [1, 0, 1, 1].
# Turn 1 starts from the same state for all; turn 2 of the first two starts after the same read.
STATES = [[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 6, 7]]


def worked_example(observation=3, action=2):
    """Each turn: `action` policy tokens, then `observation` tool tokens."""
    turn = np.repeat(np.arange(3), action + observation)
    mask = np.tile(np.arange(action + observation) < action, 3)
    t = len(turn)

    def rows(x, dtype):
        return jnp.asarray(np.broadcast_to(x, (4, t)).astype(dtype))

    tokens = Tokens(
        ids=rows(7, np.int32),
        position=rows(np.arange(t), np.int32),
        segment=rows(1, np.int32),
        episode=rows(np.arange(4)[:, None], np.int32),
        turn=rows(turn, np.int32),
        action=rows(np.where(mask, np.cumsum(mask) - 1, -1), np.int32),
        mask=rows(mask, bool),
        in_loss=rows(mask, bool),
        logprob=rows(np.where(mask, -1.0, 0.0), np.float32),
        temperature=rows(1.0, np.float32),
        version=rows(np.where(mask, 0, -1), np.int32),
        predict=rows(np.arange(t), np.int32)[:, : 3 * action],
    )
    episodes = Episodes(
        group=jnp.zeros(4, jnp.int32),
        reward=jnp.array([1.0, 0.0, 1.0, 1.0]),
        components=jnp.zeros((4, 0)),
        in_stats=jnp.ones(4, bool),
        in_loss=jnp.ones(4, bool),
        truncated=jnp.zeros(4, bool),
        turn_exists=jnp.ones((4, 3), bool),
        turn_reward=jnp.zeros((4, 3)),
        turn_valid=jnp.ones((4, 3), bool),
        turn_in_loss=jnp.ones((4, 3), bool),
        state=jnp.array(STATES, jnp.int32),
    )
    return Batch(tokens, episodes)


def per_turn(batch, advantages):
    """The one advantage that all policy tokens of each turn share."""
    out = np.zeros((4, 3))
    for e in range(4):
        for k in range(3):
            here = np.asarray(batch.tokens.mask[e]) & (np.asarray(batch.tokens.turn[e]) == k)
            values = np.asarray(advantages[e])[here]
            assert (values == values[0]).all()
            out[e, k] = values[0]
    return out


def test_one_number_on_every_policy_token_and_none_elsewhere():
    batch = worked_example()
    advantages = credit.grpo(batch, credit.Estimates()).advantages
    np.testing.assert_allclose(per_turn(batch, advantages), np.tile([[0.577350], [-1.732051], [0.577350], [0.577350]], 3), atol=5e-6)
    assert (np.asarray(advantages)[~np.asarray(batch.tokens.mask)] == 0).all()


def test_gigpo_on_the_worked_example():
    batch = worked_example()
    advantages = per_turn(batch, credit.gigpo(batch, credit.Estimates()).advantages)
    # Turn 1: the anchor group is the whole group, so A^S equals A^E. Turn 2: the pair. Turn 3: nothing repeats.
    np.testing.assert_allclose(advantages[:, 0], 2 * np.array([0.577350, -1.732051, 0.577350, 0.577350]), atol=1e-5)
    np.testing.assert_allclose(advantages[:, 1], [1.577350, -2.732051, 0.577350, 0.577350], atol=1e-5)
    np.testing.assert_allclose(advantages[:, 2], [0.577350, -1.732051, 0.577350, 0.577350], atol=1e-5)


def test_gigpo_without_repeated_states_is_grpo():
    batch = worked_example()
    lonely = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    batch = Batch(batch.tokens, jax.tree.map(lambda x: x, batch.episodes).__class__(**{**vars(batch.episodes), "state": lonely}))
    both = [rule(batch, credit.Estimates()).advantages for rule in (credit.gigpo, credit.grpo)]
    np.testing.assert_array_equal(*both)


def test_more_tool_output_changes_no_advantage():
    rule = partial(credit.gigpo, omega=0.5)
    short, long = worked_example(observation=3), worked_example(observation=40)
    np.testing.assert_array_equal(*(per_turn(batch, jax.jit(rule)(batch, credit.Estimates()).advantages) for batch in (short, long)))
