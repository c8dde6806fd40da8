"""Worked examples over time: returns, GAE around tool output, turns, critics, segments."""

import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels import correction, entropy, turns, whiten
from agentrl_jax.kernels.baselines import running_baseline
from agentrl_jax.kernels.gae import adaptive_lambda, gae, segment_factor
from agentrl_jax.kernels.group import group_relative, turn_returns
from agentrl_jax.kernels.returns import decayed_outcome, discounted_return, lambda_return, n_step_return
from agentrl_jax.kernels.value_loss import value_loss
from tests.kernels.worked import array, boolean, close, example, same_group


def last_of(n, reward=1.0):
    return jnp.zeros(n).at[-1].set(reward)


@example("3a_mtgrpo_K2")
def test_3a_the_turn_before_the_last_has_its_own_reward_too(x):
    group, everyone = same_group(4)
    turn_advantage = group_relative(array([1, 0, 0, 0]), group, everyone)
    outcome_advantage = group_relative(array([1, 0, 1, 1]), group, everyone)
    close(turn_advantage, x.AI)
    close(outcome_advantage, x.AO)
    both = (jnp.stack([turn_advantage, jnp.zeros(4)], axis=1), outcome_advantage, jnp.ones((4, 2), bool))
    paper = turns.mt_grpo(*both, weight=0.5)
    close(paper[:, 0], x.turn1)
    close(paper[:, 1], x.turn2)
    code = turns.mt_grpo(*both, weight=1.0, on="turn")
    close(code[:, 0], x.code_before)
    close(code[:, 1], x.code_after)


@example("3b_mtgrpo_K3")
def test_3b_three_turns(x):
    found = turns.mt_grpo(array([[0.4, -0.2, 0.0]]), array([1.0]), jnp.ones((1, 3), bool), weight=0.5)
    close(found[0], [x.turn0, x.turn1, x.turn2])


@example("4a_gae_skip_tiny")
def test_4a_the_critic_is_not_asked_about_tool_output(x):
    out = gae(array([0, 0, 1]), array([0.2, 999, 0.4]), boolean([1, 0, 1]))
    close(out.advantages, x.adv)
    close(out.returns, x.ret)


HOLE = boolean([1, 1, 0, 0, 1, 1])
VALUE = [0.1, 0.2, 9.0, 9.0, 0.3, 0.5]


@example("4b_gae_skip_g.9_l.8")
def test_4b_a_tool_call_costs_no_discount(x):
    for value in (VALUE, [0.1, 0.2, np.nan, np.nan, 0.3, 0.5]):
        out = gae(last_of(6), array(value), HOLE, discount=0.9, lam=0.8)
        close(out.advantages, x.adv)
        close(out.returns, x.ret)


@example("4c_gae_noskip_same_input", "4c2_gae_noskip_V0_on_tool")
def test_4c_frameworks_without_a_mask_step_through_tool_output(x, zeros):
    """`steps` everywhere: the critic's 9 on tool output leaks into every action before it, and 0 there still costs discounts."""
    for expected, value in ((x, VALUE), (zeros, [0.1, 0.2, 0.0, 0.0, 0.3, 0.5])):
        out = gae(last_of(6), array(value), HOLE, discount=0.9, lam=0.8, steps=jnp.ones(6, bool))
        close(out.advantages, expected.adv)
        close(out.returns, expected.ret)


@example("4d_reward_on_masked_token")
def test_4d_a_reward_behind_the_last_action_moves_to_it_or_is_lost(x):
    case = (last_of(4), jnp.full(4, 0.5), boolean([1, 1, 1, 0]))
    close(gae(*case, off_step="drop").advantages, x.dropped)
    close(gae(*case).advantages, x.reanchored)


