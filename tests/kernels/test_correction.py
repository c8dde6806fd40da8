import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels import correction, units
from agentrl_jax.kernels.policy_loss import masked_log_ratio
from agentrl_jax.kernels.reduce import token_weights, weighted_sum

# One sequence with ratios 3, 1 and 1/4 of train over rollout.
RATIO = jnp.log(jnp.array([[3.0, 1.0, 0.25]]))
ALL = jnp.ones((1, 3), bool)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"upper": 2.0}, [2.0, 1.0, 0.25]),
        ({"mode": "mask", "lower": 0.5, "upper": 2.0}, [0.0, 1.0, 0.0]),
        ({"mode": "clamp", "lower": 0.5, "upper": 5.0}, [3.0, 1.0, 0.5]),
        ({"mode": "raw"}, [3.0, 1.0, 0.25]),
        ({"mode": "raw", "level": "sum"}, [0.75, 0.75, 0.75]),
        ({"mode": "raw", "level": "mean"}, [0.9085603, 0.9085603, 0.9085603]),
    ],
)
def test_weights_of_a_worked_example(options, expected):
    for weigh in (correction.importance_weight, jax.jit(correction.importance_weight, static_argnames=[*options])):
        np.testing.assert_allclose(weigh(RATIO, ALL, **options)[0], expected, atol=1e-6)


def test_weights_are_divided_by_their_mean():
    weight = correction.importance_weight(RATIO, ALL, upper=2.0)
    np.testing.assert_allclose(correction.normalised(weight, ALL)[0], [1.8461538, 0.9230769, 0.2307692], atol=1e-6)
    assert (np.asarray(correction.normalised(jnp.zeros((1, 3)), ALL)) == 0).all()


def test_mean_over_sequences_counts_each_once_and_none_that_is_empty():
    weight = jnp.array([[1.0, 1.0, 1.0], [3.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
    mask = jnp.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    np.testing.assert_allclose(correction.mean_weight(weight, mask), 1.5)
    np.testing.assert_allclose(correction.mean_weight(weight, mask, over="unit"), 2.0)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("k1", [-1.0986123, 0.0, 1.3862944]),
        ("k2", [0.6034745, 0.0, 0.9609060]),
        ("k3", [0.9013877, 0.0, 0.6362944]),
    ],
)
def test_divergences_of_a_worked_example(statistic, expected):
    np.testing.assert_allclose(correction.divergence(RATIO, statistic=statistic)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"denominator": "original"}, -1 / 3), ({"denominator": "kept"}, -1.0)],
)
def test_rejected_tokens_count_in_the_denominator_or_not(options, expected):
    kept = correction.keep(RATIO, ALL, lower=0.5, upper=2.0)
    weights = token_weights(ALL, keep=kept, **options)
    np.testing.assert_allclose(weighted_sum(-jnp.ones((1, 3)), weights), expected, atol=1e-6)


def test_icepop_divides_by_all_tokens_and_tis_weighs_them():
    for options, expected in (({"mode": "mask", "lower": 0.5, "upper": 2.0}, -1 / 3), ({"upper": 2.0}, -3.25 / 3)):
        weight = correction.importance_weight(RATIO, ALL, **options)
        np.testing.assert_allclose(weighted_sum(-weight, token_weights(ALL)), expected, atol=1e-6)


def test_bounds_are_of_train_over_rollout():
    """What verl calls "0.5_5" of k1 keeps ratios of train / rollout in [0.2, 2]; IcePop's [0.5, 5] keeps [0.5, 5]."""
    ratio = jnp.log(jnp.array([[0.19, 0.21, 0.49, 0.51, 1.99, 2.01, 4.99, 5.01]]))
    mask = jnp.ones_like(ratio, bool)
    assert np.asarray(correction.keep(ratio, mask, lower=1 / 5, upper=1 / 0.5)).tolist() == [
        [False, True, True, True, True, False, False, False]
    ]
    assert np.asarray(correction.keep(ratio, mask, lower=0.5, upper=5.0)).tolist() == [[False, False, False, True, True, True, True, False]]


def test_double_sided_mask_is_strict():
    grid = jnp.log(jnp.array([[0.5, 0.9, 1.0, 1.1, 1.5, 4.0]]))
    inside = correction.importance_weight(grid, jnp.ones_like(grid, bool), mode="mask", lower=0.8, upper=1.28, strict=True)
    np.testing.assert_allclose(inside, [[0.0, 0.9, 1.0, 1.1, 0.0, 0.0]], atol=1e-6)
    edge, two = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    for bounds in ({"lower": 1.0}, {"upper": 1.0}):
        assert correction.importance_weight(edge, two, mode="mask", strict=True, **bounds)[0, 0] == 0
        assert correction.importance_weight(edge, two, mode="mask", **bounds)[0, 0] == 1
        assert not correction.keep(edge, two, strict=True, **bounds)[0, 0]


def test_bad_sequences_that_the_policy_has_left_are_masked():
    log_ratio = jnp.array([[-0.05, -0.05], [-0.1, -0.3], [-0.1, -0.3]])
    advantage = jnp.array([[-1.0], [-1.0], [1.0]]) * jnp.ones((3, 2))
    kept = correction.opsm(log_ratio, advantage, jnp.ones((3, 2), bool), delta=0.1)
    assert np.asarray(kept).tolist() == [[True, True], [False, False], [True, True]]


