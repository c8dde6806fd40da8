"""Worked examples about losses, importance weights, KL and what a sum is divided by."""

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import correction, covariance, policy_loss, sequence_loss
from agentrl_jax.kernels.entropy import entropy, log_softmax
from agentrl_jax.kernels.kl import kl
from agentrl_jax.kernels.policy_loss import masked_log_ratio, ppo_clip
from agentrl_jax.kernels.reduce import token_weights, weighted_sum
from agentrl_jax.kernels.value_loss import value_clipped, value_loss
from tests.kernels.worked import array, close, example

NUMERIC = 1e-9
"""Gradients of some examples are finite differences, right to about ten digits."""


def slope(loss, x):
    """Gradient of each token's loss at its own log-prob."""
    return jax.grad(lambda y: jnp.sum(loss(y)))(x)


def on_grid(x, loss, advantage):
    """Value and gradient of `loss(log_ratio, advantage)` on the example's ratios."""
    log_ratio, a = jnp.log(array(x.r)), jnp.full(len(x.r), advantage)
    return loss(log_ratio, a), slope(lambda y: loss(y, a), log_ratio)


@example("8a_ratio_grid_A+1", "8a_ratio_grid_A-1")
def test_8a_ppo_its_dual_clip_and_clip_higher_on_a_grid_of_ratios(good, bad):
    for x, advantage in ((good, 1.0), (bad, -1.0)):
        for options, value, gradient in (
            ({}, x.ppo, x.g_ppo),
            ({"dual_clip": 3.0}, x.ppo_dual3, x.g_dual),
            ({"clip_high": 0.28}, x.dapo, x.g_dapo),
        ):
            found = on_grid(x, lambda r, a, options=options: ppo_clip(r, a, **options), advantage)
            close(found[0], value)
            close(found[1], gradient, atol=NUMERIC)


@example("8b_sapo_A+1", "8b_sapo_A-1")
def test_8b_a_soft_gate_on_a_grid_of_ratios(good, bad):
    for x, advantage in ((good, 1.0), (bad, -1.0)):
        value, gradient = on_grid(x, policy_loss.sapo, advantage)
        close(value, x.loss)
        close(gradient, x.g, atol=NUMERIC)


def weight_of(x, loss, advantage, **options):
    """What a score-function loss multiplies the log-prob with."""
    log_ratio, a = jnp.log(array(x.r)), jnp.full(len(x.r), advantage)
    return -slope(lambda y: loss(y, log_ratio, a, **options), jnp.full(len(x.r), -1.3)) / advantage


@example("8c_cispo_weight")
def test_8c_bounds_of_cispo_are_ratios_and_elsewhere_distances(x):
    for advantage in (1.0, -1.0):
        close(weight_of(x, policy_loss.cispo, advantage), x.paper_no_lower_high_1p28)
        close(weight_of(x, policy_loss.cispo, advantage, min_ratio=0.8, max_ratio=1.2), x.verl_both_0p2)
        close(weight_of(x, policy_loss.cispo, advantage, max_ratio=5.0), x.trl_abs_5)


@example("8d_dis", "8d2_dis_strict")
def test_8d_the_double_sided_mask_looks_at_no_sign(x, edge):
    for advantage in (1.0, -1.0):
        for low, high, expected in ((0.2, 0.28, x.w_el0p2_eh0p28), (0.3, 5.0, x.w_sao_tir_el0p3_eh5), (0.8, 3.0, x.w_sao_code_el0p8_eh3)):
            close(weight_of(x, policy_loss.dis, advantage, min_ratio=1 - low, max_ratio=1 + high), expected)
        at = jnp.exp(jnp.log(array(edge.r))).tolist()  # to the bit
        close(weight_of(edge, policy_loss.dis, advantage, min_ratio=at[0], max_ratio=at[1]), edge.strict)
    mask, options = jnp.ones((1, 2), bool), {"mode": "mask", "lower": at[0], "upper": at[1]}
    close(correction.importance_weight(jnp.log(array([edge.r])), mask, **options)[0], edge.inclusive)
    close(correction.importance_weight(jnp.log(array([edge.r])), mask, **options, strict=True)[0], edge.strict)


