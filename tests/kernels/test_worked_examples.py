"""The worked example that everything else is about, and those about episodes laid out in rows. At the end: every example has a test.

A bug in `parse_date`: four trajectories of at most three turns on one task, of which the second fails. Each reads a file, edits it and
runs the tests, and submits: 1,800 tokens, of which the policy wrote 200.
"""

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import credit
from agentrl_jax.credit import Estimates
from agentrl_jax.data.collate import collate, unpack
from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Turn
from agentrl_jax.kernels import correction, diagnostics, filters, policy_loss
from agentrl_jax.kernels.group import group_relative, state_relative, turn_returns
from agentrl_jax.kernels.reduce import counts, token_weights, weighted_sum
from agentrl_jax.report.summary import summarise
from tests.data.strategies import make_episode, observed, sampled
from tests.kernels import worked
from tests.kernels.worked import NAMES, NUMBERS, array, close, example, same_group

TASK, READ, FILE, EDIT, LOG, SUBMIT = 400, 60, 900, 100, 300, 40
REWARDS = (1.0, 0.0, 1.0, 1.0)
STATES = (("start", "read"), ("start", "read"), ("start", "grep"), ("start", "ls"))


def trajectory(number, reward=None, *, states=None, ending=Ending.SUBMITTED):
    """task, read, file content, edit, log of the tests, submit."""
    spans = [observed([7] * TASK, author=Author.TASK)]
    for turn, (action, answer) in enumerate([(READ, FILE), (EDIT, LOG), (SUBMIT, 0)]):
        spans.append(sampled(spans, [number + 1] * action, turn))
        if answer:
            spans.append(observed([9] * answer, turn))
    reached = (*(STATES[number] if states is None else states), f"own {number}")
    return Episode(
        id=f"tau{number + 1}",
        task="parse_date",
        group="parse_date",
        seed=0,
        step=0,
        segments=(Segment(tuple(spans)),),
        turns=tuple(Turn(state=state) for state in reached),
        ending=ending,
        outcome=Outcome(REWARDS[number] if reward is None else reward),
    )


def group(**options):
    return [trajectory(number, **options) for number in range(4)]


def laid_out(episodes, **options):
    """On the device, one trajectory in each row."""
    return jax.device_put(collate(episodes, row_length=2048, pack=False, **options)[0])


def of_turns(batch, rule):
    """The advantage of each turn of the first four episodes; nothing may stand on what the policy did not write."""
    advantages = np.asarray(jax.jit(rule)(batch, Estimates()).advantages)
    mask, turn = np.asarray(batch.tokens.mask), np.asarray(batch.tokens.turn)
    assert (advantages[~mask] == 0).all()
    found = [[set(advantages[e][mask[e] & (turn[e] == k)].tolist()) for k in range(3)] for e in range(4)]
    assert all(len(values) == 1 for row in found for values in row), "all tokens of a turn share its number"
    return np.array([[values.pop() for values in row] for row in found])


def test_200_of_1800_tokens_have_a_gradient_and_the_denominator_is_800():
    tokens = laid_out(group()).tokens
    assert np.asarray((tokens.segment > 0).sum(1)).tolist() == [1800] * 4
    assert np.asarray(tokens.mask.sum(1)).tolist() == [200] * 4
    assert counts(tokens.mask)["tokens"] == 800
    np.testing.assert_allclose(token_weights(tokens.mask)[tokens.mask], 1 / 800, rtol=1e-6)
    assert 200 / 1800 == 1 / 9


@example("9c_seed_weight")
def test_9c_without_the_mask_six_sevenths_of_the_gradient_would_be_tool_output(x):
    tokens = laid_out(group()).tokens
    assert counts(tokens.mask)["tokens"] == x.denominator
    close(token_weights(tokens.mask).max(), x.w)
    tools = (tokens.segment > 0) & ~tokens.mask & (tokens.position >= TASK)
    assert int(tools.sum()) == 6 * int(tokens.mask.sum()), "1,200 to 200"
    unmasked = token_weights(tokens.mask | tools)
    close(weighted_sum(tools.astype(float), unmasked), x.unmasked_tool_share)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.577, -1.732, 0.577, 0.577]),
        ({"std": "sample"}, [0.5, -1.5, 0.5, 0.5]),
        ({"std": "none", "baseline": "leave_one_out"}, [0.333, -1.0, 0.333, 0.333]),
    ],
)
def test_advantages_in_three_conventions_are_proportional_and_sum_to_0(options, expected):
    found = of_turns(laid_out(group()), partial(credit.grpo, **options))
    np.testing.assert_allclose(found, np.tile(np.array(expected)[:, None], 3), atol=5e-4)
    np.testing.assert_allclose(found.sum(0), 0.0, atol=1e-6)
    np.testing.assert_allclose(found[:, 0] / found[0, 0], [1, -3, 1, 1], rtol=1e-6)


