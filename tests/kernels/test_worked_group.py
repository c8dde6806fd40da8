"""Worked examples about groups: baselines, spreads, states that recur, groups that are kept."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.data.anchors import anchor_groups
from agentrl_jax.kernels import baselines, filters, returns, whiten
from agentrl_jax.kernels.group import gigpo, group_relative, group_statistics, state_relative, turn_returns
from tests.kernels.worked import array, boolean, close, example, same_group

NEMO = {"baseline": "leave_one_out", "std": "leave_one_out", "eps": 1e-6}
RLOO = {"baseline": "leave_one_out", "std": "none"}
TWO_GROUPS = jnp.array([0, 0, 0, 0, 1, 1, 1, 1]), jnp.ones(8, bool)


def one_group(reward, **options):
    return group_relative(array(reward), *same_group(len(reward)), **options)


@example("1a_group_R1011")
def test_1a_one_failure_among_successes_under_every_convention(x):
    close(one_group(x.R), x.pop_eps0)
    close(one_group(x.R, eps=1e-6), x.pop_eps1e6)
    close(one_group(x.R, std="sample"), x.sample_eps0)
    close(one_group(x.R, std="sample", eps=1e-4), x.sample_eps1e4_TRL)
    close(one_group(x.R, std="none"), x.mean_only)
    close(one_group(x.R, **RLOO), x.rloo)
    # Without eps: that of the failure's siblings is all there is to divide by, and NeMo-RL's 1e-6 shows in the seventh digit.
    close(one_group(x.R, **NEMO), x.nemo_loo_loostd, rtol=2e-6)
    close(baselines.max_rl(array(x.R), *same_group(4)), x.maxrl)


@example("1b_group_R_.2_.8_.5")
def test_1b_shaped_rewards_under_every_convention(x):
    close(one_group(x.R), x.pop_eps0)
    close(one_group(x.R, std="sample"), x.sample_eps0)
    close(one_group(x.R, std="none"), x.mean_only)
    close(one_group(x.R, **RLOO), x.rloo)
    close(one_group(x.R, **NEMO), x.nemo, rtol=5e-6)


@example("1b2_nemo_n2")
def test_1b2_the_std_of_one_other_member_does_not_divide(x):
    close(one_group(x.R, **NEMO), x.nemo)


@example("1c_ratio_identities", "1a_group_R1011")
def test_1c_leave_one_out_is_the_mean_times_n_over_n_minus_1(x, group):
    close(one_group(group.R, **RLOO) / one_group(group.R, std="none"), x.rloo_over_meanonly)
    close(one_group(group.R, std="sample") / one_group(group.R), x.sample_over_pop)
    close(np.sqrt(3 / 4), x.sqrt_n1_n)
    for name in ("pop_eps0", "pop_eps1e6", "sample_eps0", "sample_eps1e4_TRL", "mean_only", "rloo"):
        assert abs(sum(getattr(group, name))) < 1e-12, "all sum to 0"
    assert round(sum(group.nemo_loo_loostd), 3) == 0.732, "but for the spread of the others"
    assert group.maxrl == group.rloo, "for these rewards"


@example("1d_identical_float32")
def test_1d_identical_float32_rewards_give_exactly_zero(x):
    """What a mean in float32 leaves over, divided by its own spread, is an advantage of up to 0.8."""
    for name, case in json.loads(x.cases).items():
        n, value = int(name[1:].split("_")[0]), float(name.split("_v")[1])
        off, variance = jnp.full((n,), case["centered"]), jnp.array(case["centered"] ** 2 * n / (n - 1))
        for eps, found in ((1e-6, case["a_1e6"]), (1e-8, case["a_1e8"])):
            close(whiten.standardise(off, jnp.zeros(()), variance, eps=eps), np.full(n, found), rtol=1e-6)
        reward, everyone = jnp.full((n,), value, jnp.float32), same_group(n)
        for options in ({}, {"eps": 1e-8}, {"std": "sample", "eps": 1e-6}, {"std": "none"}, RLOO, NEMO):
            assert (group_relative(reward, *everyone, **options) == 0).all()


@example("1e_opo", "1e2_opo_two")
def test_1e_a_baseline_weighted_by_the_policys_tokens(x, two):
    for y in (x, two):
        found = one_group(y.R, baseline="length", std="none", length=array(y.lens))
        close(found, y.adv)
        close(array(y.R) - found, np.full(len(y.R), y.baseline))


@example("1f_gpg")
def test_1f_gpg_counts_informative_groups_or_rewards_other_than_zero(x):
    reward = array(x.R)
    centred = group_relative(reward, *TWO_GROUPS, std="none")
    paper = baselines.gpg_scale(reward, *TWO_GROUPS)
    verl = baselines.gpg_scale(reward, *TWO_GROUPS, informative="nonzero")
    close(paper, x.alpha_paper)
    close(verl, x.alpha_verl)
    close(paper * centred, x.adv_paper)
    close(verl * centred, x.adv_verl)


@example("1g_passk")
def test_1g_what_the_best_of_the_group_is_owed(x):
    reward, everyone = array(x.R), same_group(3)
    close(baselines.pass_at_k(reward, *everyone), x.adv_nostd)
    close(group_statistics(reward, *everyone, std="sample").std[0], x.sample_std)
    close(baselines.pass_at_k(reward, *everyone, std="sample", eps=1e-6), x.adv_std)


@example("1h_gdpo")
def test_1h_two_rewards_whitened_over_episodes_or_over_tokens(x):
    """The first episode's advantage has another sign in each."""
    parts, weights = jnp.stack([array(x.r1), array(x.r2)], axis=1), jnp.ones(2)
    group, everyone = same_group(4)
    present = jnp.ones((4, 2), bool)
    columns = jnp.stack([one_group(r, std="sample", eps=1e-6) for r in (x.r1, x.r2)], axis=1)
    close(baselines.weighted_sum(columns, weights, present)[0], x.combined)
    gdpo = partial(baselines.gdpo, parts, weights, group, present, std="sample", eps=1e-6, divisor="sample")
    close(gdpo(whiten_eps=0.0), x.seq_level, rtol=1e-6)
    close(gdpo(count=array(x.lens), whiten_eps=1e-8, whiten_eps_in="variance"), x.token_level, rtol=1e-6)
    close(one_group(np.add(x.r1, x.r2), std="sample", eps=1e-6), x.grpo_on_sum)
    assert np.sign(x.seq_level[0]) != np.sign(x.token_level[0])