@example("8d3_dis_gradient")
def test_8d3_without_the_stop_gradient_it_would_go_the_wrong_way(x):
    logprob, one = array([x.logp]), jnp.ones(1)
    old = logprob - jnp.log(x.r)
    close(slope(lambda y: policy_loss.dis(y, y - old, one), logprob), [x.sg])
    close(slope(lambda y: ppo_clip(y - old, one), logprob), [x.ratio_diff])
    close(slope(lambda y: policy_loss.reinforce(y, jnp.exp(y - old)), logprob), [x.no_sg])


MASK = jnp.array([[1, 1, 1], [1, 1, 0]], bool)
UNIT = jnp.zeros((2, 3), jnp.int32)


def two_sequences(second=(0.6, 0.2)):
    """Log-ratios of two sequences, the first good, the second bad."""
    return array([[0.1, -0.05, 0.1], [*second, 0]]), array([[1, 1, 1], [-1, -1, 0]])


def mean_over_sequences(per_token):
    return weighted_sum(per_token, token_weights(MASK, reduction="episode"))


@example("8e_gspo")
def test_8e_the_ratio_of_a_sequence_is_the_mean_or_the_product(x):
    log_ratio, advantage = two_sequences()
    close(jnp.exp(sequence_loss.sequence_log_ratio(log_ratio, MASK, UNIT))[:, 0], x.s)
    close(jnp.exp(sequence_loss.sequence_log_ratio(log_ratio, MASK, UNIT, average=False))[:, 0], x.product_ratio)
    close(mean_over_sequences(sequence_loss.gspo(log_ratio, advantage, MASK, UNIT)), x.loss_seq_mean_eps_paper)
    wide = sequence_loss.gspo(log_ratio, advantage, MASK, UNIT, clip_low=0.2, clip_high=0.2)
    close(wide[:, 0], x.per_seq_eps0p2)
    close(mean_over_sequences(wide), x.loss_seq_mean_eps0p2)
    close(weighted_sum(wide, token_weights(MASK)), x.tokenmean_areal_like)


@example("14a_gspo_gradient")
def test_14a_every_token_of_a_sequence_has_the_same_gradient(x):
    log_ratio, advantage = two_sequences((0.05, 0.02))
    close(jnp.exp(sequence_loss.sequence_log_ratio(log_ratio, MASK, UNIT))[:, 0], x.s)
    for form in ("sequence", "token"):

        def loss(y, form=form):
            return mean_over_sequences(sequence_loss.gspo(y, advantage, MASK, UNIT, clip_low=0.2, clip_high=0.2, form=form))

        gradient = jax.grad(loss)(log_ratio)
        close(gradient, [x.closed0, [*x.closed1, 0]])
        close(gradient, [x.fd0, [*x.fd1, 0]], rtol=1e-8, atol=NUMERIC)


@example("8f_gmpo")
def test_8f_the_geometric_mean_of_ratios_clipped_on_one_side(x):
    log_ratio, advantage = two_sequences()
    loss = sequence_loss.gmpo(log_ratio, advantage, MASK, UNIT, clip_low=x.eps, clip_high=x.eps)
    close(loss[:, 0], [x.seq0, x.seq1])
    close(mean_over_sequences(loss), x.mean)
    close(sequence_loss.gmpo(log_ratio, -advantage, MASK, UNIT, clip_low=x.eps, clip_high=x.eps)[1, 0], x.seq1_if_Apos)


@example("8g_klcov", "8g2_covnum")
def test_8g_the_token_that_covaries_most_is_pulled_back(x, sizes):
    new, old, advantage = array([-0.1, -2, -0.5, -1.4]), array([-0.2, -1.9, -0.5, -1]), array([1, 1, -1, -1])
    mask = jnp.ones(4, bool)
    value = covariance.covariance(new, advantage, mask)
    close(value, x.cov)
    count = covariance.share(mask, 2e-4)
    assert count == x.k
    top = covariance.most_covariant(value, mask, count)
    assert jnp.flatnonzero(top).tolist() == x.selected
    close(covariance.kl_cov(new - old, advantage, top, coefficient=0.0), x.pg_noclip)
    loss = covariance.kl_cov(new - old, advantage, top)
    close(loss, x.loss_tok)
    close(weighted_sum(loss[None], token_weights(mask[None])), x.mean)
    for tokens, expected in ((1_000, sizes.verl_k_N1000), (100_000, sizes.verl_k_N100000)):
        assert covariance.share(jnp.ones(tokens, bool), 2e-4) == expected