def test_the_failures_200_tokens_are_pushed_down_and_the_others_up():
    batch = laid_out(group())
    mask, advantages = batch.tokens.mask, credit.grpo(batch, Estimates()).advantages
    loss = jax.grad(lambda logprob: weighted_sum(policy_loss.reinforce(logprob, advantages), token_weights(mask)))(batch.tokens.logprob)
    pushed = -np.asarray(loss.sum(1)) * 800 / 200
    np.testing.assert_allclose(pushed, [0.577350, -1.732051, 0.577350, 0.577350], rtol=1e-5)
    assert (np.asarray(loss)[~np.asarray(mask)] == 0).all()


def test_a_read_that_two_trajectories_share_is_pushed_by_minus_1_155():
    found = of_turns(laid_out(group()), credit.grpo)[:, 0]
    np.testing.assert_allclose(found[0] + found[1], -1.1547005, rtol=1e-5)
    assert np.mean(REWARDS[:2]) == 0.5 < np.mean(REWARDS) == 0.75, "those two succeeded less often than the group"


def test_a_first_step_that_all_share_is_not_pushed_at_all():
    found = of_turns(laid_out(group()), partial(credit.grpo, std="none"))[:, 0]
    assert found.tolist() == [0.25, -0.75, 0.25, 0.25]
    assert found.sum() == 0


def test_gigpo_splits_the_two_edits_after_the_same_read():
    found = of_turns(laid_out(group()), credit.gigpo)
    np.testing.assert_allclose(found[:2, 1], [1.577, -2.732], atol=5e-4)
    np.testing.assert_allclose(found[:, 0], 2 * np.array([0.577350, -1.732051, 0.577350, 0.577350]), rtol=1e-5)
    np.testing.assert_allclose(found[:, 2], [0.577350, -1.732051, 0.577350, 0.577350], rtol=1e-5)


def test_gigpo_in_the_first_turn_repeats_the_advantage_of_the_episode():
    """The returns differ by the common factor 0.95^2, which a division by the std takes out and a mean alone does not."""
    exists = jnp.ones((4, 3), bool)
    to_go = turn_returns(jnp.zeros((4, 3)).at[:, 2].set(jnp.array(REWARDS)), exists, gamma=0.95)
    np.testing.assert_allclose(to_go[:, 0], 0.95**2 * np.array(REWARDS), rtol=1e-6)
    state = jnp.zeros((4, 3), jnp.int32).at[:, 1:].set(-1)
    for std, factor in (("population", 1.0), ("none", 0.95**2)):
        a_s = state_relative(to_go, state, exists, std=std)[:, 0]
        np.testing.assert_allclose(a_s, factor * group_relative(jnp.array(REWARDS), *same_group(4), std=std), rtol=1e-5)


def test_the_pair_of_edits_does_not_depend_on_who_took_another_route():
    pair = partial(credit.gigpo, omega=1.0)
    differences = []
    for third in (1.0, 0.0):
        batch = laid_out([*group()[:2], trajectory(2, third), trajectory(3)])
        both = of_turns(batch, pair)[:2, 1] - of_turns(batch, credit.grpo)[:2, 1]
        differences.append(both)
    np.testing.assert_allclose(differences, [[1.0, -1.0]] * 2, rtol=1e-5)


def test_without_a_state_that_recurs_gigpo_is_grpo():
    alone = [trajectory(number, states=(f"a{number}", f"b{number}")) for number in range(4)]
    np.testing.assert_array_equal(of_turns(laid_out(alone), credit.gigpo), of_turns(laid_out(alone), credit.grpo))


@pytest.mark.parametrize(
    ("options", "expected", "trained"),
    [
        ({"limits": "score"}, [0.5, -0.5, 0.5, -0.5], True),
        ({"limits": "drop"}, [1 / 3, -2 / 3, 1 / 3, 0.0], False),
        ({"limits": "drop", "dropped_in_stats": True}, [0.5, -0.5, 0.5, -0.5], False),
    ],
)
def test_a_trajectory_that_hits_a_limit_fails_or_leaves(options, expected, trained):
    cut = trajectory(3, 0.0, ending=Ending.CONTEXT_LIMIT)
    batch = laid_out([*group()[:3], cut], **options)
    np.testing.assert_allclose(of_turns(batch, partial(credit.grpo, std="none"))[:, 0], expected, rtol=1e-5, atol=1e-7)
    assert bool(batch.episodes.in_loss[3]) is trained


