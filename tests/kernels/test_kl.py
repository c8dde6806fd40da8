import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.kl import adapted, kl, penalised
from agentrl_jax.kernels.policy_loss import masked_log_ratio

ESTIMATORS = ["k1", "abs", "k2", "k3"]
LOGITS, REFERENCE = np.array([0.3, -0.4, 0.9]), np.array([0.3, 0.5, 0.2])

differences = st.lists(st.floats(-8, 8), min_size=1, max_size=6).map(lambda x: np.array(x, np.float32))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("options", "value", "gradient"),
    [
        ({"estimator": "k1"}, 0.5, 1.0),
        ({"estimator": "abs"}, 0.5, 1.0),
        ({"estimator": "k2"}, 0.125, 0.5),
        ({"estimator": "k3"}, 0.106531, 0.393469),
        ({"estimator": "k1", "gradient": "k2"}, 0.5, 0.5),
        ({"estimator": "abs", "gradient": "k2"}, 0.5, 0.5),
        ({"estimator": "k2", "gradient": "k2"}, 0.125, 0.5),
        ({"estimator": "k3", "gradient": "k2"}, 0.106531, 0.5),
    ],
)
def test_10a_values_and_gradients(options, value, gradient, jit):
    f = lambda new: kl(new - (-1.5), **options)  # noqa: E731
    found = jax.value_and_grad(jax.jit(f) if jit else f)(jnp.array(-1.0))
    np.testing.assert_allclose(found, (value, gradient), atol=1e-6)


def test_10a_with_a_ratio():
    np.testing.assert_allclose(kl(jnp.array(0.5), estimator="k3", ratio=jnp.array(1.2)), 0.127837, atol=1e-6)


def test_10a_clamps():
    far = jnp.array([-29.0, 29.0])
    np.testing.assert_allclose(kl(far, estimator="k3", max_value=10.0), [10.0, 10.0])
    np.testing.assert_allclose(kl(far, estimator="k1", max_value=10.0), [-10.0, 10.0])
    np.testing.assert_allclose(kl(far, estimator="k3"), [np.expm1(20.0) - 20.0, np.expm1(-20.0) + 20.0], rtol=1e-6)
    np.testing.assert_allclose(kl(far, estimator="k3", max_log_ratio=None), np.expm1(-far) + far, rtol=1e-6)


def test_a_clamp_stops_the_own_gradient_but_not_the_straight_through_one():
    for d in (-29.0, 29.0):
        own, through = (jax.grad(lambda d, g=g: kl(d, estimator="k3", gradient=g, max_value=10.0))(jnp.array(d)) for g in ("own", "k2"))
        assert own == 0
        assert through == d


class TestExpectationsOverACategorical:
    """10b: what an estimator's value and gradient are on average, summed over all outcomes, in float64."""

    @staticmethod
    def expected(estimator, gradient="own", weighted=False, behaviour=None):
        """(E[value], E[d value / d logits]) with samples from `behaviour`, by default the policy itself."""
        logits = jnp.array(LOGITS)
        sampled_from = jax.nn.log_softmax(logits if behaviour is None else jnp.array(behaviour))

        def mean(x):
            new = jax.nn.log_softmax(x)
            ratio = jnp.exp(new - sampled_from) if weighted else None
            return jnp.sum(
                jnp.exp(sampled_from) * kl(new - jnp.log(jnp.array(REFERENCE)), estimator=estimator, gradient=gradient, ratio=ratio)
            )

        return jax.value_and_grad(mean)(logits)

    @staticmethod
    def exact():
        """Of KL(pi || ref) and of KL(ref || pi)."""
        reference = jnp.array(REFERENCE)

        def reverse(x):
            new = jax.nn.log_softmax(x)
            return jnp.sum(jnp.exp(new) * (new - jnp.log(reference)))

        def forward(x):
            return jnp.sum(reference * (jnp.log(reference) - jax.nn.log_softmax(x)))

        return jax.value_and_grad(reverse)(jnp.array(LOGITS)), jax.value_and_grad(forward)(jnp.array(LOGITS))

    def test_on_policy(self):
        with jax.enable_x64(True):
            (value, gradient), (_, forward) = self.exact()
            k1, k2, k3, through = self.expected("k1"), self.expected("k2"), self.expected("k3"), self.expected("k3", "k2")
            near = {"atol": 1e-12, "rtol": 0}
            np.testing.assert_allclose(k1[0], value, **near)
            np.testing.assert_allclose(k3[0], value, **near)
            assert abs(k2[0] - value) > 1e-3
            np.testing.assert_allclose(k1[1], 0.0, **near)
            np.testing.assert_allclose(k2[1], gradient, **near)
            np.testing.assert_allclose(k3[1], forward, **near)
            np.testing.assert_allclose(through[0], value, **near)
            np.testing.assert_allclose(through[1], gradient, **near)

    @pytest.mark.parametrize("behaviour", [None, [1.0, 0.2, -0.7]])
    @pytest.mark.parametrize("estimator", ["k1", "k3"])
    @pytest.mark.parametrize("gradient", ["own", "k2"])
    def test_a_ratio_makes_value_and_gradient_right_for_samples_of_any_policy(self, behaviour, estimator, gradient):
        with jax.enable_x64(True):
            (value, exact), _ = self.exact()
            found = self.expected(estimator, gradient, weighted=True, behaviour=behaviour)
            np.testing.assert_allclose(found[0], value, atol=1e-12)
            np.testing.assert_allclose(found[1], exact, atol=1e-12)


