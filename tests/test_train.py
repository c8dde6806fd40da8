"""A whole run by the command line, on its smallest scale: what it leaves, and that sampler, trainer and records agree."""

from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from agentrl_jax.data.credits import read_credits
from agentrl_jax.data.episode import Author, Ending
from agentrl_jax.models.policy import Policy
from agentrl_jax.report import metrics
from agentrl_jax.report.audit import ALARM, SHORTEST
from agentrl_jax.report.load import CREDITS
from agentrl_jax.runs import AFTER, BEFORE, read_score
from tests import launch

pytestmark = [pytest.mark.real("bwrap"), pytest.mark.slow, pytest.mark.timeout(900)]  # a test is several runs

EPISODES_PER_STEP = 4


def test_every_step_is_measured_evaluated_and_kept(finished: Path):
    records = metrics.read(finished)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert ["eval/success" in record for record in records] == [True, False, True, False, True]
    episodes = launch.collected(finished)
    assert [sum(episode.step == step for episode in episodes) for step in range(5)] == [EPISODES_PER_STEP] * 5
    for record in records:
        assert np.isfinite(list(record.values())).all()
        endings = sum(value for name, value in record.items() if name.startswith("rollout/ending/"))
        assert endings == record["rollout/episodes"] == EPISODES_PER_STEP
        assert record["train/skipped"] == 0
        assert record["train/gradient_norm"] > 0


def test_sampler_and_trainer_agree(finished: Path):
    """The engine decodes with a cache, one token at a time; the trainer sees whole packed rows. Updates lie between the steps."""
    for record in metrics.read(finished):
        assert record["train/logprob_difference_max"] <= 1e-4


def test_every_token_was_sampled_by_the_weights_of_its_step(finished: Path):
    for episode in launch.collected(finished):
        spans = [span for segment in episode.segments for span in segment.spans if span.author is Author.POLICY]
        assert spans
        assert all((span.versions == episode.step).all() for span in spans)


def test_credit_lies_on_what_the_policy_wrote(finished: Path):
    credit = dict(read_credits(finished / CREDITS))
    for episode in launch.collected(finished):
        for segment, advantages in zip(episode.segments, credit[episode.id], strict=True):
            assert (advantages[~segment.mask] == 0).all()
            assert (advantages[segment.mask] != 0).all()


def test_the_trained_policy_and_its_scores_are_left_in_the_folder(finished: Path):
    start, trained = Policy.read(finished / "warmstart"), Policy.read(finished / "policy")
    assert trained.model == start.model
    assert trained.tokenizer.text == start.tokenizer.text
    assert np.abs(trained.params["embed"]["embedding"] - start.params["embed"]["embedding"]).max() > 1e-4
    for name in (BEFORE, AFTER):
        assert read_score(finished / name) == dict.fromkeys(
            [f"{split}, {way}" for split in ("held_out", "held_out_functions") for way in ("sampled", "greedy")], (0, 1)
        )
    assert (finished / "report.html").stat().st_size > 10_000


def test_boxes_that_die_cost_a_second_try_and_change_nothing(tmp_path: Path, finished: Path):
    ended = launch.train(tmp_path, stop="lose,2")
    assert ended.code == 0, ended.err
    episodes = launch.collected(tmp_path / "tiny")
    spoilt = [episode for episode in episodes if episode.ending is Ending.SANDBOX_FAILED]
    assert spoilt
    assert all(episode.step == 2 and episode.outcome is None for episode in spoilt)
    tried_again = {f"{episode.id}~1" for episode in spoilt}
    assert {episode.id for episode in episodes if episode.counters.get("retried_sandbox_failed")} == tried_again
    assert (tmp_path / "tiny/policy/model.safetensors").read_bytes() == (finished / "policy/model.safetensors").read_bytes()


def test_a_rule_of_ones_own_needs_five_lines_and_is_watched_for_reward_that_success_does_not_follow(tmp_path: Path, finished: Path):
    (tmp_path / "my_rule.py").write_text("""
from agentrl_jax.credit import Credit, on_tokens

def my_rule(batch, estimates, *, scale: float = 1.0):
    return Credit(on_tokens(batch, scale * (batch.episodes.reward + 1)))
""")
    ended = launch.train(
        tmp_path,
        f"policy={finished / 'warmstart'}",
        f"advantage={tmp_path / 'my_rule.py'}:my_rule",
        "advantage.scale=0.5",
        f"steps={SHORTEST}",
        "evaluate.every=100",
        "evaluate.tasks=1",
        "checkpoint_every=100",
    )
    assert ended.code == 0, ended.err
    alarms = [record.get(ALARM) for record in launch.measured(tmp_path / "tiny")]
    assert alarms == [None] * (SHORTEST - 1) + [0.0]
    for parts in dict(read_credits(tmp_path / "tiny" / CREDITS)).values():
        assert set(np.concatenate(parts)) == {0.0, 0.5}


def test_a_policy_that_is_named_may_be_taught_first_by_adapters(tmp_path: Path, finished: Path):
    options = [f"policy={finished / 'warmstart'}", "warmstart.named=true", "lora.rank=2", "rollout.history=template"]
    ended = launch.train(tmp_path, *options, "steps=1", "evaluate.tasks=1")
    assert ended.code == 0, ended.err
    named, taught = (flatten_dict(Policy.read(folder / "warmstart").params) for folder in (finished, tmp_path / "tiny"))
    changed = {path for path, weights in taught.items() if not np.array_equal(weights, named[path])}
    assert changed == {path for path in named if path[-1] == "kernel"}
    assert all(len(episode.segments) == 1 for episode in launch.collected(tmp_path / "tiny"))