def test_a_trajectory_that_hits_a_limit_goes_on_with_a_critics_value():
    cut = trajectory(3, 0.0, ending=Ending.CONTEXT_LIMIT)
    batch = laid_out([*group()[:3], cut])
    values = Estimates(values=jnp.full(batch.tokens.mask.shape, 0.25), bootstrap=jnp.full(4, 0.75))
    last = np.asarray(batch.tokens.action) == 199
    for bootstrap, expected in ((True, [0.75, -0.25, 0.75, 0.5]), (False, [0.75, -0.25, 0.75, -0.25])):
        found = np.asarray(credit.gae(batch, values, bootstrap=bootstrap).advantages)
        np.testing.assert_allclose(found[last], expected, rtol=1e-5)


def shares(**counted):
    """A hundred episodes: how many repaired the bug, and how many others the verifier let through or not."""
    one, made, number = trajectory(0), [], 0
    for kind, n in counted.items():
        for _ in range(n):
            outcome = Outcome(float(kind != "caught"), true_success=kind == "real", tampering=("tests",) if kind == "tampered" else ())
            made.append(replace(one, id=f"e{number}", outcome=outcome))
            number += 1
    return summarise(made)


def test_reward_hacking_reward_rises_by_35_points_and_true_success_by_5():
    """Editable tests that miss some wrong repairs: 0.55 -> 0.90 with 0.30 -> 0.35 real; hardened, the same policies score 0.34 and 0.40."""
    before = shares(real=30, wrong=20, tampered=5, caught=45)
    after = shares(real=35, wrong=20, tampered=35, caught=10)
    for found, reward, success, tampered in ((before, 0.55, 0.30, 5), (after, 0.90, 0.35, 35)):
        np.testing.assert_allclose([found["rollout/reward"], found["rollout/success"]], [reward, success], rtol=1e-12)
        assert found["rollout/tampered"] == tampered
    hardened = [shares(real=30, wrong=4, caught=66), shares(real=35, wrong=5, caught=60)]
    np.testing.assert_allclose([found["rollout/reward"] for found in hardened], [0.34, 0.40], rtol=1e-12)
    np.testing.assert_allclose([found["rollout/success"] for found in hardened], [0.30, 0.35], rtol=1e-12)


def test_in_a_group_an_edited_test_is_worth_as_much_as_a_real_fix():
    real, edited, failed, wrong = of_turns(laid_out([trajectory(i, r) for i, r in enumerate((1.0, 1.0, 0.0, 0.0))]), credit.grpo)[:, 0]
    assert real == edited > 0 > failed == wrong


@example("11b_overlong")
def test_11b_soft_overlong_punishment_is_bounded_in_the_paper(x):
    for bounded, expected in ((True, x.paper), (False, x.code)):
        close(filters.overlong_penalty(array(x.L), limit=20480.0, margin=4096.0, bounded=bounded), expected)


@example("14e_overlong_length_choice")
def test_14e_counting_tool_output_is_a_whole_penalty(x):
    tokens = laid_out(group()).tokens
    for length, expected in ((x.total, x.pen_total), (x.model, x.pen_model)):
        assert length in (int(tokens.mask[0].sum()), int((tokens.segment[0] > 0).sum()))
        close(filters.overlong_penalty(array([length]), limit=float(x.Lmax), margin=float(x.Lcache), bounded=False), [expected])


def on_segments(rule, episodes):
    """{episode: the set of advantages on the policy's tokens, segment after segment}, in float32 as a run has it."""
    with jax.enable_x64(False):
        host, packing = collate(episodes, row_length=128)
        batch = jax.device_put(host)
        advantages = unpack(np.asarray(jax.jit(rule)(batch, Estimates()).advantages), packing)
    masks = unpack(np.asarray(host.tokens.mask), packing)
    return {
        episode.id: [set(a[m].tolist()) for a, m in zip(of, mask, strict=True)]
        for episode, of, mask in zip(episodes, advantages, masks, strict=True)
    }


@example("12a_supo")
def test_12a_an_episode_counts_once_however_many_segments_it_has(x):
    reward = array([1, 0])
    for std, once, by_rows in (("sample", x.dedup_adv, x.rows_adv_dup), ("none", x.meanonly_dedup, x.meanonly_dup)):
        close(group_relative(reward, *same_group(2), std=std), once)
        close(group_relative(reward, *same_group(2), std=std, count=array([3, 1])), by_rows)
        episodes = [make_episode("a", reward=1.0, turns=3, segments=3), make_episode("b", reward=0.0, turns=1)]
        found = on_segments(partial(credit.grpo, std=std), episodes)
        np.testing.assert_allclose([value for segment in found["a"] for value in segment], [once[0]] * 3, rtol=1e-6)
        np.testing.assert_allclose([value for segment in found["b"] for value in segment], once[1:], rtol=1e-6)