def test_10b_numbers():
    policy, reference = np.array([0.5, 0.2, 0.3]), np.array([0.3, 0.5, 0.2])
    d = jnp.array(np.log(policy / reference), jnp.float32)
    means = [float(np.sum(policy * np.asarray(kl(d, estimator=e)))) for e in ("k1", "k2", "k3")]
    exact = float(np.sum(policy * np.log(policy / reference)))
    np.testing.assert_allclose([means[0], means[2]], exact, rtol=1e-5)


def test_14b_k3_times_its_score_has_the_gradient_of_k2_sample_by_sample():
    def weighted(new):
        return kl(new, estimator="k3", ratio=jnp.exp(new - jax.lax.stop_gradient(new))).sum()

    d = jnp.array([1.2, 0.3, 0.0, -0.4, -2.0])
    np.testing.assert_allclose(jax.grad(weighted)(d), d, atol=1e-6)


@given(differences, st.sampled_from(ESTIMATORS), st.sampled_from(["own", "k2"]))
def test_all_but_k1_are_never_negative_and_zero_at_zero(d, estimator, gradient):
    value = np.asarray(kl(jnp.array(d), estimator=estimator, gradient=gradient))
    if estimator != "k1":
        assert (value >= 0).all()
    assert kl(jnp.zeros(1), estimator=estimator, gradient=gradient)[0] == 0


def test_k3_keeps_its_digits_close_to_zero():
    d = jnp.array([1e-4, -1e-4], jnp.float32)
    np.testing.assert_allclose(kl(d, estimator="k3"), 0.5e-8, rtol=5e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gradient", ["own", "k2"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_under_the_mask_reaches_value_or_gradient(estimator, gradient, poison):
    mask, clean, ref = jnp.array([True, False, True]), jnp.array([-0.9, -1.0, -1.1]), jnp.array([-1.0, -1.0, -1.0])

    def loss(new, ref):
        value = kl(masked_log_ratio(new, ref, mask), estimator=estimator, gradient=gradient, max_value=10.0)
        return jnp.where(mask, value, 0.0).sum()

    wanted = jax.value_and_grad(loss)(clean, ref)
    found = jax.value_and_grad(loss)(clean.at[1].set(poison), ref.at[1].set(poison))
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])


def test_kl_in_the_reward():
    reward, estimate = jnp.array([[0.0, 1.0, 2.0]]), jnp.array([[0.5, np.nan, -1.0]])
    mask = jnp.array([[True, False, True]])
    np.testing.assert_allclose(penalised(reward, estimate, mask, 0.1), [[-0.05, 1.0, 2.1]], atol=1e-7)
    assert (jax.grad(lambda e: penalised(reward, e, mask, 0.1).sum())(jnp.ones((1, 3))) == 0).all()


@pytest.mark.parametrize(("observed", "factor"), [(6.0, 1.0), (6.6, 1.001), (12.0, 1.002), (0.0, 0.998), (-5.0, 0.998)])
def test_a_coefficient_moves_towards_its_target_at_a_limited_rate(observed, factor):
    found = adapted(jnp.array(0.2), jnp.array(observed), target=6.0, horizon=1000.0, steps=10.0)
    np.testing.assert_allclose(found, 0.2 * factor, rtol=1e-6)


def test_unknown_names_are_named():
    with pytest.raises((ValueError, TypeError), match="k4"):
        kl(jnp.zeros(1), estimator="k4")
    with pytest.raises((ValueError, TypeError), match="k9"):
        kl(jnp.zeros(1), gradient="k9")
