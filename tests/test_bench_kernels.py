"""The benchmark of the kernels compares the same rules: on a small batch both sides agree, and one that differs is found."""

import numpy as np
import pytest

from agentrl_jax.data.anchors import anchor_groups
from experiments import bench_anchors
from experiments.bench_kernels import batch
from experiments.bench_kernels.agree import difference


@pytest.fixture(scope="module")
def arrays():
    return batch.make(16, 96)


def test_batch_has_turns_of_the_policy_in_groups(arrays):
    mask, turn = arrays["mask"], arrays["turn"]
    assert 0.3 < mask.mean() < 0.7
    assert (np.diff(turn, axis=1) >= 0).all()
    for row in range(len(mask)):
        count = arrays["exists"][row].sum()
        assert set(turn[row][mask[row]]) == set(range(count))
    np.testing.assert_allclose(arrays["turn_reward"].sum(1), arrays["reward"].sum(1), rtol=1e-5)
    assert not arrays["reward"][~mask].any()
    assert (np.bincount(arrays["group"]) == batch.GROUP).all()


def test_a_difference_is_found():
    x = np.linspace(-1, 1, 1000, dtype=np.float32)
    assert difference([x], [x * (1 + 1e-4)]) is None
    assert difference([x], [x * 1.01]) is not None
    assert difference([x], [np.where(x == x[5], np.nan, x)]) == "something is not finite"
    assert difference([x], [x[:-1]]) is not None


@pytest.mark.real("torch")
def test_every_rule_is_on_both_sides(arrays):
    from experiments.bench_kernels import ours, torch_side

    assert set(batch.CREDIT) == set(ours.CREDIT) == set(torch_side.CREDIT)
    assert set(batch.LOSSES) == set(ours.LOSSES) == set(torch_side.LOSSES)


@pytest.mark.real("torch")
@pytest.mark.slow
@pytest.mark.parametrize("rule", batch.RULES)
def test_both_sides_agree(arrays, rule):
    from experiments.bench_kernels import ours, torch_side

    here = ours.to_numpy(ours.rule(rule, ours.load(arrays))())
    there = torch_side.to_numpy(torch_side.rule(rule, torch_side.load(arrays))())
    assert difference(here, there) is None


def test_the_loop_over_pairs_gives_the_same_groups():
    states, group = (x[:300] for x in bench_anchors.make())
    found = anchor_groups(states, group, similarity="lcs", threshold=bench_anchors.THRESHOLD)
    assert 1 < len(set(found.tolist())) < 300
    np.testing.assert_array_equal(found, bench_anchors.pairs(states, group))
