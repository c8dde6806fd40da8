import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from agentrl_jax.kernels import group
from agentrl_jax.kernels.returns import (
    decayed_outcome,
    discounted_return,
    edge,
    lambda_return,
    n_step_return,
    part_return,
    reshaped_outcome,
)
from agentrl_jax.kernels.scan import Steps, cumulative_sum, discounted_sum, following, time_order, windowed_sum
from agentrl_jax.kernels.units import row_count, runs

T = 8
rows = hypothesis.extra.numpy.arrays(np.float32, T, elements=st.floats(-2, 2, width=16))
masks = hypothesis.extra.numpy.arrays(bool, T)
n_step = jax.jit(n_step_return, static_argnames="n")
edges = jax.jit(edge, static_argnames="at")
window = jax.jit(windowed_sum, static_argnums=2)


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-5, rtol=2e-5)


def test_7a_discounted():
    close(discounted_return(jnp.array([0.0, 0.2, 1.0]), jnp.ones(3, bool), discount=0.9), [0.99, 1.1, 1])
    close(decayed_outcome(jnp.array([1.0]), jnp.ones((1, 3), bool), gamma=0.9), [[0.81, 0.9, 1]])


def test_decay_of_correct_episodes_alone():
    steps = jnp.array([[True, True, False], [True, True, True]])
    got = decayed_outcome(jnp.array([1.0, -1.0]), steps, gamma=0.9, where=jnp.array([True, False]))
    close(got, [[0.9, 1, 0], [-1, -1, -1]])


def test_1j_reinforcepp_hole():
    mask = jnp.array([1, 1, 0, 0, 1, 1], bool)
    reward = jnp.array([0.0, 0, 0, 0, 0, 1])
    close(discounted_return(reward, mask, discount=0.9), [0.729, 0.81, 0, 0, 0.9, 1])
    close(discounted_return(reward, mask, discount=0.9, steps=jnp.ones(6, bool)), [0.59049, 0.6561, 0, 0, 0.9, 1])


def test_returns_of_turns():
    reward = jnp.array([[0.0, 0.2, 1.0], [3.0, 9.0, 9.0]])
    exists = jnp.array([[True, True, True], [True, False, False]])
    got = discounted_return(jnp.where(exists, reward, 0.0), exists, discount=0.9)
    close(got, [[0.99, 1.1, 1], [3, 0, 0]])
    close(got, group.turn_returns(reward, exists, gamma=0.9))


def test_steps_in_any_order():
    episode, time = jnp.array([1, 0, 1, 0, 1]), jnp.array([2, 0, 0, 1, 1])
    reward = jnp.array([1.0, 10.0, 0.0, 20.0, 0.0])
    order, last = time_order(episode, time)
    sorted_ = discounted_return(reward[order], jnp.ones(5, bool), discount=jnp.where(last, 0.0, 0.5))
    close(jnp.zeros(5).at[order].set(sorted_), [1, 20, 0.25, 20, 0.5])


def loop(reward, value, mask, n, discount, lam, bootstrap):
    """n steps of the definition, from every action."""
    at, result = np.flatnonzero(mask), np.zeros(T)
    behind = [*value[at[1:]], bootstrap] if len(at) else []
    for i in range(len(at)):
        end = min(i + n, len(at)) - 1
        g = behind[end]
        for k in range(end, i - 1, -1):
            g = reward[at[k]] + discount * ((1 - lam) * behind[k] + lam * g)
        result[at[i]] = g
    return result


@hypothesis.given(rows, rows, masks, st.sampled_from([1, 2, 3, 5, 50]))
def test_n_steps_are_the_plain_loop(reward, value, mask, n):
    reward = np.where(mask, reward, 0)
    got = n_step(
        jnp.asarray(reward),
        jnp.asarray(np.where(mask, value, np.nan)),
        jnp.asarray(mask),
        n=n,
        discount=0.9,
        lam=0.7,
        truncated=jnp.array(True),
        bootstrap_value=jnp.asarray(0.5, jnp.float32),
    )
    close(got, loop(reward, value, mask, n, 0.9, 0.7, 0.5))


def test_n_steps_end_with_their_episode():
    # Two episodes in one row: the first terminated, then the first cut off on its trailing tool token.
    reward, value = jnp.array([0.0, 1.0, 0.0, 0.0, 2.0]), jnp.array([0.1, 0.2, jnp.nan, 0.3, 0.4])
    mask = jnp.array([True, True, False, True, True])
    close(n_step_return(reward, value, mask, n=3, discount=jnp.array([0.5, 0.0, 1.0, 0.5, 0.5])), [0.5, 1, 0, 1, 2])
    cut = jnp.array([False, False, True, False, False])
    got = n_step_return(reward, value, mask, n=3, discount=0.5, truncated=cut, bootstrap_value=jnp.full(5, 8.0))
    close(got, [2.5, 5, 0, 1, 2])


