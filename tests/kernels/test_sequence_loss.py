"""Losses of whole sequences: worked numbers, finite differences of the same formulas in numpy, and layouts that must not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.policy_loss import masked_log_ratio, ppo_clip
from agentrl_jax.kernels.reduce import token_weights, weighted_sum
from agentrl_jax.kernels.sequence_loss import geometric_mean, gmpo, gmpo_clipped, gspo, sequence_log_ratio, vespo, vespo_weight
from agentrl_jax.kernels.units import unit_mean

# Two sequences: log-ratios [.1, -.05, .1] with A = 1, and [.6, .2] with A = -1.
LOG_RATIO = jnp.array([[0.1, -0.05, 0.1], [0.6, 0.2, 0.0]])
ADVANTAGE = jnp.array([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
MASK = jnp.array([[1, 1, 1], [1, 1, 0]], bool)
UNIT = jnp.zeros((2, 3), jnp.int32)


def mean_over_sequences(per_token, mask=MASK):
    return weighted_sum(per_token, token_weights(mask, reduction="episode"))


def test_8e_gspo():
    s = jnp.exp(sequence_log_ratio(LOG_RATIO, MASK, UNIT))
    np.testing.assert_allclose(s, [[1.051271] * 3, [1.491825] * 3], atol=1e-6)
    np.testing.assert_allclose(mean_over_sequences(gspo(LOG_RATIO, ADVANTAGE, MASK, UNIT)), 0.2457123, atol=1e-6)
    wide = gspo(LOG_RATIO, ADVANTAGE, MASK, UNIT, clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(mean_over_sequences(wide), 0.2202768, atol=1e-6)
    np.testing.assert_allclose(weighted_sum(wide, token_weights(MASK)), -0.0340328, atol=1e-6)  # weighed by length
    product = jnp.exp(sequence_log_ratio(LOG_RATIO, MASK, UNIT, average=False))
    np.testing.assert_allclose(product[:, 0], [1.161834, 2.225541], atol=1e-6)


@pytest.mark.parametrize("form", ["sequence", "token"])
def test_14a_gspo_gradient(form):
    """s A / (sequences * length) for each token, in either form."""
    log_ratio = jnp.array([[0.1, -0.05, 0.1], [0.05, 0.02, 0.0]])
    g = jax.grad(lambda x: mean_over_sequences(gspo(x, ADVANTAGE, MASK, UNIT, clip_low=0.2, clip_high=0.2, form=form)))(log_ratio)
    np.testing.assert_allclose(g, [[-0.175212] * 3, [0.258905] * 2 + [0]], atol=1e-6)


def test_a_token_form_carries_each_tokens_own_advantage():
    advantage = jnp.array([[1.0, 2.0, 3.0], [-1.0, -2.0, 0.0]])
    g = jax.grad(lambda x: gspo(x, advantage, MASK, UNIT, clip_low=0.9, clip_high=0.9, form="token").sum())(LOG_RATIO)
    np.testing.assert_allclose(g, -advantage * jnp.exp(sequence_log_ratio(LOG_RATIO, MASK, UNIT)), rtol=1e-6)


def test_8f_gmpo():
    loss = gmpo(LOG_RATIO, ADVANTAGE, MASK, UNIT)
    np.testing.assert_allclose(loss[:, 0], [-1.051271, 1.491825], atol=1e-6)
    np.testing.assert_allclose(mean_over_sequences(loss), 0.2202768, atol=1e-6)
    np.testing.assert_allclose(gmpo(LOG_RATIO, -ADVANTAGE, MASK, UNIT)[1, 0], -1.349859, atol=1e-6)
    assert gmpo_clipped(LOG_RATIO, ADVANTAGE).sum() == 0
    assert gmpo_clipped(LOG_RATIO, -ADVANTAGE).tolist() == [[False] * 3, [True, False, False]]


def test_the_geometric_mean_of_weights():
    weight = jnp.array([[2.0, 0.5, 8.0], [4.0, 1.0, jnp.nan]])
    np.testing.assert_allclose(geometric_mean(weight, MASK, UNIT), [[2.0] * 3, [2.0] * 3], rtol=1e-6)


def test_vespo_weighs_by_the_product_of_ratios():
    """phi(w) = w^k exp(lambda (1 - w)): 1 on policy, and 0 in either direction far from it."""
    for advantage, k, rate in [(ADVANTAGE, (2, 3), (3, 2)), (-ADVANTAGE, (3, 2), (2, 3))]:
        w = np.exp([0.15, 0.8])
        expected = w ** np.array(k) * np.exp(np.array(rate) * (1 - w))
        np.testing.assert_allclose(vespo_weight(LOG_RATIO, advantage, MASK, UNIT)[:, 0], expected, rtol=1e-5)
    for far in (-30.0, 30.0):
        assert (vespo_weight(jnp.full((2, 3), far), ADVANTAGE, MASK, UNIT) < 1e-12).all()
    np.testing.assert_array_equal(vespo_weight(jnp.zeros((2, 3)), ADVANTAGE, MASK, UNIT), np.ones((2, 3)))
    weight = jnp.exp(LOG_RATIO)
    by_weight = vespo_weight(jnp.zeros((2, 3)), ADVANTAGE, MASK, UNIT, weight=weight)
    np.testing.assert_allclose(by_weight, vespo_weight(LOG_RATIO, ADVANTAGE, MASK, UNIT), rtol=1e-5)


# The same losses in numpy. Units: row 0 holds two of them, token by token; everything else is one row each.
TOKENS = np.array([[1, 1, 0, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]], bool)
OF = np.array([[0, 0, 0, 0, 1, 1, 1, 1], [0] * 8, [0] * 8])
OUTER = np.linspace(0.5, 1.5, TOKENS.size).reshape(TOKENS.shape)


def over(x, how):
    """`how` (mean or sum) of x over the tokens of each unit, on all its tokens; 0 where there are none."""
    out = np.zeros(TOKENS.shape)
    for b in range(len(TOKENS)):
        for u in set(OF[b]):
            inside = TOKENS[b] & (OF[b] == u)
            out[b, OF[b] == u] = how(x[b][inside]) if inside.any() else 0
    return out


def points():
    random = np.random.RandomState(5)
    old = -random.uniform(0.3, 2.0, TOKENS.shape)
    new = old + random.uniform(-0.5, 0.5, TOKENS.shape)
    return {"new": new, "old": old, "advantage": random.normal(size=TOKENS.shape)}


def _clip(log_ratio, advantage):
    ratio = np.exp(log_ratio)
    return np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.9, 1.1))


def _token_form(x, c):
    """The value of the sequence and the slope of the token."""
    difference = x["new"] - x["old"] - (c["new"] - c["old"])
    return _clip(over(c["new"] - c["old"], np.mean) + difference, x["advantage"])


def _gmpo(x, c):
    log_ratio = x["new"] - x["old"]
    one_sided = np.where(x["advantage"] > 0, np.minimum(log_ratio, 0.2), np.maximum(log_ratio, -0.2))
    return -over(x["advantage"], np.mean) * np.exp(over(one_sided, np.mean))


def _vespo(x, c):
    w = np.exp(over(c["new"] - c["old"], np.sum))
    k, rate = np.where(c["advantage"] >= 0, 2, 3), np.where(c["advantage"] >= 0, 3, 2)
    return -(w**k) * np.exp(rate * (1 - w)) * x["advantage"] * x["new"]


def _ours(name, x):
    mask, unit = jnp.asarray(TOKENS), jnp.asarray(OF, jnp.int32)
    log_ratio = masked_log_ratio(x["new"], x["old"], mask)
    advantage, new = jnp.where(mask, x["advantage"], 0.0), jnp.where(mask, x["new"], 0.0)
    clip = {"clip_low": 0.1, "clip_high": 0.1}
    if name.startswith("gspo"):
        return gspo(log_ratio, advantage, mask, unit, form="token" if name.endswith("token") else "sequence", **clip)
    if name == "product":
        return ppo_clip(sequence_log_ratio(log_ratio, mask, unit, average=False), advantage, **clip)
    if name == "gmpo":
        return gmpo(log_ratio, advantage, mask, unit, clip_low=0.2, clip_high=0.2)
    return vespo(new, log_ratio, advantage, mask, unit)


LOSSES = {
    "gspo": lambda x, c: _clip(over(x["new"] - x["old"], np.mean), x["advantage"]),
    "gspo_token": _token_form,
    "product": lambda x, c: _clip(over(x["new"] - x["old"], np.sum), x["advantage"]),
    "gmpo": _gmpo,
    "vespo": _vespo,
}


@jax.jit
def values_and_gradients(arrays):
    def total(new, name):
        value = _ours(name, arrays | {"new": new})
        return jnp.sum(jnp.where(TOKENS, value, 0.0) * OUTER.astype(value.dtype)), value

    return {name: jax.grad(total, has_aux=True)(arrays["new"], name) for name in LOSSES}


@pytest.fixture(scope="module")
def in_float64():
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, values_and_gradients({name: jnp.asarray(x) for name, x in points().items()}))


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_finite_differences(in_float64, name):
    gradient, value = in_float64[name]
    assert value.dtype == np.float64

    def total(new):
        return (LOSSES[name](points() | {"new": new}, points()) * OUTER)[TOKENS].sum()

    np.testing.assert_allclose(value[TOKENS], LOSSES[name](points(), points())[TOKENS], rtol=1e-12)
    slope, h = np.zeros(TOKENS.shape), 1e-6
    for at in np.ndindex(TOKENS.shape):
        step = np.zeros(TOKENS.shape)
        step[at] = h
        slope[at] = (total(points()["new"] + step) - total(points()["new"] - step)) / (2 * h)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-8)
    assert np.abs(slope).max() > 0.1


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_under_the_mask_reaches_value_or_gradient(poison):
    clean = {name: jnp.asarray(x, jnp.float32) for name, x in points().items()}
    expected = values_and_gradients(clean)
    found = values_and_gradients({name: jnp.where(TOKENS, x, poison) for name, x in clean.items()})
    for name in LOSSES:
        for i in (0, 1):
            np.testing.assert_array_equal(np.where(TOKENS, found[name][i], 0), np.where(TOKENS, expected[name][i], 0), err_msg=name)
        assert (np.asarray(found[name][0])[~TOKENS] == 0).all()


all_losses = jax.jit(
    lambda new, old, advantage, mask, unit: {
        "gspo": gspo(masked_log_ratio(new, old, mask), jnp.where(mask, advantage, 0.0), mask, unit),
        "gmpo": gmpo(masked_log_ratio(new, old, mask), jnp.where(mask, advantage, 0.0), mask, unit),
        "vespo": vespo(jnp.where(mask, new, 0.0), masked_log_ratio(new, old, mask), jnp.where(mask, advantage, 0.0), mask, unit),
    }
)


@given(seed=st.integers(0, 2**32 - 1), first=st.integers(1, 6), second=st.integers(1, 6))
def test_packed_sequences_with_tool_tokens_are_the_padded_ones(seed, first, second):
    """Two sequences in a row of 16, in any places and with NaN between their tokens, or in two rows of 16 each."""
    random = np.random.RandomState(seed)
    places = np.sort(random.choice(16, first + second, replace=False))
    values = {name: random.normal(size=16).astype(np.float32) for name in ("new", "old", "advantage")}
    mask = np.zeros((1, 16), bool)
    mask[0, places] = True
    packed = {name: np.where(mask, x, np.nan) for name, x in values.items()}
    unit = (np.arange(16) >= places[first] if second else np.zeros(16))[None].astype(np.int32)
    one = all_losses(**packed, mask=mask, unit=unit)
    both = np.zeros((2, 16), bool)
    both[0, :first], both[1, :second] = True, True
    split = {name: np.full((2, 16), np.nan, np.float32) for name in values}
    for name, x in values.items():
        split[name][both] = x[places]
    two = all_losses(**split, mask=both, unit=np.zeros((2, 16), np.int32))
    for name in one:
        np.testing.assert_allclose(np.asarray(one[name])[mask], np.asarray(two[name])[both], rtol=2e-4, atol=1e-6, err_msg=name)


def test_clamps_stop_the_gradient():
    log_ratio = jnp.array([[12.0, 14.0, 13.0], [-12.0, -12.0, 0.0]])

    def of(x):
        return sequence_log_ratio(x, MASK, UNIT, form="token", clamp=(-jnp.inf, 10.0))

    np.testing.assert_allclose(of(log_ratio)[:, 0], [10.0, -12.0])
    np.testing.assert_array_equal(jax.grad(lambda x: of(x).sum())(log_ratio), [[0, 0, 0], [1, 1, 1]])


def test_advantages_averaged_over_a_sequence_are_one_call_away():
    mean = unit_mean(jnp.array([[1.0, 2.0, 3.0], [4.0, 6.0, jnp.nan]]), MASK, UNIT)
    np.testing.assert_allclose(mean, [[2.0] * 3, [5.0] * 3])


def test_an_unknown_form_is_named():
    with pytest.raises((ValueError, TypeError), match="word"):
        sequence_log_ratio(LOG_RATIO, MASK, UNIT, form="word")