def test_second_moment_mask_drops_as_few_as_it_takes():
    log_ratio = jnp.array([[0.1, -0.5, 0.2, 9.0], [0.3, 0.0, 0.1, 0.1]])
    mask = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    squares = np.square(np.asarray(log_ratio))[np.asarray(mask)]
    for threshold in (1.0, 0.04, 0.02, 1e-9):
        kept = np.asarray(correction.m2po(log_ratio, mask, threshold=threshold))
        assert not kept[0, 3]
        held = np.sort(squares)[: kept.sum()]
        assert sorted(np.square(np.asarray(log_ratio))[kept]) == pytest.approx(sorted(held))
        assert kept.sum() == 1 or held.mean() < threshold
        assert kept.sum() == 7 or np.sort(squares)[: kept.sum() + 1].mean() >= threshold
    assert not np.asarray(correction.m2po(log_ratio, jnp.zeros_like(mask), threshold=1.0)).any()


def test_one_catastrophic_token_vetoes_its_turn_alone():
    ratio = jnp.log(jnp.array([[1.0, 1e-5, 1.0, 1.0]]))
    turn = jnp.array([[0, 0, 1, 1]], jnp.int32)
    mask = jnp.ones((1, 4), bool)
    assert np.asarray(correction.keep(ratio, mask, turn, level="min", lower=1e-4)).tolist() == [[False, False, True, True]]
    assert not np.asarray(correction.keep(ratio, mask, level="min", lower=1e-4)).any()
    hidden = jnp.array([[True, False, True, True]])
    assert np.asarray(correction.keep(ratio, hidden, level="min", lower=1e-4)).all()


LEVELS = ("token", "sum", "mean", "max", "min")
numbers = st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6)


@given(numbers, numbers, st.sampled_from(LEVELS))
def test_tool_tokens_and_packing_change_nothing(first, second, level):
    """Two sequences in two rows, or one after the other in one row with tool output of NaN inside: same values on the tokens."""
    over_unit = jax.jit(correction.over_unit, static_argnames=["level"])
    x = jnp.array([first, second])
    apart = over_unit(x, jnp.ones(x.shape, bool), level=level)
    packed = jnp.full((1, 16), jnp.nan).at[0, jnp.array([0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13])].set(x.ravel())
    mask = ~jnp.isnan(packed)
    segment = jnp.array([[1] * 7 + [2] * 7 + [0] * 2], jnp.int32)
    unit = units.runs(segment)
    together = over_unit(packed, mask, unit, level=level)
    np.testing.assert_allclose(np.asarray(together)[np.asarray(mask)], np.asarray(apart).ravel(), rtol=1e-5, atol=1e-5)
    assert np.isfinite(np.asarray(together)).all()


@pytest.mark.parametrize("level", ["token", "sum", "mean"])
def test_no_gradient_passes_and_nothing_under_the_mask_is_seen(level):
    train = jnp.array([[-1.0, jnp.nan, -2.0, jnp.inf]])
    rollout = jnp.array([[-1.5, -jnp.inf, -2.5, 0.0]])
    mask = jnp.array([[True, False, True, False]])

    def loss(train):
        ratio = masked_log_ratio(train, rollout, mask, clamp=None)
        weight = correction.importance_weight(ratio, mask, level=level, upper=2.0)
        kept = correction.keep(ratio, mask, level=level, statistic="k3", upper=1.0)
        return weighted_sum(train * weight, token_weights(mask, keep=kept))

    value, gradient = jax.value_and_grad(loss)(train)
    weight = {"token": np.exp(0.5), "sum": 2.0, "mean": np.exp(0.5)}[level]
    np.testing.assert_allclose(value, -1.5 * weight, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[weight / 2, 0.0, weight / 2, 0.0]], rtol=1e-6)


def test_huge_ratios_stay_finite():
    ratio, mask = jnp.full((1, 8), 40.0), jnp.ones((1, 8), bool)
    for level in ("token", "sum", "mean"):
        weight = correction.importance_weight(ratio, mask, level=level, mode="raw")
        np.testing.assert_allclose(weight, np.exp(20.0), rtol=1e-5)


def test_tokens_outside_the_mask_carry_their_units_weight_on_request():
    mask = jnp.array([[True, True, False]])
    weight = correction.importance_weight(RATIO, mask, level="sum", mode="raw", outside=True)
    np.testing.assert_allclose(weight, [[3.0, 3.0, 3.0]], rtol=1e-6)
    weight = correction.importance_weight(RATIO, mask, mode="raw", outside=True)
    np.testing.assert_allclose(weight, [[3.0, 1.0, 1.0]], rtol=1e-6)


def test_difference_of_probabilities():
    gap = correction.probability_gap(
        jnp.log(jnp.array([[0.9, 0.5, jnp.nan]])), jnp.log(jnp.array([[0.6, 0.45, 0.1]])), jnp.array([[True, True, False]])
    )
    np.testing.assert_allclose(gap, [[0.3, 0.05, 0.0]], atol=1e-6)
    assert np.asarray(correction.within(gap, jnp.ones((1, 3), bool), lower=-0.1, upper=0.1)).tolist() == [[False, True, True]]


def test_options_that_do_not_go_together():
    with pytest.raises(ValueError, match="choose clamp"):
        correction.importance_weight(RATIO, ALL, lower=0.5)
    with pytest.raises(ValueError, match="choose token, sum or mean"):
        correction.importance_weight(RATIO, ALL, level="max")