@example("4e_truncation_bootstrap_V.7")
def test_4e_cut_off_at_a_limit_is_not_the_end(x):
    case, options = (jnp.zeros((1, 3)), array([[0.2, 0.4, 0.6]]), jnp.ones((1, 3), bool)), {"discount": 0.9, "lam": 0.8}
    cut = gae(*case, **options, truncated=jnp.array([True]), bootstrap_value=jnp.array([0.7]))
    close(cut.advantages[0], x.adv_trunc)
    close(cut.returns[0], x.ret_trunc)
    for end in (gae(*case, **options), gae(*case, **options, truncated=jnp.array([False]), bootstrap_value=jnp.array([0.7]))):
        close(end.advantages[0], x.adv_terminal)
        close(end.returns[0], x.ret_terminal)


@example("4f_trunc_with_trailing_tool")
def test_4f_the_state_it_was_cut_off_at_includes_the_last_tool_output(x):
    mask, value = boolean([[1, 1, 0, 0]]), array([[0.2, 0.4, 9, 9]])
    out = gae(jnp.zeros((1, 4)), value, mask, truncated=jnp.array([True]), bootstrap_value=jnp.array([0.7]))
    close(out.advantages[0], x.adv)
    close(out.returns[0], x.ret)


@example("4g_lambda1_is_MC_minus_V")
def test_4g_with_lambda_1_returns_are_those_of_the_actions(x):
    close(lambda_return(last_of(6), array(VALUE), HOLE, discount=0.9), x.ret)
    close(discounted_return(last_of(6), HOLE, discount=0.9), x.expect)


@example("4h_whiten", "4b_gae_skip_g.9_l.8")
def test_4h_whitened_over_the_tokens_that_the_policy_wrote(x, plain):
    close(whiten.whiten(array(plain.adv), HOLE, divisor="sample", eps=1e-8, eps_in="variance"), x.bessel, rtol=1e-6)
    close(whiten.whiten(array(plain.adv), HOLE, eps=1e-8, eps_in="variance"), x.population, rtol=1e-6)
    assert len(plain.ret) == 6


@example("4i_length_adaptive_lambda")
def test_4i_lambda_grows_with_the_length(x):
    close(adaptive_lambda(jnp.array([1, 100, 1000]), alpha=x.alpha), [x.lam_l1, x.lam_l100, x.lam_l1000])


RISING = np.arange(1, 11)[None] / 10
OPTIONS = {"turn_discount": 0.95}


@example("5a_ragen_unit_example")
def test_5a_two_turns_of_five_tokens(x):
    reward = jnp.zeros((1, 10)).at[0, jnp.array([4, 9])].set(1.0)
    mask, turn = jnp.ones((1, 10), bool), jnp.repeat(jnp.arange(2), 5)[None]
    out = turns.bi_level_gae(reward, array(RISING), mask, turn, **OPTIONS)
    close(out.advantages[0], x.adv)
    close(out.returns[0], x.ret)
    ends = turns.to_turns(array(RISING), mask, jnp.zeros((1, 10), int), turn, shape=(1, 2), take="last")
    close(gae(jnp.ones((1, 2)), ends, jnp.ones((1, 2), bool), discount=0.95).advantages[0], x.turn_adv)
    close(whiten.whiten(out.advantages, mask, divisor="sample", eps=1e-8, eps_in="variance")[0], x.whitened, rtol=1e-6)


@example("5b_bilevel_zero_reward_turn")
def test_5b_a_turn_that_earned_nothing_is_a_turn(x):
    """Read off the rewards instead, the two are one turn, and the discount between them is gone."""
    mask = jnp.ones((1, 10), bool)
    for turn, expected in ((jnp.repeat(jnp.arange(2), 5)[None], x.explicit_eos), (jnp.zeros((1, 10), int), x.reward_bool)):
        close(turns.bi_level_gae(last_of(10)[None], array(RISING), mask, turn, **OPTIONS).advantages[0], expected)


@example("5c_turn_gae")
def test_5c_gae_over_turns(x):
    out = gae(array([0, 0, 1]), array([0.3, 0.5, 0.6]), jnp.ones(3, bool), discount=0.9, lam=0.95)
    close(out.advantages, x.adv)
    close(out.returns, x.ret)