@example("1i_reinforcepp_baseline")
def test_1i_centring_over_tokens_gives_a_group_without_information_an_advantage(x):
    group, everyone = jnp.asarray(x.groups), jnp.ones(4, bool)
    centred, lens = group_relative(array(x.R), group, everyone, std="none"), array(x.lens)
    close(centred, x.centered)
    mean, variance = whiten.moments(centred, everyone, count=lens, divisor="sample")
    close(mean, x.token_mean)
    close(variance, x.token_var_bessel)
    close(whiten.whiten(centred, everyone, count=lens, divisor="sample", eps=1e-8, eps_in="variance"), x.adv)
    close(whiten.whiten(centred, everyone, eps=1e-6, centre=False), x.rllm_style_no_recentre)


@example("1j_reinforcepp_hole")
def test_1j_a_tool_call_does_not_take_the_return_from_the_turns_before_it(x):
    mask = boolean(x.mask)
    reward = jnp.zeros(6).at[-1].set(1.0)
    close(returns.discounted_return(reward, mask, discount=x.gamma), x.carry)
    ends = mask & ~jnp.concatenate([mask[1:], jnp.ones(1, bool)])
    close(returns.discounted_return(reward, mask, discount=jnp.where(ends, 0.0, x.gamma)), x.old_reset)


# Four trajectories of three turns, rewards 1, 0, 1, 1. The first turn starts in one state for all, the second of the first two in another.
STATES = jnp.array([[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 6, 7]])
EXISTS = jnp.ones((4, 3), bool)


