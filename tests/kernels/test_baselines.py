import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.kernels import baselines
from agentrl_jax.kernels.group import group_relative

ONE_GROUP, ALL = jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
REWARDS = jnp.array([1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("std", "rewards", "expected"),
    [
        ("none", [0.3, 0.9, 0.5], [0.0, 0.4, 0.0]),
        ("sample", [0.3, 0.9, 0.5], [0.0, 1.309307, 0.0]),
        ("none", [0.9, 0.9, 0.5], [0.0, 0.0, 0.0]),
        ("sample", [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ("none", [0.7], [0.0]),
    ],
)
def test_what_the_best_of_a_group_is_owed(std, rewards, expected):
    n = len(rewards)
    advantage = baselines.pass_at_k(jnp.array(rewards), jnp.zeros(n, jnp.int32), jnp.ones(n, bool), std=std)
    np.testing.assert_allclose(advantage, expected, atol=1e-5)


def test_pass_at_k_is_a_leave_one_out_baseline_of_the_best():
    rng = np.random.default_rng(0)
    reward, group = rng.integers(0, 4, 12).astype(np.float32), np.repeat(np.arange(3), 4).astype(np.int32)
    member = rng.random(12) < 0.8
    advantage = baselines.pass_at_k(jnp.array(np.where(member, reward, np.nan)), jnp.array(group), jnp.array(member))
    for i in range(12):
        others = [reward[j] for j in range(12) if j != i and group[j] == group[i] and member[j]]
        expected = max(*others, reward[i]) - max(others) if member[i] and others else 0.0
        np.testing.assert_allclose(advantage[i], expected)


def test_max_rl():
    np.testing.assert_allclose(baselines.max_rl(REWARDS, ONE_GROUP, ALL), [1 / 3, -1, 1 / 3, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(baselines.max_rl(-REWARDS, ONE_GROUP, ALL), [0, 0, 0, 0])
    np.testing.assert_allclose(baselines.max_rl(0 * REWARDS, ONE_GROUP, ALL), [0, 0, 0, 0])
    np.testing.assert_allclose(baselines.max_rl(REWARDS, ONE_GROUP, ALL, eps=0.25), [0.25, -0.75, 0.25, 0.25])


@pytest.mark.parametrize(
    ("informative", "expected"), [("varied", [0.5, -1.5, 0.5, 0.5]), ("nonzero", [0.666667, -2.0, 0.666667, 0.666667])]
)
def test_gpg_makes_up_for_the_groups_that_teach_nothing(informative, expected):
    reward, group = jnp.array([1.0, 0, 1, 1, 0, 0, 0, 0]), jnp.array([0, 0, 0, 0, 1, 1, 1, 1], jnp.int32)
    everyone = jnp.ones(8, bool)
    scale = baselines.gpg_scale(reward, group, everyone, informative=informative)
    np.testing.assert_allclose(scale * group_relative(reward, group, everyone, std="none"), expected + [0] * 4, atol=1e-5)
    assert baselines.gpg_scale(jnp.zeros(8), group, everyone, informative=informative) == 8.0


PARTS = jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (None, [-0.206079, -1.332114, 0.769096, 0.769096]),
        ([2.0, 4.0, 1.0, 3.0], [0.060890, -1.075336, 1.044891, 1.044891]),
    ],
)
def test_gdpo_whitens_over_episodes_or_over_tokens(count, expected):
    present, weights = jnp.ones((4, 2), bool), jnp.ones(2)
    count = None if count is None else jnp.array(count)
    advantage = baselines.gdpo(PARTS, weights, ONE_GROUP, present, std="sample", eps=1e-6, divisor="sample", count=count)
    np.testing.assert_allclose(advantage, expected, atol=2e-5)


def test_gdpo_without_some_rewards():
    # The second row has no first reward, the last row none at all: they are in no statistic of what they lack.
    present = jnp.array([[True, True], [False, True], [True, True], [False, False]])
    poisoned = jnp.where(present, PARTS, jnp.nan)
    advantage = baselines.gdpo(poisoned, jnp.array([1.0, 2.0]), ONE_GROUP, present)
    total, counts = baselines.weighted_sum(poisoned, jnp.array([1.0, 2.0]), present)
    np.testing.assert_array_equal(counts, [True, True, True, False])
    np.testing.assert_allclose(total, [1, 0, 3, 0])
    # The first column is all ones where it is present: 0. The second is [0, 0, 1].
    np.testing.assert_allclose(advantage, [-0.707107, -0.707107, 1.414214, 0.0], atol=1e-5)


def test_costs_count_against_the_dearest_and_by_how_well_the_group_does():
    costs = jnp.array([[10.0, 0.0], [20.0, 0.0], [5.0, 0.0], [20.0, 0.0]])
    f = lambda r: baselines.cost_penalty(r, costs, jnp.array([0.4, 1.0]), ONE_GROUP, ALL)  # noqa: E731
    np.testing.assert_allclose(f(REWARDS), REWARDS - 0.75 * 0.4 * jnp.array([0.5, 1.0, 0.25, 1.0]), atol=1e-6)
    np.testing.assert_allclose(f(0 * REWARDS), [0, 0, 0, 0])


def test_a_baseline_per_role_that_lasts():
    reward, role = jnp.array([1.0, 2.0, jnp.nan, 3.0]), jnp.array([0, 1, 0, 0], jnp.int32)
    member = jnp.array([True, True, False, True])
    advantage, after = jax.jit(baselines.running_baseline, static_argnames="decay")(reward, role, member, jnp.zeros(2), decay=0.5)
    np.testing.assert_allclose(advantage, [1.0, 2.0, 0.0, 2.5])
    np.testing.assert_allclose(after, [1.75, 1.0])


def test_remax():
    reward, mask = jnp.array([[0.0, 0.2, jnp.nan, 1.0]]), jnp.array([[True, True, False, True]])
    np.testing.assert_allclose(baselines.remax(reward, mask, jnp.array([0.5])), [[0.7, 0.7, 0.0, 0.5]], atol=1e-6)


def dense_token_baseline(returns, energy, mask, group, align):
    """Loops over tokens; a token without counterparts gets 0."""
    out = np.zeros_like(returns)
    grown = np.cumsum(np.where(mask, energy, 0), axis=1)
    index = np.cumsum(mask, axis=1) - 1 if align == "action" else np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        same = [(j, u) for j, u in zip(*np.nonzero(mask), strict=True) if group[j] == group[i] and index[j, u] == index[i, t]]
        if len(same) > 1:
            out[i, t] = returns[i, t] - sum(returns[c] * grown[c] for c in same) / sum(grown[c] for c in same)
    return out


token_baseline = jax.jit(baselines.optimal_token_baseline, static_argnames=("align", "tail", "singleton", "eps"))


@settings(max_examples=10)
@given(st.integers(0, 1000))
@pytest.mark.parametrize("align", ["action", "position"])
def test_the_baseline_of_each_token(align, seed):
    rng = np.random.default_rng(seed)
    mask, group = rng.random((5, 6)) < 0.6, rng.integers(0, 2, 5).astype(np.int32)
    returns, energy = rng.normal(size=(5, 6)).astype(np.float32), rng.random((5, 6)).astype(np.float32)
    expected = dense_token_baseline(returns, energy, mask, group, align)
    holes = [jnp.array(np.where(mask, x, np.float32(np.nan))) for x in (returns, energy)]
    found = token_baseline(*holes, jnp.array(mask), jnp.array(group), align=align)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_tool_output_shifts_no_action():
    returns, energy = jnp.array([[3.0, 2.0, 1.0], [1.0, 1.0, 0.0]]), jnp.array([[0.5, 1.0, 0.5], [1.0, 1.0, 1.0]])
    group, mask = jnp.zeros(2, jnp.int32), jnp.ones((2, 3), bool)
    plain = baselines.optimal_token_baseline(returns, energy, mask, group)
    apart = [0, 3, 5]  # where the three actions stand once two tool outputs are between them
    spread = [jnp.full((2, 6), jnp.nan).at[:, apart].set(x) for x in (returns, energy)]
    wide = baselines.optimal_token_baseline(*spread, jnp.zeros((2, 6), bool).at[:, apart].set(True), group)
    np.testing.assert_array_equal(wide[:, apart], plain)


def test_tokens_without_counterparts_and_rows_without_company():
    returns = jnp.array([[3.0, 2.0, 1.0], [1.0, 0.0, 0.0], [5.0, 5.0, 5.0]])
    energy, group = jnp.ones((3, 3)), jnp.array([0, 0, 1], jnp.int32)
    mask = jnp.array([[True, True, True], [True, False, False], [True, True, False]])
    f = lambda **o: baselines.optimal_token_baseline(returns, energy, mask, group, **o)  # noqa: E731
    np.testing.assert_allclose(f(), [[1, 0, 0], [-1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(f(tail="raw"), [[1, 2, 1], [-1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(f(tail="raw_by_count", singleton="raw"), [[1, 2, 1], [-1, 0, 0], [5, 5, 0]])
    crashed = f(in_stats=jnp.array([True, False, True]), singleton="raw")
    np.testing.assert_allclose(crashed, [[3, 2, 1], [0, 0, 0], [5, 5, 0]])


def test_energy_is_the_squared_gradient_on_the_logits():
    logits = jnp.array([0.3, -1.0, 2.0])
    pi = jax.nn.softmax(logits)
    gradient = jax.grad(lambda x: jax.nn.log_softmax(x)[1])(logits)
    energy = baselines.score_energy(jnp.log(pi[1]).reshape(1, 1), jnp.sum(pi**2).reshape(1, 1))
    np.testing.assert_allclose(energy[0, 0], jnp.sum(gradient**2), rtol=1e-5)
