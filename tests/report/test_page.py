"""The page as a file: whole, self-contained, small, and made of whatever a run folder holds."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from agentrl_jax.data.credits import CreditWriter
from agentrl_jax.report.__main__ import main
from agentrl_jax.report.audit import Watch
from agentrl_jax.report.load import CONFIG, CREDITS, EPISODES, METRICS, TOKENIZER, Run, load
from agentrl_jax.report.metrics import MetricsWriter
from agentrl_jax.report.page import build, headline, page_data, render
from agentrl_jax.report.sample import Entry, choose
from tests.report import runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "median"
    runs.write(folder, 6, hostile=True)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A run folder of one's own, to damage."""
    return shutil.copytree(whole, tmp_path / "median")


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)[1])


def test_everything_of_the_run_is_in_the_page(whole):
    data = data_of(build(whole))
    episodes = sorted((e for step in range(6) for e in runs.episodes_of(step)), key=lambda e: e.id)
    assert data["name"] == "median"
    assert data["problems"] == []
    assert data["steps"] == list(range(6))
    assert data["collected"] == {"episodes": len(episodes) + 1, "steps": 6}
    assert sorted(e["id"] for e in data["sample"]["episodes"]) == sorted([e.id for e in episodes] + ["s5-g0-m99"])
    assert data["config"]["learner"] == {"learning_rate": 3e-5, "betas": [0.9, 0.95]}
    assert data["headline"]["phase"] == "eval"
    assert [end["step"] for end in data["headline"]["ends"]] == [0, 5]
    for i, step in enumerate(data["steps"]):
        ended = [e for e in data["sample"]["episodes"] if e["step"] == step]
        assert sum(data["columns"][f"rollout/ending/{ending['name']}"][i] for ending in data["endings"]) == len(ended)


def test_the_same_run_gives_the_same_file(whole):
    assert build(whole).read_bytes() == build(whole).read_bytes()


def test_the_page_needs_nothing_else_and_may_reach_nothing(whole):
    page = build(whole).read_text("utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    markup = page.split('<script type="application/json"')[0]
    assert not re.search(r"""(src|href)=["'](?!#)|url\(|@import""", markup)


def test_no_text_of_a_run_becomes_markup(whole):
    page = build(whole).read_text("utf-8")
    assert page.count("</script>") == 2
    assert "<b id=" not in page
    assert "<!--" not in page
    assert data_of(build(whole))["config"]["note"] == runs.HOSTILE


def test_a_long_run_is_sampled_and_the_page_stays_small():
    model = runs.episode(0, 0, 1, answer=runs.ANSWER * 2)
    assert 280 < len(model.segments[0]) < 320
    places = [(step, group, member) for step in range(60) for group in range(8) for member in range(8)]
    episodes = [replace(model, id=f"s{s}-g{g}-m{m}", group=f"s{s}-g{g}", step=s) for s, g, m in places]
    collected = tuple(Entry.of(episode) for episode in episodes)
    shown = {entry.id for entry in choose(collected)}
    advantages = {name: np.random.default_rng(0).normal(size=model.policy_tokens).astype(np.float32) for name in shown}
    kept = tuple(episode for episode in episodes if episode.id in shown)
    run = Run("long", collected=collected, episodes=kept, advantages=advantages, spell=lambda token: runs.tokenizer().decode_bytes([token]))
    steps = sorted({episode.step for episode in kept})
    assert (steps[0], steps[-1]) == (0, 59)
    assert len(steps) > 15
    assert len(kept) == 64 * len(steps)
    assert len(render(run).encode()) < 8e6


def test_metrics_alone_make_a_page(run):
    for name in (EPISODES, CREDITS, TOKENIZER, CONFIG):
        (run / name).unlink()
    data = data_of(build(run))
    assert data["sample"]["episodes"] == data["problems"] == []
    assert data["config"] is None
    assert len(data["steps"]) == 6


def test_episodes_alone_make_a_page(run):
    for name in (METRICS, CREDITS, TOKENIZER):
        (run / name).unlink()
    data = data_of(build(run))
    assert data["steps"] == []
    assert not any(e["credited"] for e in data["sample"]["episodes"])
    assert "tokenizer.json: missing" in data["problems"][0]


def test_one_step_makes_a_page(tmp_path):
    runs.write(tmp_path, 1)
    assert len(data_of(build(tmp_path))["headline"]["ends"]) == 1


def test_a_damaged_store_gives_what_is_left_and_says_so(run):
    stored = bytearray((run / EPISODES).read_bytes())
    stored[len(stored) // 2] ^= 0xFF
    (run / EPISODES).write_bytes(stored)
    loaded = load(run)
    assert 0 < len(loaded.episodes) < 49
    assert len(loaded.episodes) > 40, "only the damaged episode is lost"
    assert "damaged at byte" in loaded.problems[0]
    assert data_of(build(run))["problems"] == list(loaded.problems)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [(EPISODES, "No episode could be read"), (CREDITS, "Advantages"), (TOKENIZER, "not a tokenizer"), (CONFIG, "not JSON")],
)
def test_a_foreign_file_costs_only_its_own_part(run, name, complaint):
    (run / name).write_bytes(b"not what it should be, and longer than a header")
    loaded = load(run)
    assert complaint in loaded.problems[0]
    assert name in loaded.problems[0]
    assert len(loaded.problems) == 1
    build(run)


def test_credit_that_does_not_fit_is_not_shown(run):
    with CreditWriter(run / CREDITS) as side:
        side.append({"s5-g0-m99": (np.zeros(3, np.float32),)})
    loaded = load(run)
    assert "s5-g0-m99" not in loaded.advantages
    assert "s5-g0-m99" in loaded.problems[0]


def test_the_command_says_where_the_page_is(run, capsys):
    assert main([str(run)]) == 0
    assert "report.html" in capsys.readouterr().out


def test_the_command_names_what_is_missing(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert f"nothing: no run here; a run folder holds {METRICS} or {EPISODES}" in capsys.readouterr().err


def test_the_command_names_the_damaged_line(run, capsys):
    (run / METRICS).write_text("broken\n")
    assert main([str(run)]) == 2
    assert "metrics.jsonl, line 1" in capsys.readouterr().err


def test_the_headline_falls_back_to_the_training_episodes():
    records = [{"step": 3, "rollout/success": 0.25, "rollout/graded": 8.0}, {"step": 4, "rollout/success": 0.75, "rollout/graded": 8.0}]
    found = headline(records)
    assert found["phase"] == "rollout"
    assert [(end["step"], end["success"], end["n"]) for end in found["ends"]] == [(3, 0.25, 8), (4, 0.75, 8)]
    assert found["ends"][0]["low"] < 0.25 < found["ends"][0]["high"]
    assert headline([{"step": 0, "train/loss": 1.0}]) is None


def test_a_value_that_is_not_finite_reaches_the_page(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"train/entropy": float("nan")})
        metrics.write(1, {"train/loss": 1.0})
    assert page_data(load(tmp_path))["columns"]["train/entropy"] == ["nan", None]


def test_an_alarm_is_told_in_words(tmp_path):
    watch = Watch(runs.gamed(tmp_path))
    assert watch.first != watch.latest
    assert page_data(load(tmp_path))["alarms"] == [str(watch.first), str(watch.latest)]


def test_a_calm_run_has_no_alarm(whole):
    assert data_of(build(whole))["alarms"] == []