def returns_of_turns():
    return turn_returns(jnp.zeros((4, 3)).at[:, -1].set([1.0, 0.0, 1.0, 1.0]), EXISTS, gamma=0.95)


def both_levels(**options):
    return gigpo(array([1, 0, 1, 1]), returns_of_turns(), *same_group(4)[:1], STATES, EXISTS, jnp.ones(4, bool), **options)


@example("2a_gigpo_seed_turn2")
def test_2a_two_actions_taken_in_the_same_state(x):
    close(returns_of_turns()[:2, 1], x.returns)
    steps = partial(state_relative, returns_of_turns(), STATES, EXISTS)
    close(steps()[:2, 1], x.AS_pop)
    close(steps(std="sample", eps=1e-6)[:2, 1], x.AS_sample)
    close(steps(std="none")[:2, 1], x.AS_mean)
    close(both_levels()[:2, 1], x.total_pop)
    close(both_levels(std="sample", eps=1e-6)[:2, 1], x.total_sample)
    close(both_levels(std="none")[:2, 1], x.total_mean)


@example("2b_gigpo_turn1_root")
def test_2b_the_first_turn_is_the_whole_group_again(x):
    close(returns_of_turns()[:, 0], x.returns)
    close(state_relative(returns_of_turns(), STATES, EXISTS)[:, 0], x.AS_pop)
    close(state_relative(returns_of_turns(), STATES, EXISTS, std="none")[:, 0], x.AS_mean)
    close(0.95**2 * one_group([1, 0, 1, 1], std="none"), x.AE_mean_times_g2)
    close(both_levels()[:, 0], x.total_pop)


@example("2c_gigpo_singleton")
def test_2c_a_state_reached_once_gives_nothing_and_a_lone_episode_its_reward_on_request(x):
    assert (state_relative(jnp.ones((1, 1)), jnp.zeros((1, 1), int), jnp.ones((1, 1), bool)) == x.AS).all()
    close(one_group([1.0], std="sample", eps=1e-6, singleton="raw"), [x.AE_singleton_meanstd])
    assert one_group([1.0])[0] == 0


@example("2d_gigpo_rows_vs_traj")
def test_2d_statistics_over_steps_or_over_trajectories(x):
    """One trajectory of three steps with reward 1, one of a single step with 0."""
    reward, steps = array([1, 0]), array([3, 1])
    assert x.rows == [1.0] * 3 + [0.0]
    over_steps = group_statistics(reward, *same_group(2), count=steps, std="sample")
    close([over_steps.mean[0], over_steps.std[0]], [x.mean_rows, x.std_rows_sample])
    close(group_statistics(reward, *same_group(2)).mean[0], x.mean_traj)
    close(one_group([1, 0], std="sample", count=steps), x.A_rows)
    close(one_group([1, 0], std="sample"), x.A_traj_sample)
    close(one_group([1, 0], std="none", count=steps), x.A_rows_meannorm)
    close(one_group([1, 0], std="none"), x.A_traj_meannorm)


@example("2e_gigpo_invalid_penalty")
def test_2e_a_penalty_for_an_invalid_action_stays_on_its_own_step_or_reaches_back(x):
    reward, invalid, exists = array([[0, 0, 1]]), array([[0, 1, 0]]), jnp.ones((1, 3), bool)
    to_go, own = turn_returns(reward, exists, gamma=0.95), turn_returns(-0.1 * invalid, exists, gamma=0.0)
    close(to_go[0], x.step_returns)
    close((to_go + own)[0], x.step_returns_after_penalty)
    close((turn_returns(reward, exists, gamma=1.0) + own)[0], x.episode_score_rows)
    # As a reward of its turn, which is what it is here, the steps before share in it.
    close(turn_returns(reward - 0.1 * invalid, exists, gamma=0.95)[0], [0.9025 - 0.095, 0.85, 1.0])


def joined(a, b, similarity, threshold, **options):
    return anchor_groups([a, b], [0, 0], similarity=similarity, threshold=threshold, **options)[1] == 0