@example("8h_topr")
def test_8h_good_episodes_are_not_weighted_and_bad_ones_at_most_by_1(x):
    for positive, expected in ((True, x.w_pos), (False, x.w_neg)):
        close(weight_of(x, policy_loss.topr, -1.0, positive=jnp.full(6, positive)), expected)


@example("8i_decoupled")
def test_8i_clipped_around_the_proximal_policy(x):
    behaviour, proximal, new, one = (array([y]) for y in (-1, -1.2, -0.9, 1))
    mask = jnp.ones(1, bool)
    weight = jnp.exp(masked_log_ratio(proximal, behaviour, mask))
    log_ratio, coupled = masked_log_ratio(new, proximal, mask), masked_log_ratio(new, behaviour, mask)
    close(weight, [x.behave_weight])
    close(jnp.exp(log_ratio), [x.prox_ratio])
    close(policy_loss.decoupled_ppo(log_ratio, one, weight), [x.loss_Apos])
    close(policy_loss.decoupled_ppo(log_ratio, -one, weight), [x.loss_Aneg])
    close(jnp.exp(coupled), [x.coupled_ratio])
    close(ppo_clip(coupled, one), [x.coupled_loss_Apos])


RATIOS = np.log([[3.0, 1.0, 0.25]])
THREE = jnp.ones((1, 3), bool)


@example("8j_is")
def test_8j_what_becomes_of_a_ratio_beyond_its_bounds(x):
    log_ratio = array(RATIOS)

    def weight(**options):
        return correction.importance_weight(log_ratio, THREE, **options)

    close(weight(mode="raw")[0], x.ratio)
    close(weight(upper=2.0)[0], x.tis_C2)
    close(weight(mode="mask", lower=0.5, upper=2.0)[0], x.icepop_0p5_2)
    close(weight(mode="clamp", lower=0.5, upper=5.0)[0], x.clamp_0p5_5)
    close(weight(mode="raw", level="sum")[0, 0], x.seq_product)
    close(weight(mode="raw", level="mean")[0, 0], x.seq_geo)
    for statistic, expected in (("k1", x.k1_stat), ("k2", x.k2_stat), ("k3", x.k3_stat)):
        close(correction.divergence(log_ratio, statistic=statistic)[0], expected)
    close(correction.normalised(weight(upper=2.0), THREE)[0], x.batch_norm_w)


@example("8k_denominator")
def test_8k_what_is_rejected_counts_in_the_denominator_or_not(x):
    loss, log_ratio, bounds = -jnp.ones((1, 3)), array(RATIOS), {"lower": 0.5, "upper": 2.0}
    inside = correction.keep(log_ratio, THREE, **bounds)
    close(weighted_sum(loss, token_weights(THREE, keep=inside)), x.keep)
    close(weighted_sum(loss, token_weights(THREE, keep=inside, denominator="kept")), x.shrink)
    icepop = policy_loss.weighted(loss, correction.importance_weight(log_ratio, THREE, mode="mask", **bounds))
    close(weighted_sum(icepop, token_weights(THREE)), x.keep)
    truncated = policy_loss.weighted(loss, correction.importance_weight(log_ratio, THREE, upper=2.0))
    close(weighted_sum(truncated, token_weights(THREE)), x.tis)


