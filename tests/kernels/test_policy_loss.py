"""Grids worked by hand; and each loss a second time in numpy (`LOSSES`), with what a stop-gradient freezes taken at a fixed point."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels import policy_loss
from agentrl_jax.kernels.policy_loss import clipped, dual_clipped, masked_log_ratio, outside, ppo_clip

RATIOS = np.array([0.5, 0.9, 1.0, 1.1, 1.5, 4.0], np.float32)
LOG_RATIOS = jnp.log(RATIOS)


def grid(loss, advantage):
    """Values, and gradients by the log-prob, over the grid of ratios."""
    a = jnp.full(6, advantage)
    return loss(LOG_RATIOS, a), jax.grad(lambda x: loss(x, a).sum())(LOG_RATIOS)


@pytest.mark.parametrize(
    ("advantage", "options", "loss", "gradient"),
    [
        (1.0, {}, [-0.5, -0.9, -1, -1.1, -1.2, -1.2], [-0.5, -0.9, -1, -1.1, 0, 0]),
        (-1.0, {}, [0.8, 0.9, 1, 1.1, 1.5, 4], [0, 0.9, 1, 1.1, 1.5, 4]),
        (1.0, {"clip_high": 0.28}, [-0.5, -0.9, -1, -1.1, -1.28, -1.28], [-0.5, -0.9, -1, -1.1, 0, 0]),
        (-1.0, {"clip_high": 0.28}, [0.8, 0.9, 1, 1.1, 1.5, 4], [0, 0.9, 1, 1.1, 1.5, 4]),
        (1.0, {"dual_clip": 3.0}, [-0.5, -0.9, -1, -1.1, -1.2, -1.2], [-0.5, -0.9, -1, -1.1, 0, 0]),
        (-1.0, {"dual_clip": 3.0}, [0.8, 0.9, 1, 1.1, 1.5, 3], [0, 0.9, 1, 1.1, 1.5, 0]),
        (-1.0, {"dual_clip": 1.4}, [0.8, 0.9, 1, 1.1, 1.4, 1.4], [0, 0.9, 1, 1.1, 0, 0]),
        (-1.0, {"max_ratio": 3.0}, [0.8, 0.9, 1, 1.1, 1.5, 3], [0, 0.9, 1, 1.1, 1.5, 0]),
    ],
    ids=["8a_A+1_ppo", "8a_A-1_ppo", "8a_A+1_dapo", "8a_A-1_dapo", "8a_A+1_dual3", "8a_A-1_dual3", "A-1_dual1.4", "A-1_max3"],
)
def test_ppo_clip_on_a_grid_of_ratios(advantage, options, loss, gradient):
    value, g = grid(lambda x, a: ppo_clip(x, a, **options), advantage)
    np.testing.assert_allclose(value, loss, atol=1e-5)
    np.testing.assert_allclose(g, gradient, atol=1e-5)
    a = jnp.full(6, advantage)
    stopped = clipped(LOG_RATIOS, a, clip_high=options.get("clip_high", 0.2))
    stopped |= dual_clipped(LOG_RATIOS, a, dual_clip=options.get("dual_clip", options.get("max_ratio", np.inf)))
    np.testing.assert_array_equal(stopped, np.array(gradient) == 0)


@pytest.mark.parametrize(
    ("advantage", "loss", "gradient"),
    [
        (1.0, [-1.510163, -1.900083, -2, -2.099917, -2.489837, -3.810297], [-0.470007, -0.897754, -1, -1.097255, -1.410022, -0.722827]),
        (-1.0, [1.415938, 1.804854, 1.904762, 2.004670, 2.393585, 3.652986], [0.467070, 0.897524, 1, 1.096974, 1.401210, 0.630445]),
    ],
    ids=["8b_sapo_A+1", "8b_sapo_A-1"],
)
def test_sapo_on_a_grid_of_ratios(advantage, loss, gradient):
    value, g = grid(policy_loss.sapo, advantage)
    np.testing.assert_allclose(value, loss, atol=1e-5)
    np.testing.assert_allclose(g, gradient, atol=1e-5)


def test_sapo_without_advantage_is_zero():
    np.testing.assert_array_equal(policy_loss.sapo(LOG_RATIOS, jnp.zeros(6)), np.zeros(6))


POSITIVE = jnp.ones(6, bool)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (policy_loss.cispo, [0.5, 0.9, 1, 1.1, 1.28, 1.28]),
        (lambda lp, x, a: policy_loss.cispo(lp, x, a, min_ratio=0.8, max_ratio=1.2), [0.8, 0.9, 1, 1.1, 1.2, 1.2]),
        (lambda lp, x, a: policy_loss.cispo(lp, x, a, max_ratio=5.0), [0.5, 0.9, 1, 1.1, 1.5, 4]),
        (policy_loss.dis, [0, 0.9, 1, 1.1, 0, 0]),
        (lambda lp, x, a: policy_loss.dis(lp, x, a, min_ratio=0.7, max_ratio=6.0), [0, 0.9, 1, 1.1, 1.5, 4]),
        (lambda lp, x, a: policy_loss.dis(lp, x, a, min_ratio=0.2, max_ratio=4.0), [0.5, 0.9, 1, 1.1, 1.5, 0]),
        (lambda lp, x, a: policy_loss.topr(lp, x, a, POSITIVE), [1, 1, 1, 1, 1, 1]),
        (lambda lp, x, a: policy_loss.topr(lp, x, a, ~POSITIVE), [0.5, 0.9, 1, 1, 1, 1]),
        (lambda lp, x, a: policy_loss.topr(lp, x, a, ~POSITIVE, negative_weight=0.5), [0.25, 0.45, 0.5, 0.5, 0.5, 0.5]),
    ],
    ids=["8c_paper", "8c_verl", "8c_trl", "8d_dis", "8d_sao_tools", "8d_sao_code", "8h_topr_pos", "8h_topr_neg", "topr_weighted"],
)
def test_score_function_losses_on_a_grid_of_ratios(loss, weight, advantage):
    """Value -w A log pi, gradient -w A, whatever the sign of A."""
    behaviour = jnp.full(6, -2.0)
    a = jnp.full(6, advantage)

    def of(logprob):
        return loss(logprob, logprob - behaviour, a)

    logprob = behaviour + LOG_RATIOS
    np.testing.assert_allclose(of(logprob), -np.array(weight) * advantage * np.asarray(logprob), atol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: of(x).sum())(logprob), -np.array(weight) * advantage, atol=1e-5)


def test_cispo_in_its_unified_form_drops_what_ppo_would_clip():  # weights of both signs over the grid, bounds 0.8 and 1.2
    def weight(advantage):
        a = jnp.full(6, advantage)
        return -policy_loss.cispo(jnp.ones(6), LOG_RATIOS, a, min_ratio=0.8, max_ratio=1.2, drop_clipped=True) / advantage

    np.testing.assert_allclose(weight(1.0), [0.8, 0.9, 1, 1.1, 0, 0], atol=1e-5)
    np.testing.assert_allclose(weight(-1.0), [0, 0.9, 1, 1.1, 1.2, 1.2], atol=1e-5)


def test_8d2_the_bounds_of_dis_are_strict():
    x = jnp.log(jnp.array([0.5, 1.5]))
    low, high = (float(bound) for bound in jnp.exp(x))
    np.testing.assert_array_equal(policy_loss.dis(jnp.ones(2), x, jnp.ones(2), min_ratio=low, max_ratio=high), [0, 0])
    np.testing.assert_array_equal(outside(x, min_ratio=low, max_ratio=high), [False, False])


def test_8d3_without_the_stop_gradient_dis_would_go_the_wrong_way():
    old = jnp.array(-1.1086626245216111 - np.log(1.1))
    logprob = jnp.array(-1.1086626245216111)
    g = jax.grad(lambda x: policy_loss.dis(x, x - old, jnp.array(1.0)))(logprob)
    np.testing.assert_allclose(g, -1.1, atol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: -jnp.exp(x - old) * x)(logprob), 0.119529, atol=1e-5)


def test_8i_decoupled():
    behaviour, proximal, theta = -1.0, -1.2, jnp.array([-0.9, -0.9])
    a = jnp.array([1.0, -1.0])
    weight = jnp.exp(jnp.full(2, proximal - behaviour))
    np.testing.assert_allclose(policy_loss.decoupled_ppo(theta - proximal, a, weight), [-0.982477, 1.105171], atol=1e-6)
    np.testing.assert_allclose(ppo_clip(theta - behaviour, a)[0], -1.105171, atol=1e-6)


def test_8n_tvmask():
    train, rollout = jnp.log(jnp.array([0.9, 0.5, 0.05])), jnp.log(jnp.array([0.6, 0.45, 0.3]))

    def keep(advantage, **options):
        return policy_loss.in_trust_region(train, rollout, jnp.full(3, advantage), **options).tolist()

    assert keep(1.0, low=0.2, high=0.2) == [False, True, True]
    assert keep(-1.0, low=0.2, high=0.2) == keep(0.0, low=0.2, high=0.2) == [True, True, False]
    assert keep(1.0, low=0.1, high=0.1, two_sided=True) == keep(-1.0, low=0.1, high=0.1, two_sided=True) == [False, True, False]


def test_the_binary_kl_of_certain_tokens_is_finite():
    """KL((q, 1-q) || (p, 1-p)): of equal certainties 0, of a token that has become impossible larger than any bound."""
    p, q = jnp.array([0.0, 0.0, -200.0, jnp.log(0.5)]), jnp.array([0.0, -200.0, 0.0, jnp.log(0.8)])
    for advantage, high, expected in [(1.0, 1e-3, [True, False, True, True]), (-1.0, 1e-3, [True, True, False, False])]:
        found = policy_loss.in_trust_region(p, q, jnp.full(4, advantage), low=high, high=high, divergence="kl")
        assert found.tolist() == expected
    exact = 0.8 * np.log(0.8 / 0.5) + 0.2 * np.log(0.2 / 0.5)
    for bound, kept in [(exact - 1e-3, False), (exact + 1e-3, True)]:
        assert policy_loss.in_trust_region(p, q, -jnp.ones(4), low=bound, high=bound, divergence="kl")[3] == kept


# Every loss twice. `x` holds new, old, advantage, log_ratio, ratio, weight, positive; `c` the same at the point where constants are taken.


def _clip(ratio, advantage, high=0.28):
    return np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1 + high))


def _sapo(x, c):
    tau = np.where(x.advantage > 0, 1.0, 1.05)
    return -x.advantage * 4 / tau / (1 + np.exp(-tau * (x.ratio - 1)))


def _kl_region(c):
    p, q = np.exp(c.new), np.exp(c.old)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    return ~np.where(c.advantage > 0, (p > q) & (kl > 0.05), (p < q) & (kl > 0.02))


def _tv_region(c):
    difference = np.exp(c.new) - np.exp(c.old)
    return np.where(c.advantage > 0, difference <= 0.1, difference >= -0.05)


def _cispo_weight(c):
    out = (c.ratio > 1.2) & (c.advantage > 0) | (c.ratio < 0.8) & (c.advantage < 0)
    return np.where(out, 0, np.clip(c.ratio, 0.8, 1.2))


def _dppo(x, divergence, **options):
    low, high = {"tv": (0.05, 0.1), "kl": (0.02, 0.05)}[divergence]
    keep = policy_loss.in_trust_region(x.new, x.old, x.advantage, low=low, high=high, divergence=divergence)
    return policy_loss.dppo(x.new, x.log_ratio, x.advantage, keep, **options)


LOSSES = {
    "reinforce": (lambda x: policy_loss.reinforce(x.new, x.advantage), lambda x, c: -x.advantage * x.new),
    "reinforce_weighted": (
        lambda x: policy_loss.reinforce(x.new, x.advantage, weight=x.ratio),
        lambda x, c: -c.ratio * x.advantage * x.new,
    ),
    "ppo": (lambda x: ppo_clip(x.log_ratio, x.advantage, clip_high=0.28), lambda x, c: _clip(x.ratio, x.advantage)),
    "dual_clip": (
        lambda x: ppo_clip(x.log_ratio, x.advantage, clip_high=0.28, dual_clip=2.5),
        lambda x, c: np.where(x.advantage < 0, np.minimum(_clip(x.ratio, x.advantage), -2.5 * x.advantage), _clip(x.ratio, x.advantage)),
    ),
    "max_ratio": (
        lambda x: ppo_clip(x.log_ratio, x.advantage, clip_high=0.28, max_ratio=2.5),
        lambda x, c: np.maximum(-x.advantage * np.minimum(x.ratio, 2.5), -x.advantage * np.clip(x.ratio, 0.8, 1.28)),
    ),
    "decoupled": (
        lambda x: policy_loss.decoupled_ppo(x.log_ratio, x.advantage, x.weight, clip_high=0.28),
        lambda x, c: x.weight * _clip(x.ratio, x.advantage),
    ),
    "sapo": (lambda x: policy_loss.sapo(x.log_ratio, x.advantage), _sapo),
    "cispo": (
        lambda x: policy_loss.cispo(x.new, x.log_ratio, x.advantage),
        lambda x, c: -np.minimum(c.ratio, 1.28) * x.advantage * x.new,
    ),
    "cispo_unified": (
        lambda x: policy_loss.cispo(x.new, x.log_ratio, x.advantage, min_ratio=0.8, max_ratio=1.2, drop_clipped=True),
        lambda x, c: -_cispo_weight(c) * x.advantage * x.new,
    ),
    "dis": (
        lambda x: policy_loss.dis(x.new, x.log_ratio, x.advantage),
        lambda x, c: -np.where((c.ratio > 0.8) & (c.ratio < 1.28), c.ratio, 0) * x.advantage * x.new,
    ),
    "topr": (
        lambda x: policy_loss.topr(x.new, x.log_ratio, x.advantage, x.positive, positive_weight=2.0, negative_weight=0.5),
        lambda x, c: -np.where(c.positive, 2, 0.5 * np.minimum(c.ratio, 1)) * x.advantage * x.new,
    ),
    "dro": (
        lambda x: policy_loss.dro(x.new, x.log_ratio, x.advantage, beta=0.3),
        lambda x, c: -x.advantage * x.new + 0.15 * (x.new - x.old) ** 2,
    ),
    "dppo_tv": (
        lambda x: _dppo(x, "tv", max_ratio=1.5),
        lambda x, c: -1.0 * _tv_region(c) * np.minimum(c.ratio, 1.5) * x.advantage * x.new,
    ),
    "dppo_kl": (
        lambda x: _dppo(x, "kl", max_ratio=1.5),
        lambda x, c: -1.0 * _kl_region(c) * np.minimum(c.ratio, 1.5) * x.advantage * x.new,
    ),
    "dppo_tv_through_ratio": (
        lambda x: _dppo(x, "tv", through="ratio", penalty=1e-3),
        lambda x, c: -1.0 * _tv_region(c) * x.ratio * x.advantage + 1e-3 * (x.new - x.old) ** 2,
    ),
}

MASK = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 1]], bool)
OUTER = np.linspace(0.5, 1.5, MASK.size).reshape(MASK.shape)


def points():
    """Log-probs, advantages and weights in float64, on both sides of every bound and on none."""
    random = np.random.RandomState(3)
    old = -random.uniform(0.3, 2.0, MASK.shape)
    new = np.minimum(old + random.uniform(-1.6, 1.6, MASK.shape), -0.05)
    return {"new": new, "old": old, "advantage": random.normal(size=MASK.shape), "weight": random.uniform(0.2, 2.0, MASK.shape)}


def ours(arrays):
    """What our losses are called with."""
    masked = {name: jnp.where(MASK, x, 0.0) for name, x in arrays.items()}
    log_ratio = masked_log_ratio(arrays["new"], arrays["old"], jnp.asarray(MASK))
    positive = jnp.asarray(np.arange(MASK.size).reshape(MASK.shape) % 3 > 0)
    return SimpleNamespace(**masked, log_ratio=log_ratio, ratio=jnp.exp(log_ratio), positive=positive)


def plain(arrays):
    ratio = np.exp(arrays["new"] - arrays["old"])
    return SimpleNamespace(**arrays, ratio=ratio, positive=np.arange(MASK.size).reshape(MASK.shape) % 3 > 0)


@jax.jit
def values_and_gradients(arrays):
    """Of every loss: value of each token, and gradient of the sum with weights `OUTER` over the mask."""

    def total(new, loss):
        value = loss(ours(arrays | {"new": new}))
        return jnp.sum(jnp.where(MASK, value, 0.0) * OUTER.astype(value.dtype)), value

    return {name: jax.grad(total, has_aux=True)(arrays["new"], loss) for name, (loss, _) in LOSSES.items()}


@pytest.fixture(scope="module")
def in_float64():
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, values_and_gradients({name: jnp.asarray(x) for name, x in points().items()}))


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_finite_differences(in_float64, name):
    gradient, value = in_float64[name]
    assert value.dtype == np.float64
    constants = plain(points())

    def surrogate(new):
        return LOSSES[name][1](plain(points() | {"new": new}), constants)

    np.testing.assert_allclose(value[MASK], surrogate(points()["new"])[MASK], rtol=1e-12, atol=1e-12)
    h = 1e-6
    slope = (surrogate(points()["new"] + h) - surrogate(points()["new"] - h)) / (2 * h)  # every token depends on its own log-prob only
    np.testing.assert_allclose(gradient, np.where(MASK, OUTER * slope, 0), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_under_the_mask_reaches_value_or_gradient(poison):
    clean = {name: jnp.asarray(x, jnp.float32) for name, x in points().items()}
    dirty = {name: jnp.where(MASK, x, poison) for name, x in clean.items()}
    expected, found = values_and_gradients(clean), values_and_gradients(dirty)
    for name in LOSSES:
        np.testing.assert_array_equal(found[name][0], expected[name][0], err_msg=name)
        np.testing.assert_array_equal(np.where(MASK, found[name][1], 0), np.where(MASK, expected[name][1], 0), err_msg=name)
        assert (np.asarray(found[name][0])[~MASK] == 0).all()


ON_POLICY = sorted(LOSSES.keys() - {"decoupled", "topr"})  # those two have weights that are not 1 there


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_loss_is_the_policy_gradient(name):
    """Gradient -A where train = behaviour, to the last bit of float32."""
    arrays = {key: jnp.asarray(x, jnp.float32) for key, x in points().items()}
    arrays["old"] = arrays["new"]
    found = values_and_gradients(arrays)[name][0]
    np.testing.assert_allclose(found, np.where(MASK, -OUTER * points()["advantage"], 0), rtol=1e-5)


def test_without_a_clamp_the_ratio_is_as_large_as_it_is():
    new, old, mask = jnp.array([0.0, 0.0]), jnp.array([-45.0, 45.0]), jnp.array([True, True])
    assert masked_log_ratio(new, old, mask).tolist() == [20.0, -20.0]
    assert masked_log_ratio(new, old, mask, clamp=None).tolist() == [45.0, -45.0]


def test_unknown_choices_are_named():
    x = jnp.zeros(1)
    with pytest.raises((ValueError, TypeError), match="js"):
        policy_loss.in_trust_region(x, x, x, low=0.1, high=0.1, divergence="js")
    with pytest.raises((ValueError, TypeError), match="nothing"):
        policy_loss.dppo(x, x, x, jnp.ones(1, bool), through="nothing")