@example("6a_archer")
def test_6a_a_pair_of_critics_of_turns(x):
    q, v, next_v, target_q = ([0.7, 0.6], [0.5, 0.55], [0.8, 0.7], [0.65, 0.62])
    one_step = jnp.ones(1, bool)
    close(gae(array([min(q)]), array([min(v)]), one_step).advantages[0], x.adv)
    for value, target in zip(next_v, (x.q_target1, x.q_target2), strict=True):
        found = n_step_return(jnp.zeros(2), array([0.0, value]), jnp.ones(2, bool), n=1, discount=0.95)
        close(found[0], target)
    close(n_step_return(jnp.ones(1), jnp.zeros(1), one_step, n=1, discount=0.95)[0], x.q_target_done)
    close(target_q, [x.v_target1, x.v_target2])
    targets = array([x.q_target1, x.q_target2, x.v_target1, x.v_target2])
    close(value_loss(array(q + v), targets, jnp.ones(4, bool), scale=1.0).sum(), x.critic_loss)
    # A target network moves as a running baseline does, a tenth of the way.
    moved = running_baseline(array([0.7]), jnp.zeros(1, int), jnp.ones(1, bool), array([0.65]), decay=0.9)[1]
    close(moved, [x.soft])


@example("6b_sweet")
def test_6b_a_log_ratio_per_turn_as_its_advantage(x):
    """Two turns, of two and of three tokens: mean log-ratio of critic and reference, and the loss of the pair."""
    log_ratio, mask = array([[0.4, 0.6, 0.0], [-0.1, -0.2, -0.3]]), boolean([[1, 1, 0], [1, 1, 1]])
    mean, total = (correction.over_unit(log_ratio, mask, level=level)[:, 0] for level in ("mean", "sum"))
    close(mean, [x.A_plus, x.A_minus])
    close(total, [x.A_plus_sum, x.A_minus_sum])
    margin = 0.1 * (mean[0] - mean[1])
    close(margin, x.margin)
    close(-entropy.log_prob(jnp.stack([margin, jnp.zeros(())]), jnp.array(0)), x.bt_loss)


@example("7a_discounted")
def test_7a_returns_of_turns_and_the_decay_of_an_outcome(x):
    reward, exists = array([[0, 0.2, 1]]), jnp.ones((1, 3), bool)
    close(turn_returns(reward, exists, gamma=0.9)[0], x.ret)
    close(discounted_return(reward, exists, discount=0.9)[0], x.ret)
    decayed = decayed_outcome(array([1.0]), exists, gamma=0.9)[0]
    close(decayed, x.kimi_T3_correct)
    close(decayed[::-1], x.kimi_wrong_direction)


@example("12c_compactionrl_equal", "12d_compactionrl_short_summary")
def test_12c_segments_count_less_the_more_tokens_follow(equal, short):
    """A summary that is a segment of its own has next to no advantage left."""
    for x in (equal, short):
        lam, after, factor = np.array(x.lam_Nafter_factor).T
        tokens, n = jnp.array(x.seg_len), len(x.seg_len)
        close(adaptive_lambda(tokens), lam)
        close(jnp.cumsum(tokens[::-1])[::-1] - tokens, after)
        close(segment_factor(tokens, jnp.zeros(n, int), jnp.arange(n), lam=adaptive_lambda(tokens)), factor)


@example("14f_mtppo")
def test_14f_a_turns_reward_at_its_last_token(x):
    mask, turn = boolean([[1, 1, 0, 1, 1]]), jnp.array([[0, 0, 0, 1, 1]])
    reward = turns.to_tokens(array([[0.3, 1.0]]), mask, jnp.zeros((1, 5), int), turn, at="last")
    close(reward[0], [0, 0.3, 0, 0, 1])
    out = gae(reward, array([[0.2, 0.3, 9, 0.5, 0.6]]), mask, lam=0.9)
    close(out.advantages[0], x.adv)
    close(out.returns[0], x.ret)


@example("14g_empty_mask_row")
def test_14g_a_row_in_which_the_policy_wrote_nothing(x):
    out = gae(jnp.ones(3), jnp.full(3, 0.5), jnp.zeros(3, bool))
    close(out.advantages, x.adv)
    close(out.returns, x.ret)