@example("8l_k1_inversion")
def test_8l_the_same_bounds_of_the_ratio_turned_round(x):
    """verl's k1 bounds rollout / train: "0.5_5" keeps what a bound on train / rollout would not."""
    low, high = (float(bound) for bound in x.spec.split()[0].split("_"))
    for bounds, expected in (
        ({"lower": 1 / high, "upper": 1 / low}, x.kept_train_over_rollout),
        ({"lower": low, "upper": high}, x.icepop_kept),
    ):
        around = np.log([[expected[0] - 1e-9, expected[0] + 1e-9, expected[1] - 1e-9, expected[1] + 1e-9]])
        kept = correction.keep(array(around), jnp.ones((1, 4), bool), **bounds)
        assert kept[0].tolist() == [False, True, True, False]


@example("8m_opsm")
def test_8m_a_bad_sequence_that_the_policy_has_left_is_masked(x):
    log_ratio = jnp.broadcast_to(-array(x.meankl)[:, None], (2, 3))
    advantage = jnp.broadcast_to(array(x.A)[:, None], (2, 3))
    keep = correction.opsm(log_ratio, advantage, jnp.ones((2, 3), bool), delta=x.delta)
    np.testing.assert_array_equal(keep, np.tile(np.array(x.keep)[:, None], 3))
    assert correction.opsm(log_ratio, -advantage, jnp.ones((2, 3), bool), delta=x.delta).all()


@example("8n_tvmask")
def test_8n_tokens_whose_probability_has_gone_too_far(x):
    new, old, one, mask = jnp.log(array(x.p_train)), jnp.log(array(x.p_roll)), jnp.ones(3), jnp.ones(3, bool)
    close(correction.probability_gap(new, old, mask), x.diff)
    close(jnp.exp(masked_log_ratio(new, old, mask)), x.ratio)
    bounds = {"low": 0.2, "high": 0.2}
    np.testing.assert_array_equal(policy_loss.in_trust_region(new, old, one, **bounds), x.keep_Apos_dppo0p2)
    np.testing.assert_array_equal(policy_loss.in_trust_region(new, old, -one, **bounds), x.keep_Aneg_dppo0p2)
    for advantage in (one, -one):
        kept = policy_loss.in_trust_region(new, old, advantage, low=0.1, high=0.1, two_sided=True)
        np.testing.assert_array_equal(kept, x.keep_ipo0p1)


LOSSES = np.array([[1, 3, 0, 0, 0, 0], [1, 1, 1, 1, 1, 4]], float)
LENGTHS = np.array([[1, 1, 0, 0, 0, 0], [1] * 6], bool)


@example("9a_agg")
def test_9a_one_number_out_of_token_losses_six_ways(x):
    loss, mask = array(LOSSES), jnp.asarray(LENGTHS)

    def total(loss=loss, mask=mask, **options):
        return weighted_sum(loss, token_weights(mask, **options))

    close(total(), x.token_mean)
    close(total(reduction="episode"), x.seq_mean_token_mean)
    close(total(reduction="episode_sum"), x.seq_mean_token_sum)
    close(total(reduction="sum", horizon=8), x.sum_norm_old_verl)
    close(total(reduction="constant", horizon=8), x.sum_norm_new_verl)
    micro_batches = [total(loss[i : i + 1], mask[i : i + 1]) for i in range(2)]
    close(sum(micro_batches) / 2, x.microbatch1_tokenmean_avg)
    # One more row, in which nothing is in the loss: here it is not there, in TRL it counts.
    more = {"loss": jnp.concatenate([loss, jnp.full((1, 6), jnp.nan)]), "mask": jnp.concatenate([mask, jnp.zeros((1, 6), bool)])}
    close(total(**more), x.token_mean)
    close(total(**more, reduction="episode"), x.seq_mean_token_mean)
    close(total(**more, reduction="episode_sum"), x.seq_sum_masked_row_new)
    close(total(**more, reduction="episode", episodes=3), x.trl_grpo_with_masked_row)
    close(total(**more, reduction="constant", horizon=8, episodes=3), x.trl_drgrpo_B3_L8)


@example("9b_agg_weights")
def test_9b_what_a_single_token_weighs(x):
    mask = jnp.asarray(LENGTHS)
    close(token_weights(mask)[:, 0], x.token_mean)
    close(token_weights(mask, reduction="episode")[:, 0], x.seq_mean)
    close(token_weights(mask, reduction="constant", horizon=8)[:, 0], x.drgrpo)