def test_all_steps_are_the_whole_return_and_one_is_the_target_of_archer():
    # 6a_archer: gamma .95, no reward, target values .8 and .7 of the next turn; and a last turn with reward 1.
    reward, exists = jnp.array([[0.0, 1.0], [0.0, 1.0]]), jnp.ones((2, 2), bool)
    value = jnp.array([[0.0, 0.8], [0.0, 0.7]])
    close(n_step_return(reward, value, exists, n=1, discount=0.95), [[0.76, 1], [0.665, 1]])
    close(n_step_return(reward, value, exists, n=2, discount=0.95), discounted_return(reward, exists, discount=0.95))
    close(n_step_return(reward, value, exists, n=2, discount=0.95, lam=0.3), lambda_return(reward, value, exists, discount=0.95, lam=0.3))


def test_return_of_parts():
    mask = jnp.array([[0, 1, 1, 0, 1, 0, 1, 1]], bool)
    reward = jnp.array([[jnp.nan, 5.0, 1.0, jnp.nan, 2.0, jnp.nan, 7.0, 4.0]])
    stretch = runs(mask.astype(jnp.int32))
    g = [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4]
    close(part_return(reward, mask, stretch, discount=0.5, take="last"), [[0, g[0], g[0], 0, g[1], 0, g[2], g[2]]])
    g = [6 + 0.5 * (2 + 0.5 * 11), 2 + 0.5 * 11, 11]
    close(part_return(reward, mask, stretch, discount=0.5), [[0, g[0], g[0], 0, g[1], 0, g[2], g[2]]])


@hypothesis.given(masks, hypothesis.extra.numpy.arrays(np.int32, T, elements=st.integers(0, T - 1)), st.sampled_from(["first", "last"]))
def test_edges(mask, part, at):
    got = np.asarray(edges(jnp.asarray(mask[None]), jnp.asarray(part[None]), at=at))[0]
    want = [where[0 if at == "first" else -1] for p in set(part.tolist()) if len(where := np.flatnonzero(mask & (part == p)))]
    assert set(np.flatnonzero(got)) == set(want)
    of_row = np.asarray(edges(jnp.asarray(mask[None]), None, at=at))[0]
    assert np.flatnonzero(of_row).tolist() == np.flatnonzero(mask)[: 1 if at == "first" else None][-1:].tolist()


@hypothesis.given(st.sampled_from([1, 5, 32, 33, 1200]), st.booleans(), st.integers(0, 99))
def test_prefix_sums_and_steps_are_numpys(width, reverse, seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(2, width)).astype(np.float32), rng.random((2, width)) < 0.4
    sums = np.cumsum(x[:, ::-1], 1)[:, ::-1] if reverse else np.cumsum(x, 1)
    np.testing.assert_allclose(cumulative_sum(jnp.asarray(x), reverse=reverse), sums, atol=1e-4)
    steps = Steps.of(jnp.asarray(mask))
    packed = steps.together(jnp.asarray(x), fill=7.0)
    for row in range(2):
        assert steps.number[row].tolist() == (np.cumsum(mask[row]) - 1).tolist()
        assert packed[row].tolist() == [*x[row][mask[row]].tolist(), *[7.0] * (width - mask[row].sum())]
    np.testing.assert_array_equal(np.asarray(steps.apart(packed))[mask], x[mask])
    np.testing.assert_array_equal(row_count(jnp.asarray(mask)), mask.sum(1))


@hypothesis.given(rows, rows, st.sampled_from([1, 3, 6, T + 2]))
def test_window_of_the_recurrence(x, decay, n):
    sums, product = map(np.asarray, window(jnp.asarray(x), jnp.asarray(decay), n))
    for t in range(T):
        y, p = 0.0, 1.0
        for k in reversed(range(t, min(t + n, T))):
            y, p = x[k] + decay[k] * y, p * decay[k]
        np.testing.assert_allclose([sums[t], product[t]], [y, p], atol=1e-3, rtol=1e-3)


def test_following():
    keep = jnp.array([True, False, True, False])
    close(following(jnp.array([1.0, jnp.nan, 3.0, jnp.nan]), keep), [3, 3, 0, 0])


def test_recurrence_has_the_gradient_of_a_loop():
    with jax.enable_x64():
        key = jax.random.key(1)
        x, decay = jax.random.normal(key, (2, 5))
        check_grads(lambda x, d: discounted_sum(x, d)[0], (x, decay), order=1, modes=["rev"])


def test_reshaped_outcome():
    close(reshaped_outcome(jnp.array([1.0, 3.0]), bias=-0.5, scale=2.0, limit=1.5), [1, 1.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: windowed_sum(x, x, 0), "0 steps"),
        (lambda x, m: edge(m[None], jnp.zeros((1, T), jnp.int32), "middle"), "first"),
        (lambda x, m: part_return(x[None], m[None], jnp.zeros((1, T), jnp.int32), take="max"), "sum"),
    ],
)
def test_nonsense_is_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(jnp.zeros(T), jnp.ones(T, bool))
