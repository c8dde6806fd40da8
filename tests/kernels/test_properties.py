"""What must hold of every loss and of every group rule alike, whatever the numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax import credit, objective
from agentrl_jax.credit import Estimates
from agentrl_jax.data.collate import collate
from agentrl_jax.kernels import baselines, covariance, policy_loss, sequence_loss
from agentrl_jax.kernels.group import group_relative, group_statistics
from agentrl_jax.kernels.kl import kl
from agentrl_jax.kernels.policy_loss import in_trust_region, masked_log_ratio
from agentrl_jax.kernels.reduce import counts, token_weights, weighted_sum
from agentrl_jax.kernels.value_loss import value_loss
from agentrl_jax.kernels.whiten import whiten
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.objective import PolicyInputs, Signals
from tests.data.strategies import make_episode

ROWS, WIDTH, WIDER = 4, 6, 9
NAMES = ("new", "old", "advantage", "value", "target")


def every_loss(x, mask):
    """{name: loss of each token}; `chosen` tokens are fixed before any split into micro-batches."""
    chosen = x["chosen"] & mask
    new, old, advantage = (jnp.where(mask, x[name], 0.0) for name in ("new", "old", "advantage"))
    unit = jnp.zeros(mask.shape, jnp.int32)
    log_ratio = masked_log_ratio(x["new"], x["old"], mask)
    keep = in_trust_region(new, old, advantage, low=0.1, high=0.1)
    sequences = (log_ratio, advantage, mask, unit)
    critic = (x["value"], x["target"], mask)
    return {
        "reinforce": policy_loss.reinforce(new, advantage),
        "ppo": policy_loss.ppo_clip(log_ratio, advantage, dual_clip=3.0),
        "decoupled": policy_loss.decoupled_ppo(log_ratio, advantage, jnp.exp(0.1 * new)),
        "sapo": policy_loss.sapo(log_ratio, advantage),
        "cispo": policy_loss.cispo(new, log_ratio, advantage),
        "dis": policy_loss.dis(new, log_ratio, advantage),
        "topr": policy_loss.topr(new, log_ratio, advantage, advantage > 0),
        "dro": policy_loss.dro(new, log_ratio, advantage, beta=0.1),
        "dppo": policy_loss.dppo(new, log_ratio, advantage, keep, penalty=1e-3),
        "gspo": sequence_loss.gspo(*sequences, clip_low=0.2, clip_high=0.2),
        "gspo_token": sequence_loss.gspo(*sequences, form="token"),
        "gmpo": sequence_loss.gmpo(*sequences),
        "vespo": sequence_loss.vespo(new, *sequences),
        "kl_cov": covariance.kl_cov(log_ratio, advantage, chosen),
        "clip_cov": covariance.clip_cov(log_ratio, advantage, chosen),
        "k1": kl(log_ratio, estimator="k1"),
        "k2": kl(log_ratio),
        "k3": kl(log_ratio, estimator="k3"),
        "k3_k2": kl(log_ratio, estimator="k3", gradient="k2"),
        "value": value_loss(*critic),
        "value_clipped": value_loss(*critic, old=x["old"], clip=0.2),
        "value_huber": value_loss(*critic, huber=0.5),
    }


LOSSES = 22


@jax.jit
def totals(x, mask, whole):
    """Each loss over the batch, and its gradient at log-probs and values, with the denominators of the whole."""
    weights = token_weights(mask, reduction="episode", **whole)

    def total(new, value):
        found = every_loss(x | {"new": new, "value": value}, mask)
        assert len(found) == LOSSES
        return jnp.stack([weighted_sum(loss, weights) for loss in found.values()])

    return total(x["new"], x["value"]), *jax.jacrev(total, (0, 1))(x["new"], x["value"])


def batch(seed):
    """Arrays of a batch, and which tokens are in the loss: at least one in each row."""
    random = np.random.RandomState(seed)
    x = {name: random.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in NAMES}
    x["new"], x["old"] = -np.abs(x["new"]), -np.abs(x["old"])
    mask = random.uniform(size=(ROWS, WIDTH)) < 0.6
    mask[:, 2] = True
    return x | {"chosen": random.uniform(size=(ROWS, WIDTH)) < 0.3}, mask


def of_whole(mask):
    """Denominators but the lengths of rows, which each part knows of its own."""
    found = counts(jnp.asarray(mask))
    return {name: found[name] for name in ("tokens", "episodes", "groups")}


def assert_alike(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(ROWS)), left=st.integers(0, WIDER - WIDTH))
def test_rows_in_any_order_and_padding_on_either_side(seed, order, left):
    """Row by row elsewhere, with NaN all around it."""
    x, mask = batch(seed)
    order, place = list(order), slice(left, left + WIDTH)
    moved = {name: np.full((ROWS, WIDER), True if a.dtype == bool else np.nan, a.dtype) for name, a in x.items()}
    wide = np.zeros((ROWS, WIDER), bool)
    for name, a in x.items():
        moved[name][:, place] = a[order]
    wide[:, place] = mask[order]
    value, *gradients = totals(moved, wide, of_whole(wide))
    expected = totals(x, mask, of_whole(mask))
    outside = np.broadcast_to(~wide, gradients[0].shape)
    assert all((np.asarray(g)[outside] == 0).all() for g in gradients)
    back = np.argsort(order)
    assert_alike([value, *(np.asarray(g)[:, back, place] for g in gradients)], expected)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(ROWS)))
def test_micro_batches_with_the_denominators_of_the_whole_add_up(seed, order):
    x, mask = batch(seed)
    whole = of_whole(mask)
    parts = [list(order[: ROWS // 2]), list(order[ROWS // 2 :])]
    found = [totals({name: a[part] for name, a in x.items()}, mask[part], whole) for part in parts]
    value, *gradients = totals(x, mask, whole)
    np.testing.assert_allclose(found[0][0] + found[1][0], value, rtol=2e-5, atol=1e-5)
    for i, gradient in enumerate(gradients, 1):
        together = np.concatenate([found[0][i], found[1][i]], axis=1)[:, np.argsort(parts[0] + parts[1])]
        np.testing.assert_allclose(together, gradient, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nothing_under_the_mask_reaches_a_loss_or_its_gradient(poison):
    x, mask = batch(0)
    dirty = {name: a if a.dtype == bool else np.where(mask, a, np.float32(poison)) for name, a in x.items()}
    for found, expected in zip(totals(dirty, mask, of_whole(mask)), totals(x, mask, of_whole(mask)), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found, expected)


OBJECTIVES = {
    "ppo": partial(objective.ppo, kl=0.1, kl_estimator="k3", entropy=0.01),
    "decoupled": partial(objective.ppo, old="proximal"),
    "kl_cov": partial(objective.kl_cov, fraction=0.2),
    "clip_cov": partial(objective.clip_cov, fraction=0.2, lower=0.0),
    "supervised": objective.supervised,
} | {
    term.__name__: partial(objective.policy, term=term)
    for term in (policy_loss.cispo, policy_loss.dis, policy_loss.topr, sequence_loss.gspo, sequence_loss.gmpo, sequence_loss.vespo)
}


@jax.jit
def objectives(new, others, mask):
    """Each objective, its gradient, and its metrics, summed over the mask as the learner does."""

    def total(new, loss):
        entropy, behaviour, advantages, reference, proximal, weight = others
        signals = Signals(advantages, reference, proximal, weight)
        segment = jnp.ones(mask.shape, jnp.int32)
        found = loss(PolicyInputs(new, entropy, behaviour, signals, mask, segment, segment))
        return jnp.sum(jnp.where(mask, found.loss, 0.0)), {name: jnp.sum(jnp.where(mask, m, 0.0)) for name, m in found.metrics.items()}

    return {name: jax.value_and_grad(total, has_aux=True)(new, loss) for name, loss in OBJECTIVES.items()}


def test_nothing_under_the_mask_reaches_an_objective_or_its_metrics():
    random = np.random.RandomState(0)
    _, mask = batch(0)
    arrays = [-np.abs(random.normal(size=mask.shape)).astype(np.float32) for _ in range(7)]
    expected = objectives(arrays[0], arrays[1:], mask)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    for poison in (np.nan, np.inf, -np.inf):
        dirty = [np.where(mask, a, np.float32(poison)) for a in arrays]
        jax.tree.map(np.testing.assert_array_equal, objectives(dirty[0], dirty[1:], mask), expected)


EVERYONE = jnp.zeros(8, jnp.int32), jnp.ones(8, bool)
TENTHS = jnp.full(8, 0.1, jnp.float32)
LENGTHS = jnp.arange(1, 9).astype(jnp.float32)
KERNELS = {
    "population": lambda r: group_relative(r, *EVERYONE, eps=1e-8),
    "sample": lambda r: group_relative(r, *EVERYONE, std="sample", eps=1e-8),
    "areal": lambda r: group_relative(r, *EVERYONE, std_about="baseline", eps=1e-8),
    "leave_one_out": lambda r: group_relative(r, *EVERYONE, std="leave_one_out", baseline="leave_one_out", eps=1e-8),
    "length": lambda r: group_relative(r, *EVERYONE, std="none", baseline="length", length=LENGTHS),
    "rows": lambda r: group_relative(r, *EVERYONE, count=LENGTHS, eps=1e-8),
    "batch": lambda r: group_relative(r, jnp.arange(8) // 4, EVERYONE[1], scale_group=EVERYONE[0], eps=1e-8),
    "pass_at_k": lambda r: baselines.pass_at_k(r, *EVERYONE, std="sample", eps=1e-8),
    "max_rl": lambda r: baselines.max_rl(r, *EVERYONE),
    "gdpo": lambda r: baselines.gdpo(
        jnp.stack([r, r], 1), jnp.array([1.0, 0.3]), EVERYONE[0], jnp.ones((8, 2), bool), eps=1e-8, whiten_eps=1e-8
    ),
    "gdpo_tokens": lambda r: baselines.gdpo(
        jnp.stack([r, r], 1), jnp.array([1.0, 0.3]), EVERYONE[0], jnp.ones((8, 2), bool), count=LENGTHS, whiten_eps=1e-8
    ),
    "whiten": lambda r: whiten(r, EVERYONE[1], eps=1e-8),
    "std": lambda r: group_statistics(r, *EVERYONE).std[:1],
}


@pytest.mark.parametrize("name", KERNELS)
def test_eight_float32_rewards_of_a_tenth_are_exactly_nothing(name):
    assert (KERNELS[name](TENTHS) == 0).all()
    assert (jax.jit(KERNELS[name])(TENTHS) == 0).all()


RULES = {
    "grpo": partial(credit.grpo, eps=1e-8),
    "nemo": partial(credit.grpo, std="leave_one_out", baseline="leave_one_out"),
    "gpg": credit.gpg,
    "pass_at_k": credit.pass_at_k,
    "max_rl": credit.max_rl,
    "gdpo": partial(credit.gdpo, weights=(1.0, 0.3)),
    "reinforce_pp_baseline": credit.reinforce_pp_baseline,
    "reinforce_pp_baseline_tokens": partial(credit.reinforce_pp_baseline, over="tokens"),
    "gigpo": credit.gigpo,
    "mt_grpo": credit.mt_grpo,
}


def test_eight_episodes_that_earned_a_tenth_teach_exactly_nothing():
    episodes = [
        make_episode(f"e{i}", reward=0.1, turns=2, states=["s", "t"], turn_rewards=[0.1, 0.1], components={"a": 0.1, "b": 0.7}, seed=i)
        for i in range(8)
    ]
    device = jax.device_put(collate(episodes, row_length=64, components=("a", "b"))[0])
    found = jax.jit(lambda: {name: rule(device, Estimates()).advantages for name, rule in RULES.items()})()
    assert {name for name, advantages in found.items() if (advantages != 0).any()} == set()


@settings(max_examples=10)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=4, max_size=4),
    rows_of=st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
def test_a_count_is_that_many_rows_of_gdpo(rewards, rows_of):
    """And a duplicated row that is in no statistic changes nothing."""
    parts = jnp.array(rewards, jnp.float32)[:, None] * jnp.array([[1.0, -2.0]]) + jnp.array([[0.0, 1.0]])
    weights, group, present = jnp.array([1.0, 0.5]), jnp.zeros(4, jnp.int32), jnp.ones((4, 2), bool)
    once = baselines.gdpo(parts, weights, group, present, count=jnp.array(rows_of, jnp.float32))
    owner = np.zeros(12, int)
    owner[: sum(rows_of)] = np.repeat(np.arange(4), rows_of)
    first = np.arange(12) == np.array([np.flatnonzero(owner == e)[0] for e in owner])
    column = group_relative(parts[owner, 0], jnp.zeros(12, jnp.int32), jnp.asarray(first), in_loss=jnp.ones(12, bool))
    np.testing.assert_allclose(column, group_relative(parts[:, 0], group, jnp.ones(4, bool))[owner], rtol=1e-5, atol=1e-6)
    tokens = np.arange(12) < sum(rows_of)
    total = jnp.sum(jnp.stack([group_relative(parts[:, c], group, jnp.ones(4, bool)) for c in range(2)], 1) * weights[None], 1)
    np.testing.assert_allclose(whiten(total[owner], jnp.asarray(tokens))[: sum(rows_of)], once[owner][: sum(rows_of)], rtol=1e-4, atol=1e-5)


def test_the_loss_mask_changes_no_log_prob():
    """What is trained and what is seen are different masks: with every token in the loss, or none, the policy's have the same log-probs."""
    model = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
    learner = Learner(model, optax.sgd(1.0), credit.grpo, objective.ppo)
    params = init_params(model, jax.random.key(0))
    episodes = [make_episode("a", turns=2, seed=1), make_episode("b", turns=3, segments=2, seed=2)]
    tokens = jax.device_put(collate(episodes, row_length=64, row_multiple=4)[0]).tokens
    expected = learner.logprobs(params, tokens)
    assert (expected[tokens.mask] < 0).all()
    everything = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), tokens.ids.shape)
    for changed in (
        {"mask": ~tokens.mask, "in_loss": ~tokens.in_loss},
        {"mask": jnp.zeros_like(tokens.mask), "in_loss": jnp.zeros_like(tokens.mask)},
        {"mask": tokens.segment > 0, "in_loss": tokens.segment > 0, "predict": everything},
    ):
        found = learner.logprobs(params, replace(tokens, **changed))
        np.testing.assert_allclose(found[tokens.mask], expected[tokens.mask], rtol=1e-5, atol=1e-6)