@example("10a_kl")
def test_10a_values_and_gradients_of_the_kl_of_one_token(x):
    d = array([-1.0]) - array([-1.5])
    for estimator, value, gradient in (("k1", x.k1, x.g_k1), ("k2", x.k2, x.g_k2), ("k3", x.k3, x.g_k3)):
        close(kl(d, estimator=estimator), [value])
        close(slope(lambda y, estimator=estimator: kl(y, estimator=estimator), d), [gradient])
    close(kl(d, estimator="abs"), [x.absk])
    close(kl(array([29.0]), estimator="k3", max_value=10.0), [x.k3_clamped_ref_m30])
    close(kl(d, estimator="k3", gradient="k2"), [x.st_value])
    close(slope(lambda y: kl(y, estimator="k3", gradient="k2"), d), [x.st_grad])
    close(kl(d, estimator="k3", ratio=array([1.2])), [x.unbiased_w1p2])
    score = slope(lambda y: kl(y, estimator="k3", ratio=jnp.exp(y - jax.lax.stop_gradient(y))), d)
    close(score, [x.on_policy_score_grad_k3])


@example("10b_kl_expectations")
def test_10b_what_estimators_and_their_gradients_are_on_average(x):
    """Over a softmax of three outcomes: as losses, k1 does nothing, k2 is right, k3 is the other KL, and their scores make both right."""
    logits, reference = array([0.5, 0.0, 0.7]), jnp.log(array([0.2, 0.5, 0.3]))
    probability = jnp.exp(log_softmax(logits))

    def mean(y, estimator, score=False):
        new = log_softmax(y)
        ratio = jnp.exp(new - jax.lax.stop_gradient(new)) if score else None
        return jnp.sum(probability * kl(new - reference, estimator=estimator, ratio=ratio))

    def found(*arguments):
        return jax.value_and_grad(mean)(logits, *arguments)

    exact, gradient = jax.value_and_grad(lambda y: jnp.sum(jnp.exp(log_softmax(y)) * (log_softmax(y) - reference)))(logits)
    close(exact, x.KL, rtol=1e-8)
    close(gradient, x.true_grad, rtol=1e-8)
    for estimator, value, slopes in (("k1", x.E_k1, x.Eg_k1), ("k2", x.E_k2, x.Eg_k2), ("k3", x.E_k3, x.Eg_k3)):
        close(found(estimator)[0], value, rtol=1e-8)
        close(found(estimator)[1], slopes, rtol=1e-8)
    close(found("k1", True)[1], x.Eg_k1_with_score, rtol=1e-8)
    close(found("k3", True)[1], x.Eg_k3_with_score, rtol=1e-8)
    close(jax.grad(lambda y: -jnp.sum(jnp.exp(reference) * log_softmax(y)))(logits), x.fwdKL_grad, rtol=1e-8)


@example("14b_k3score_equals_k2")
def test_14b_k3_times_its_score_has_the_gradient_of_k2_token_by_token(x):
    d = array(x.logp_minus_ref)
    close(slope(lambda y: kl(y, estimator="k3", ratio=jnp.exp(y - jax.lax.stop_gradient(y))), d), x.g)
    close(slope(lambda y: kl(y, estimator="k2"), d), x.g)


@example("10c_entropy")
def test_10c_entropy_of_three_logits(x):
    close(entropy(array([1, 2, 3])), x.H)
    close(x.check, x.H)


@example("10d_valueclip")
def test_10d_a_value_that_has_left_its_interval_has_no_gradient(x):
    value, target, old, mask = array([0.9]), array([1.0]), array([0.5]), jnp.ones(1, bool)
    options = {"old": old, "clip": 0.2}
    close(value_loss(value, target, mask, **options), [x.loss_half])
    close(value_loss(value, target, mask, **options, scale=1.0), [x.loss_nohalf])
    close(value_loss(array([x.Vclip]), target, mask), [x.loss_half])  # the clipped value's own loss
    assert bool(value_clipped(value, target, mask, **options)[0]) is x.grad_zero
    assert (slope(lambda v: value_loss(v, target, mask, **options), value) == 0).all() == x.grad_zero
