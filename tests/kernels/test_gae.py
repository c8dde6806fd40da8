"""GAE against a plain loop, worked numbers by the name they have in the notes, and what must not change an advantage."""

import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels.gae import adaptive_lambda, anchored, gae, segment_factor

T = 8

f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
rows = hypothesis.extra.numpy.arrays(np.float32, T, elements=st.floats(-2, 2, width=16))
masks = hypothesis.extra.numpy.arrays(bool, T)
factors = st.floats(0, 1, width=16)


run = jax.jit(gae, static_argnames="off_step")


def loop(reward, value, mask, discount, lam, truncated=False, bootstrap=0.0):
    """The definition, one token after the other; a reward off the mask is dropped."""
    advantage, next_value, later = np.zeros(len(reward)), bootstrap if truncated else 0.0, 0.0
    for t in reversed(range(len(reward))):
        if mask[t]:
            later = reward[t] + discount * next_value - value[t] + discount * lam * later
            next_value = value[t]
            advantage[t] = later
    return advantage


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-5, rtol=2e-5)


EXAMPLES = {
    "4a_gae_skip_tiny": ([0, 0, 1], [0.2, 999, 0.4], [1, 0, 1], 1.0, 1.0, {}, [0.8, 0, 0.6], [1, 0, 1]),
    "4b_gae_skip_g.9_l.8": (
        [0, 0, 0, 0, 0, 1],
        [0.1, 0.2, 9, 9, 0.3, 0.5],
        [1, 1, 0, 0, 1, 1],
        0.9,
        0.8,
        {},
        [0.394784, 0.4372, 0, 0, 0.51, 0.5],
        [0.494784, 0.6372, 0, 0, 0.81, 1],
    ),
    "4c_gae_noskip_same_input": (
        [0, 0, 0, 0, 0, 1],
        [0.1, 0.2, 9, 9, 0.3, 0.5],
        [1, 1, 0, 0, 1, 1],
        0.9,
        0.8,
        {"steps": jnp.ones(6, bool)},
        [2.1800416, 2.9167245, 0, 0, 0.51, 0.5],
        [2.2800416, 3.1167245, 0, 0, 0.81, 1],
    ),
    "4d_reward_on_masked_token: anchored": ([0, 0, 0, 1], [0.5] * 4, [1, 1, 1, 0], 1.0, 1.0, {}, [0.5, 0.5, 0.5, 0], [1, 1, 1, 0]),
    "4d_reward_on_masked_token: dropped": (
        [0, 0, 0, 1],
        [0.5] * 4,
        [1, 1, 1, 0],
        1.0,
        1.0,
        {"off_step": "drop"},
        [-0.5, -0.5, -0.5, 0],
        [0, 0, 0, 0],
    ),
    "4e_truncation_bootstrap_V.7: truncated": (
        [0, 0, 0],
        [0.2, 0.4, 0.6],
        [1, 1, 1],
        0.9,
        0.8,
        {"truncated": jnp.array(True), "bootstrap_value": f32(0.7)},
        [0.276352, 0.1616, 0.03],
        [0.476352, 0.5616, 0.63],
    ),
    "4e_truncation_bootstrap_V.7: terminated": (
        [0, 0, 0],
        [0.2, 0.4, 0.6],
        [1, 1, 1],
        0.9,
        0.8,
        {"truncated": jnp.array(False), "bootstrap_value": f32(jnp.nan)},
        [-0.05024, -0.292, -0.6],
        [0.14976, 0.108, 0],
    ),
    "4f_trunc_with_trailing_tool": (
        [0, 0, 0, 0],
        [0.2, 0.4, 9, 9],
        [1, 1, 0, 0],
        1.0,
        1.0,
        {"truncated": jnp.array(True), "bootstrap_value": f32(0.7)},
        [0.5, 0.3, 0, 0],
        [0.7, 0.7, 0, 0],
    ),
    "4g_lambda1_is_MC_minus_V": (
        [0, 0, 0, 0, 0, 1],
        [0.1, 0.2, 9, 9, 0.3, 0.5],
        [1, 1, 0, 0, 1, 1],
        0.9,
        1.0,
        {},
        [0.629, 0.61, 0, 0, 0.6, 0.5],
        [0.729, 0.81, 0, 0, 0.9, 1],
    ),
    "5c_turn_gae": ([0, 0, 1], [0.3, 0.5, 0.6], [1, 1, 1], 0.9, 0.95, {}, [0.47661, 0.382, 0.4], [0.77661, 0.882, 1]),
    "14f_mtppo": (
        [0, 0.3, 0, 0, 1],
        [0.2, 0.3, 9, 0.5, 0.6],
        [1, 1, 0, 1, 1],
        1.0,
        0.9,
        {},
        [0.9226, 0.914, 0, 0.46, 0.4],
        [1.1226, 1.214, 0, 0.96, 1],
    ),
    "14g_empty_mask_row": ([0, 0, 1], [jnp.nan] * 3, [0, 0, 0], 1.0, 1.0, {}, [0, 0, 0], [0, 0, 0]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name):
    reward, value, mask, discount, lam, options, advantages, returns = EXAMPLES[name]
    out = run(f32(reward), f32(value), jnp.asarray(mask, bool), discount=discount, lam=lam, **options)
    close(out.advantages, advantages)
    close(out.returns, returns)


@hypothesis.given(rows, rows, masks, factors, factors, st.booleans())
def test_is_the_plain_loop(reward, value, mask, discount, lam, truncated):
    out = run(
        f32(reward),
        f32(value),
        jnp.asarray(mask),
        discount=discount,
        lam=lam,
        truncated=jnp.asarray(truncated),
        bootstrap_value=f32(0.5),
        off_step="drop",
    )
    want = loop(reward, value, mask, discount, lam, truncated, 0.5)
    close(out.advantages, want)
    close(out.returns, np.where(mask, want + value, 0))


@hypothesis.given(rows, rows, masks, factors)
def test_tool_tokens_change_no_advantage(reward, value, mask, lam):
    # The actions alone, and the same with anything between them: NaN values, and rewards that arrived late.
    n = mask.sum()
    actions = np.pad(np.ones(n, bool), (0, T - n))
    packed_reward = np.pad(np.asarray(anchored(f32(reward), jnp.asarray(mask)))[mask], (0, T - n))
    alone = run(f32(packed_reward), f32(np.pad(value[mask], (0, T - n))), jnp.asarray(actions), discount=0.9, lam=lam)
    among = run(f32(reward), f32(np.where(mask, value, np.nan)), jnp.asarray(mask), discount=0.9, lam=lam)
    close(among.advantages[mask], alone.advantages[:n])
    close(among.returns[mask], alone.returns[:n])
    assert (np.asarray(among.advantages)[~mask] == 0).all()


@hypothesis.given(rows, rows, masks, st.integers(1, T - 1), st.booleans())
def test_episodes_in_one_row_are_those_in_rows_of_their_own(reward, value, mask, split, truncated):
    # The discount ends an episode at its last action; a cut may stand anywhere behind that.
    reward = np.where(mask, reward, 0.0)
    inside = np.arange(T) < split
    first_mask, second_mask = mask & inside, mask & ~inside
    cut = jnp.asarray((np.arange(T) == split - 1) & truncated)
    ends = np.flatnonzero(first_mask)[-1:]
    discount = np.full(T, 0.9, np.float32)
    if not truncated:
        discount[ends] = 0
    flat = run(
        f32(reward), f32(value), jnp.asarray(mask), discount=f32(discount), lam=0.8, truncated=cut, bootstrap_value=f32(np.full(T, 0.5))
    )
    close(
        flat.advantages,
        loop(reward, value, first_mask, 0.9, 0.8, truncated, 0.5) + loop(reward, value, second_mask, 0.9, 0.8),
    )


def test_rows_batches_and_turns_are_all_the_same():
    key = jax.random.key(0)
    reward, value = jax.random.normal(key, (2, 3, 5, T))
    mask = jax.random.bernoulli(key, 0.6, (3, 5, T))
    lam = jax.random.uniform(key, (3, 5, 1))
    whole = gae(reward, value, mask, discount=0.9, lam=lam).advantages
    for b, e in ((0, 0), (2, 4)):
        close(whole[b, e], gae(reward[b, e], value[b, e], mask[b, e], discount=0.9, lam=lam[b, e, 0]).advantages)


def test_own_lambda_of_the_critic():
    arguments = f32([0, 0, 0, 1]), f32([0.1, 0.2, 0.3, 0.5]), jnp.ones(4, bool)
    both = gae(*arguments, discount=0.9, lam=0.5, value_lam=1.0)
    close(both.advantages, gae(*arguments, discount=0.9, lam=0.5).advantages)
    close(both.returns, [0.729, 0.81, 0.9, 1])


def test_nan_under_the_mask_reaches_no_gradient():
    mask = jnp.array([True, False, True, False])
    gradient = jax.grad(lambda v: jnp.sum(gae(f32([0, 0, 1, 0]), v, mask, discount=0.9, lam=0.8).advantages))(
        f32([0.1, jnp.nan, 0.3, jnp.inf])
    )
    close(gradient, [-1, 0, 0.9 - 1 - 0.9 * 0.8, 0])


def test_reward_before_the_first_action_is_nobodys():
    close(anchored(f32([5, 0, 1, 2]), jnp.array([False, True, False, False])), [0, 3, 0, 0])


def test_float64():
    with jax.enable_x64():
        out = gae(jnp.array([0.0, 1.0]), jnp.array([0.1, 0.2]), jnp.ones(2, bool), discount=0.9, lam=0.8)
        assert out.advantages.dtype == jnp.float64
        np.testing.assert_allclose(out.advantages, [0.9 * 0.2 - 0.1 + 0.72 * 0.8, 0.8], rtol=1e-14)


@pytest.mark.parametrize(("options", "message"), [({"truncated": jnp.array(True)}, "go together"), ({"off_step": "keep"}, "anchor.*drop")])
def test_nonsense_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gae(f32([0.0]), f32([0.0]), jnp.ones(1, bool), **options)


def test_4i_length_adaptive_lambda():
    close(adaptive_lambda(jnp.array([0, 1, 100, 1000])), [0, 0.3333333, 0.9933333, 0.9993333])


@pytest.mark.parametrize(
    ("tokens", "want"),
    [([100, 100, 100], [0.2624230, 0.5122724, 1]), ([3000, 300, 3000], [0.4802662, 0.0012632, 1])],
    ids=["12c_compactionrl_equal", "12d_compactionrl_short_summary"],
)
def test_factors_of_segments(tokens, want):
    # A second episode in between, and the first one's segments in reverse.
    tokens = jnp.array([*tokens[::-1], 7])
    got = segment_factor(tokens, jnp.array([1, 1, 1, 0]), jnp.array([2, 1, 0, 0]), lam=adaptive_lambda(tokens))
    np.testing.assert_allclose(got, [*want[::-1], 1], rtol=2e-3)
