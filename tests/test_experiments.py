"""The parts of the ablation and the control that decide what they show."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from agentrl_jax.config import load
from agentrl_jax.data.collate import Shape, collate, unpack
from agentrl_jax.models.decoder import init_params
from agentrl_jax.step import learn, learner_of
from experiments import arms
from experiments.mask_ablation import gradient_share, tool_likelihood, unmask
from experiments.shuffled_control import shuffle
from tests.data.strategies import batches, make_episode
from tests.launch import EXPERIMENT
from tests.test_step import MODEL, SMALL, collected, experiment

# Large enough for every example: one program.
LARGEST = Shape(rows=16, length=64, predict=64, episodes=8, turns=4)


def device_batch(episodes, shape=LARGEST):
    host, packing = collate(episodes, row_length=64, at_least=shape)
    return jax.device_put(host), packing


def untouched(before, after, *, but):
    """Whether all fields of a record but these are the same."""
    return all(np.array_equal(getattr(before, name), getattr(after, name)) for name in vars(before) if name not in but)


def never(tokens):
    raise AssertionError("nobody asked for log-probs")


@given(batches())
def test_shuffling_deals_the_rewards_among_those_that_count(episodes):
    batch, _ = device_batch(episodes)
    shuffled = shuffle(batch, never)
    assert untouched(batch.tokens, shuffled.tokens, but=())
    assert untouched(batch.episodes, shuffled.episodes, but=("reward",))
    counts = np.asarray(batch.episodes.in_stats)
    before, after = np.asarray(batch.episodes.reward), np.asarray(shuffled.episodes.reward)
    np.testing.assert_array_equal(np.sort(after[counts]), np.sort(before[counts]))
    np.testing.assert_array_equal(after[~counts], before[~counts])


def test_every_step_is_shuffled_in_its_own_way():
    def order(version):
        episodes = [make_episode(f"e{i}", reward=float(i), version=version) for i in range(8)]
        return tuple(np.asarray(shuffle(device_batch(episodes)[0], never).episodes.reward))

    assert order(1) == order(1)
    assert len({order(version) for version in range(5)}) == 5


@given(batches())
def test_without_the_mask_all_that_follows_the_first_sampled_token_is_in(episodes):
    batch, packing = device_batch(episodes)
    stand_ins = jnp.full(batch.tokens.ids.shape, -9.0)
    wide = unmask(batch, lambda tokens: stand_ins)
    assert untouched(batch.episodes, wide.episodes, but=())
    assert untouched(batch.tokens, wide.tokens, but=("mask", "in_loss", "predict", "logprob"))
    laid = zip(*(unpack(np.asarray(x), packing) for x in (batch.tokens.mask, wide.tokens.mask, wide.tokens.in_loss)), strict=True)
    for masks, wides, in_losses in laid:
        for mask, wide_mask, in_loss in zip(masks, wides, in_losses, strict=True):
            np.testing.assert_array_equal(wide_mask, np.cumsum(mask) > 0)
            np.testing.assert_array_equal(in_loss, wide_mask)
    assert wide.tokens.mask.sum() == sum(mask.sum() for masks in unpack(np.asarray(wide.tokens.mask), packing) for mask in masks)
    expected = np.where(batch.tokens.mask, batch.tokens.logprob, stand_ins)
    np.testing.assert_array_equal(wide.tokens.logprob, expected)


@pytest.mark.parametrize("rewrite", [unmask, shuffle])
def test_a_step_with_the_rewrite(rewrite):
    """Under the transfer guard of `learn`."""
    plain, changed = experiment, replace(experiment, rewrite=rewrite)
    learner, params = learner_of(plain, MODEL), init_params(MODEL, jax.random.key(0))
    episodes = collected(8)
    results = [learn(of, learner, learner.init(params), None, None, episodes, 0, SMALL) for of in (plain, changed)]
    (_, _, values, credit), (_, _, wide, credit_wide) = results
    spans = [span for episode in episodes for segment in episode.segments for span in segment.spans[1:]]
    tokens = sum(len(span.tokens) for span in spans if rewrite is unmask or span.logprobs is not None)
    assert wide["train/tokens"] * plain.optimizer.minibatches == tokens
    # What was sampled is compared as it was sampled.
    assert wide["train/logprob_difference_max"] == values["train/logprob_difference_max"]
    assert credit_wide.keys() == credit.keys()
    assert wide["train/gradient_norm"] != values["train/gradient_norm"]


@pytest.fixture
def base(tmp_path: Path, finished: Path):
    """The tiny experiment, with a finished run of its own."""
    shutil.copytree(finished, tmp_path / "tiny")
    return replace(load(EXPERIMENT), root=str(tmp_path))


@pytest.mark.real("bwrap")
@pytest.mark.slow
def test_figures_of_the_ablation(base):
    """Of a policy that knows nothing: tools' text is about as likely as any, and the gradient is shared about as the tokens are."""
    share = gradient_share(base, base.folder)
    assert 0.2 < share < 0.95
    likelihood = tool_likelihood(base, base.folder, base.folder / "warmstart")
    assert likelihood == pytest.approx(-np.log(base.model.vocab_size), abs=1.5)


@pytest.mark.real("bwrap")
@pytest.mark.slow
def test_arms_start_from_the_warm_start_and_are_run_once(base):
    arm = arms.arm(base, "shuffled", 7, rewrite=shuffle, steps=1)
    assert (arm.seed, arm.name, arm.rewrite) == (7, "tiny-shuffled-7", shuffle)
    folder = arms.run(arm)
    written = (folder / "after.json").stat().st_mtime_ns
    assert arms.run(arm) == folder
    assert (folder / "after.json").stat().st_mtime_ns == written
    assert (folder / "before.json").read_bytes() == (base.folder / "before.json").read_bytes()
    assert arms.gain(folder) == 0
    assert arms.table("arms", [base.folder, folder]).splitlines()[-1] == "  gain min +0.000  median +0.000  max +0.000"
