"""The benchmarks of the learner compare the same work: its layouts hold the same tokens, and a loss that differs is found."""

import re

import numpy as np
import pytest

from agentrl_jax.data.collate import collate
from agentrl_jax.models.decoder import ModelConfig
from experiments import bench_gpu, bench_learner
from experiments.ragged import CONTEXT, TURNS, layouts, ragged
from experiments.sides import Measured, check


@pytest.fixture(scope="module")
def episodes():
    return ragged(12, 220, 1024, 512)


def test_episodes_are_ragged_and_nine_parts_context(episodes):
    lengths = [len(episode.segments[0]) for episode in episodes]
    assert max(lengths) > 2 * np.median(lengths)
    actions = sum(episode.policy_tokens for episode in episodes)
    assert 0.8 < (sum(lengths) - actions) / actions / CONTEXT < 1.3
    assert all(len(episode.turns) == TURNS for episode in episodes)


def test_every_layout_holds_the_same_actions_behind_the_same_tokens(episodes):
    found = {}
    for name, pieces in layouts(episodes, collate(episodes, row_length=(768, 1024))[0]).items():
        texts = set()
        for piece in pieces:
            ids, positions, action = (piece[part] for part in ("ids", "positions", "action"))
            for row, column in zip(*np.nonzero(action), strict=True):
                start = column - positions[row, column]
                assert (np.diff(positions[row, start : column + 1]) == 1).all()
                texts.add(ids[row, start : column + 1].tobytes())
        found[name] = texts
    assert list(found) == ["padded", "sorted", "packed", "flat"]
    assert len(found["padded"]) == sum(episode.policy_tokens for episode in episodes)
    assert all(texts == found["padded"] for texts in found.values())


@pytest.mark.parametrize(("loss", "norm"), [(1.001, 2.0), (1.0, 2.01), (float("nan"), 2.0), (1.0, float("nan"))])
def test_a_loss_or_gradient_that_differs_is_no_comparison(loss, norm):
    ours = Measured(1.0, 2.0, 1.0, 1.0, 0)
    check(ours, {"same": Measured(1.00001, 2.0002, 1.0, 1.0, 0)})
    with pytest.raises(SystemExit, match=r"no comparison.*\(padded\)"):
        check(ours, {"same": ours, "padded": Measured(loss, norm, 1.0, 1.0, 0)})


@pytest.fixture
def torch_waits(monkeypatch):
    """PyTorch's threads would take cores while they wait, which other tests need."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.mark.slow
@pytest.mark.real("torch")
def test_both_sides_train_the_same(torch_waits, capsys):
    bench_learner.main(["--sizes", "tiny"])
    sides = re.findall(r"^  (.+?)(?:, \w+)? +[\d,]+ tokens/s .*?(ratio \d+\.\d+)?$", capsys.readouterr().out, flags=re.MULTILINE)
    ragged_sides = ["this package", "PyTorch padded", "PyTorch sorted", "PyTorch packed", "PyTorch flat"]
    assert [name for name, _ in sides] == [*ragged_sides, "this package", "PyTorch rows"]
    assert all(bool(ratio) == name.startswith("PyTorch") for name, ratio in sides)


@pytest.mark.slow
@pytest.mark.real("torch")
def test_both_sides_train_the_same_in_bfloat16(torch_waits, capsys):
    bench_gpu.main(["--tiny"])
    out = capsys.readouterr().out
    assert re.findall(r"^  (.+?)(?:, \w+)? +[\d,]+ tokens/s", out, flags=re.MULTILINE) == [
        "this package",
        "PyTorch padded",
        "PyTorch packed",
        "PyTorch flat",
    ]
    assert "MFU is unknown" in out  # of a CPU


def test_mfu_counts_the_matmuls_of_real_tokens():
    model = ModelConfig(vocab_size=100, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=16)
    # q and o 8 x 16 each, k and v 8 x 8 each, three of 8 x 16; each 2 operations a token and layer, for 4 + 6 tokens.
    projections = 2 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16) * 2 * 10
    # Scores and mixing: n / 2 keys a query, 16 numbers each, 2 operations.
    attention = 2 * (2 * (4 * 2 + 6 * 3) * 16 * 2)
    assert bench_gpu.flops(model, [4, 6], actions=3) == 3 * (projections + attention + 2 * 100 * 8 * 3)


def test_peaks_are_of_the_devices_that_jax_names():
    assert bench_gpu.peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert bench_gpu.peak_of("NVIDIA L40S") == 362e12
    assert bench_gpu.peak_of("TPU v5 lite") == 197e12
    assert bench_gpu.peak_of("TPU v5p") == 459e12
    assert bench_gpu.peak_of("cpu") is None


def test_an_unknown_size_is_an_error(capsys):
    with pytest.raises(SystemExit):
        bench_learner.main(["--sizes", "0.5M,16M"])
    assert "--sizes: '16M' is unknown; known: tiny, 0.5M, 15M, 135M, logprob" in capsys.readouterr().err