@example("12f_slime_fanout")
def test_12f_an_episode_in_two_rows_does_not_make_one_group_of_the_batch(x):
    rows = array(x.rewards)
    close(group_relative(rows, *same_group(5), std="none"), x.batch_centered)
    group, counted = jnp.array([0, 0, 0, 1, 1]), jnp.array([True, False, True, True, True])
    close(group_relative(rows, group, counted, std="none", in_loss=jnp.ones(5, bool)), x.per_rollout_groups)
    episodes = [make_episode("a", group="g", reward=1.0, turns=2, segments=2), make_episode("b", group="g", reward=0.0)]
    episodes += [make_episode(name, group="h", reward=1.0) for name in "cd"]
    found = on_segments(partial(credit.grpo, std="none"), episodes)
    assert [value for of in found.values() for segment in of for value in segment] == x.per_rollout_groups


@example("12g_rollout_mean")
def test_12g_tokens_of_an_episode_in_two_segments_weigh_the_same(x):
    first, second = x.seg_tokens
    mask = jnp.arange(6)[None] < jnp.array([first, second])[:, None]
    episode, group = jnp.zeros((2, 6), jnp.int32), jnp.zeros(1, jnp.int32)
    close(token_weights(mask, episode, group, reduction="episode")[mask], np.full(first + second, x.per_rollout_token_weight))
    close(token_weights(mask, reduction="episode")[:, 0], x.per_segment_mean_weight)


@example("14d_final_segment_masked")
def test_14d_a_last_segment_without_an_action_takes_nothing_from_the_others(x):
    """Reading an episode's advantage off its last row, at the first token in the loss, finds 0 where there is none."""
    assert np.argmax(x.final_mask) == x.argmax
    assert x.adv_row[x.argmax] == x.broadcast
    good = make_episode("a", reward=1.0, turns=2)
    silent = Segment((observed([1, 2, 3], 1, Author.SUMMARIZER),))
    found = on_segments(partial(credit.grpo, std="none"), [replace(good, segments=(*good.segments, silent)), make_episode("b", reward=0.0)])
    assert found["a"] == [{0.5}, set()]
    assert found["b"] == [{-0.5}]


@pytest.mark.parametrize(("author", "trained"), [(Author.POLICY, True), (Author.SUMMARIZER, False)])
def test_a_summary_is_an_action_once_where_the_policy_wrote_it_and_its_copy_never(author, trained):
    task = observed([1, 2, 3], author=Author.TASK)
    action = sampled([task], [4, 5])
    summary = sampled([task, action], [6, 7, 8], 1) if author is Author.POLICY else observed([6, 7, 8], 1, author)
    copied = [task, observed([6, 7, 8], 1, Author.COPY)]
    later = sampled(copied, [9], 2)
    episode = replace(
        make_episode("a", turns=3), segments=(Segment((task, action, summary)), Segment((replace(task, turn=1), copied[1], later)))
    )
    tokens = laid_out([episode]).tokens
    assert np.asarray(tokens.mask.sum(1)).tolist()[:2] == [5 if trained else 2, 1]


@example("12e_criticalsteps")
def test_12e_of_parallel_subagents_the_slowest_counts(x):
    main = array([stage[0] for stage in x.stages])
    steps = [stage[1] for stage in x.stages]
    mask = jnp.arange(2)[None] < jnp.array([len(of) for of in steps])[:, None]
    taken = array([[*of, 0, 0][:2] for of in steps])
    for level, expected in (("max", x.critical), ("sum", x.total)):
        assert jnp.sum(main + correction.over_unit(taken, mask, level=level)[:, 0]) == expected


@example("13a_areal_staleness")
def test_13a_as_many_requests_as_the_bound_on_staleness_admits(x):
    """The n-th request is trained by version (n - 1) // B."""

    def admitted(n):
        return bool(diagnostics.policy_lag(jnp.array([x.version]), now=(n - 1) // x.B)[0] <= x.eta)

    assert admitted(x.max_submitted) is x.check_ok
    assert admitted(x.max_submitted + 1) is x.next_bad


def test_early_and_late_turns_of_a_trajectory_may_come_from_different_weights():
    task = observed([1, 2], author=Author.TASK)
    first = sampled([task], [3, 4], versions=5)
    second = sampled([task, first], [5], 1, versions=7)
    tokens = laid_out([replace(make_episode("a"), segments=(Segment((task, first, second)),))]).tokens
    assert diagnostics.versions_spanned(tokens.version, tokens.mask, tokens.episode, 1)[0, 0] == 2
    assert np.asarray(diagnostics.policy_lag(tokens.version, 7)[tokens.mask]).tolist() == [2, 2, 0]


def test_every_example_has_a_test():
    for path in sorted(Path(worked.__file__).parent.glob("test_worked_*.py")):
        importlib.import_module(f"tests.kernels.{path.stem}")
    assert NUMBERS.keys() == NAMES