def has_similarity(a, b, value, similarity, **options):
    """Whether the two meet at every threshold below `value` and at none above."""
    return joined(a, b, similarity, value - 1e-9, **options) and not joined(a, b, similarity, value + 1e-9, **options)


@example("2f_gigpo_greedy_order")
def test_2f_greedy_groups_depend_on_the_order_of_turns(x):
    a, b, c = "0123456789", "012345678x", "01234567yx"
    for first, second, value in ((a, b, x.ab), (b, c, x.bc), (a, c, x.ac)):
        assert has_similarity(first, second, value, "lcs")
        assert has_similarity(first, second, value, "difflib")
    for options in ({"similarity": "lcs", "threshold": 0.85}, {"similarity": "difflib", "threshold": 0.9}):
        assert anchor_groups([a, b, c], [0] * 3, **options).tolist() == x.order_abc
        assert anchor_groups([b, a, c], [0] * 3, **options).tolist() == x.order_bac
    assert anchor_groups([b, a, c], [0] * 3, similarity="lcs", threshold=0.9).tolist() == [0, 1, 2], "the paper's > 0.9 is strict"


@example("2g_ratio_vs_lcs", "2h_ratio_below_lcs")
def test_2g_difflibs_ratio_is_at_most_that_of_the_longest_common_subsequence(same, below):
    assert has_similarity(same.x, same.y, same.difflib, "difflib")
    assert has_similarity(same.x, same.y, same.lcs2, "lcs")
    assert has_similarity(below.p, below.q, below.difflib, "difflib")
    assert has_similarity(below.q, below.p, below.reverse, "difflib")
    assert has_similarity(below.p, below.q, below.lcs2, "lcs")


