import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.covariance import choose, clip_cov, clip_cov_candidates, covariance, kl_cov, most_covariant, share
from agentrl_jax.kernels.policy_loss import masked_log_ratio, ppo_clip

LOGPROB, OLD = jnp.array([[-0.1, -2.0, -0.5, -1.4]]), jnp.array([[-0.2, -1.9, -0.5, -1.0]])
ADVANTAGE = jnp.array([[1.0, 1.0, -1.0, -1.0]])
MASK = jnp.ones((1, 4), bool)


def test_8g_klcov():
    value = covariance(LOGPROB, ADVANTAGE, MASK)
    np.testing.assert_allclose(value, [[0.9, -1.0, -0.5, 0.4]], atol=1e-6)
    count = share(MASK, 2e-4)
    assert count == 1
    pulled = most_covariant(value, MASK, count)
    assert pulled.tolist() == [[True, False, False, False]]
    loss = kl_cov(LOGPROB - OLD, ADVANTAGE, pulled)
    np.testing.assert_allclose(loss, [[-1.005171, -0.904837, 1.0, 0.670320]], atol=1e-6)
    np.testing.assert_allclose(loss.mean(), -0.059922, atol=1e-6)


@pytest.mark.parametrize(("tokens", "fraction", "expected"), [(1000, 2e-4, 1), (100000, 2e-4, 20), (5, 0.2, 1), (10, 0.7, 7), (0, 0.5, 1)])
def test_8g2_a_share_is_rounded_down_and_at_least_one(tokens, fraction, expected):
    assert share(jnp.arange(100000) < tokens, fraction) == expected


def test_clip_cov_drops_chosen_tokens_only():
    """Of the covariances [.9, -1, -.5, .4] two are in (.3, 5); the fourth is clipped by PPO (r = .67, A < 0)."""
    log_ratio = LOGPROB - OLD
    candidates = clip_cov_candidates(log_ratio, LOGPROB, ADVANTAGE, MASK, lower=0.3)
    assert candidates.tolist() == [[True, False, False, False]]
    loss = clip_cov(log_ratio, ADVANTAGE, choose(candidates, share(MASK, 2e-4)))
    np.testing.assert_allclose(loss, ppo_clip(log_ratio, ADVANTAGE).at[0, 0].set(0.0), atol=1e-6)
    assert jax.grad(lambda x: clip_cov(x, ADVANTAGE, candidates).sum())(log_ratio)[0, 0] == 0
    assert not clip_cov_candidates(log_ratio, LOGPROB, ADVANTAGE, MASK, lower=0.9001).any()
    assert clip_cov_candidates(log_ratio, LOGPROB, ADVANTAGE, MASK, lower=0.3, clip_low=0.9).tolist() == [[True, False, False, True]]


def test_on_policy_the_absolute_value_has_no_gradient():
    """|log ratio| at 0: the subgradient 0, and not the 1 of `jnp.abs`."""
    g = jax.grad(lambda x: kl_cov(x, ADVANTAGE, MASK).sum())(jnp.zeros((1, 4)))
    np.testing.assert_array_equal(g, -ADVANTAGE)


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(0, 12), count=st.integers(0, 14))
def test_a_selection_is_of_the_mask_and_of_the_right_size(seed, tokens, count):
    random = np.random.RandomState(seed)
    mask = jnp.asarray((random.permutation(12) < tokens).reshape(3, 4))
    value = jnp.asarray(np.where(mask, random.randint(0, 4, (3, 4)), np.nan), jnp.float32)  # with ties
    key = jax.random.key(seed)
    found = {
        "top": most_covariant(value, mask, jnp.asarray(count)),
        "random": choose(mask, jnp.asarray(count), key),
        "first": choose(mask, jnp.asarray(count)),
    }
    for name, selected in found.items():
        assert not (selected & ~mask).any(), name
        assert selected.sum() == min(count, tokens), name
    left_out = np.asarray(value)[np.asarray(mask & ~found["top"])]
    assert count == 0 or not left_out.size or np.asarray(value)[np.asarray(found["top"])].min() >= left_out.max()
    order = np.cumsum(np.asarray(mask).ravel()).reshape(3, 4)
    np.testing.assert_array_equal(found["first"], np.asarray(mask) & (order <= count))
    np.testing.assert_array_equal(found["random"], choose(mask, jnp.asarray(count), key))