@example("2i_autojunk", "2j_autojunk_repetitive")
def test_2i_difflib_loses_its_hold_on_long_repetitive_text(x, y):
    alphabet = "".join(chr(0x100 + i) for i in range(x.len_text))
    changed = alphabet[:150] + "?" + alphabet[151:]
    for text, value in (
        ("ab" * (x.len_s200 // 2), x.identical_ab200),
        ("ab" * (x.len_s200 // 2 - 1), x.identical_ab198),
        (alphabet, x.identical_text),
        ("the quick brown fox jumps over the lazy dog" * 8, y.identical),
    ):
        assert joined(text, text, "difflib", value)
        assert joined(text, text, "difflib", x.noautojunk, autojunk=False)
    assert has_similarity(changed, alphabet, x.one_char_diff, "difflib")
    assert has_similarity(changed, alphabet, x.one_char_diff_noautojunk, "difflib", autojunk=False)
    text = ("the quick brown fox jumps over the lazy dog" * 8)[: y.n]
    changed = text[:100] + "?" + text[101:]
    assert has_similarity(changed, text, y.onediff, "difflib")
    assert has_similarity(changed, text, y.onediff_noauto, "difflib", autojunk=False)
    assert has_similarity(changed, text, y.lcs2, "lcs")


EIGHT_GROUPS = [[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0.1, 0.2, 0.1, 0.2], [0, 0, 0, 1], [1, 1, 1, 0], [0, 1, 0, 1]]


@example("11a_starpos")
def test_11a_the_quarter_of_the_groups_that_vary_most(x):
    reward, group, everyone = array(EIGHT_GROUPS).ravel(), jnp.repeat(jnp.arange(8), 4), jnp.ones(32, bool)
    std = filters.group_score(reward, group, everyone)
    close(std[:8], x.std_sample)
    close(filters.group_score(reward, group, everyone, divisor="population")[:8], x.std_pop)
    there = filters.group_exists(group, everyone)
    assert jnp.flatnonzero(filters.best(std, there, fraction=0.25)).tolist() == x.keep25_of8
    three = jnp.arange(32) < 3
    assert filters.best(std, three, fraction=0.25, rounding="floor", at_least=0).sum() == x.int_floor_P3
    assert filters.best(std, three, fraction=0.25).sum() == 1, "never none"
    assert jnp.flatnonzero(filters.varied(reward, group, everyone)).tolist() == x.dapo_keep


@example("11d_vagen_top_p0p9")
def test_11d_as_many_groups_as_hold_nine_tenths_of_the_variance(x):
    reward = array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]]).ravel()
    group, everyone = jnp.repeat(jnp.arange(4), 4), jnp.ones(16, bool)
    variance = filters.group_score(reward, group, everyone, score="variance", divisor="population")
    there = filters.group_exists(group, everyone)
    shares = [filters.kept_share(variance, filters.best(variance, there, count=k), there) for k in (1, 2, 3, 4)]
    close(shares, x.cum)
    kept = filters.nucleus(variance, there, share=0.9)
    assert kept.sum() == x.n
    close(filters.rescaled(jnp.ones(()), kept, there), x.scale)


@example("11c_compact_filter")
def test_11c_cut_off_episodes_leave_the_baseline_or_the_loss_alone(x):
    reward, cut = array([1, 0, 1, 0]), jnp.array([False, False, False, True])
    group, everyone = same_group(4)
    for scope, baseline, advantage in (("statistics", x.baseline_after_drop, x.adv_drop), ("loss", x.baseline_kept, x.adv_mask_only)):
        in_stats, in_loss = filters.exclude(cut, everyone, everyone, scope=scope)
        close(group_statistics(reward, group, in_stats).mean[0], baseline)
        close(group_relative(reward, group, in_stats, std="none", in_loss=in_loss), advantage)
    close(group_relative(reward, group, ~cut, **RLOO), x.rloo_drop)


@example("14c_crash")
def test_14c_crashed_episodes_are_in_no_mean(x):
    member, group = jnp.arange(8) < x.group, jnp.zeros(8, jnp.int32)
    in_stats, reward = jnp.arange(8) < x.n_valid, jnp.zeros(8).at[: x.n_valid].set(jnp.array(x.valid))

    def mean(reward, in_stats):
        return group_statistics(reward, group, in_stats).mean[0]

    close(mean(reward, in_stats), x.mean_excluded)
    close(mean(reward, member), x.mean_crash_as_zero)
    close(mean(array([*x.valid, *x.valid[:3]]), member), x.mean_padded_first3)  # repeating members moves the mean
    assert filters.mostly_valid(group, member, in_stats)[0] == x.keep_rule_more_than_half


@example("12b_foldgrpo")
def test_12b_a_process_reward_inside_the_clip(x):
    """(clip(R + Q, 0, 1) - mean R) / std R with mean and std 1/2: at the bounds of the clip Q does nothing."""
    s = group_statistics(array([1, 0]), *same_group(2))
    for reward, q, expected in (
        (1, 0, x.R1_Q0),
        (1, -1, x.R1_Qm1),
        (1, -0.2, x.R1_Qm0p2),
        (0, -1, x.R0_Qm1),
        (0, 0, x.R0_Q0),
        (1, 0.2, x.R1_Qp),
        (0, 0.2, x.R0_Qp),
    ):
        shaped = returns.reshaped_outcome(array(reward + q - 0.5), limit=0.5) + 0.5
        close(whiten.standardise(shaped, s.mean[0], jnp.square(s.std[0])), expected)


@example("1a_group_R1011")
def test_a_group_is_the_same_jitted(x):
    for options, expected in (({}, x.pop_eps0), ({"std": "none"}, x.mean_only), (RLOO, x.rloo), ({"std": "sample"}, x.sample_eps0)):
        close(jax.jit(partial(group_relative, **options))(array(x.R), *same_group(4)), expected)
    close(jax.jit(partial(group_relative, eps=1e-6))(array(x.R), *same_group(4)), x.pop_eps1e6)
    close(jax.jit(partial(group_relative, std="sample", eps=1e-4))(array(x.R), *same_group(4)), x.sample_eps1e4_TRL)
    close(jax.jit(partial(group_relative, **NEMO))(array(x.R), *same_group(4)), x.nemo_loo_loostd, rtol=2e-6)
    close(jax.jit(baselines.max_rl)(array(x.R), *same_group(4)), x.maxrl)