def test_the_draw_is_uniform():
    candidates = jnp.array([True, False, True, True, True])
    draws = jax.vmap(lambda key: choose(candidates, jnp.asarray(2), key))(jax.random.split(jax.random.key(0), 2000))
    np.testing.assert_allclose(draws.mean(0), [0.5, 0, 0.5, 0.5, 0.5], atol=0.05)


SHAPE = (3, 5)
TOKENS = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [1, 1, 1, 0, 1]], bool)


def points():
    random = np.random.RandomState(10)
    old = -random.uniform(0.3, 2.0, SHAPE)
    return {"new": old + random.uniform(-0.6, 0.6, SHAPE), "old": old, "advantage": random.normal(size=SHAPE)}


@jax.jit
def values_and_gradients(arrays):
    mask = jnp.asarray(TOKENS)

    def losses(new):
        advantage, logprob = jnp.where(mask, arrays["advantage"], 0.0), jnp.where(mask, new, 0.0)
        log_ratio = masked_log_ratio(new, arrays["old"], mask)
        value = covariance(logprob, advantage, mask)
        candidates = clip_cov_candidates(log_ratio, logprob, advantage, mask, lower=0.05)
        return {
            "kl_cov": kl_cov(log_ratio, advantage, most_covariant(value, mask, share(mask, 0.4)), coefficient=0.7),
            "clip_cov": clip_cov(log_ratio, advantage, choose(candidates, share(mask, 0.2))),
        }

    def total(new, name):
        value = losses(new)[name]
        return jnp.sum(jnp.where(mask, value, 0.0)), value

    return {name: jax.grad(total, has_aux=True)(arrays["new"], name) for name in ("kl_cov", "clip_cov")}


def surrogate(new):
    """Both in numpy, the selection made at the fixed point."""
    x = points()

    def centred(y):
        return y - y[TOKENS].mean()

    value = np.where(TOKENS, centred(x["new"]) * centred(x["advantage"]), -np.inf)
    count = TOKENS.sum()
    log_ratio, fixed, advantage = new - x["old"], np.exp(x["new"] - x["old"]), x["advantage"]
    top = value >= np.sort(value.ravel())[-int(0.4 * count)]
    stopped = (fixed > 1.2) & (advantage > 0) | (fixed < 0.8) & (advantage < 0)
    candidates = TOKENS & (value > 0.05) & (value < 5) & ~stopped
    first = candidates & (np.cumsum(candidates).reshape(SHAPE) <= int(0.2 * count))
    assert first.sum() == int(0.2 * count)
    ratio = np.exp(log_ratio)
    clip = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2))
    return {"kl_cov": -advantage * ratio + np.where(top, 0.7 * np.abs(log_ratio), 0), "clip_cov": np.where(first, 0, clip)}


def test_values_and_finite_differences():
    with jax.enable_x64(True):
        found = values_and_gradients({name: jnp.asarray(x) for name, x in points().items()})
    new, h = points()["new"], 1e-6
    for name, (gradient, value) in found.items():
        assert value.dtype == np.float64
        np.testing.assert_allclose(np.asarray(value)[TOKENS], surrogate(new)[name][TOKENS], rtol=1e-12, err_msg=name)
        slope = (surrogate(new + h)[name] - surrogate(new - h)[name]) / (2 * h)
        np.testing.assert_allclose(gradient, np.where(TOKENS, slope, 0), rtol=1e-7, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_under_the_mask_reaches_value_or_gradient(poison):
    clean = {name: jnp.asarray(x, jnp.float32) for name, x in points().items()}
    expected = values_and_gradients(clean)
    found = values_and_gradients({name: jnp.where(TOKENS, x, poison) for name, x in clean.items()})
    for name in expected:
        for i in (0, 1):
            np.testing.assert_array_equal(np.where(TOKENS, found[name][i], 0), np.where(TOKENS, expected[name][i], 0), err_msg=name)
