"""The page in a real browser: what people see, point at and type."""

import json

import numpy as np
import pytest

from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Turn
from agentrl_jax.data.store import EpisodeWriter
from agentrl_jax.report.audit import Watch
from agentrl_jax.report.load import EPISODES, METRICS, TOKENIZER
from agentrl_jax.report.metrics import MetricsWriter
from agentrl_jax.report.page import build
from tests.report import runs
from tests.report.browser import browser

pytestmark = [pytest.mark.real("chromium"), pytest.mark.slow]


@pytest.fixture(scope="module")
def tab(chromium, tmp_path_factory):
    with browser(chromium, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run folder with its page, and its episodes by id."""
    folder = tmp_path_factory.mktemp("runs") / "median"
    episodes = runs.write(folder, 6, hostile=True)
    build(folder)
    return folder, {episode.id: episode for episode in episodes}


@pytest.fixture
def page(tab, stored):
    tab.open(stored[0] / "report.html")
    yield tab
    assert tab.complaints() == []
    assert tab.requests() == [(stored[0] / "report.html").as_uri()]


def shown(tab):
    return tab.evaluate("document.querySelector('#episode h3').textContent")


def count(tab, selector):
    return tab.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


def listed(tab):
    return tab.evaluate("[...document.querySelectorAll('#episode-list .id')].map((e) => e.textContent)")


def tip(tab):
    """What the tooltip says, or None where there is none."""
    return tab.evaluate("""(() => {
        const tip = document.querySelector("#tip");
        if (tip.hidden) return null;
        return Object.fromEntries([...tip.querySelectorAll("dt")].map((dt) => [dt.textContent, dt.nextSibling.textContent]));
    })()""")


def choose_episode(tab, step, name):
    tab.choose("#pick-step", str(step))
    index = listed(tab).index(name)
    tab.click(f"#episode-list .row:nth-child({index + 1})")
    assert shown(tab) == name


def test_curves_are_drawn(page):
    assert count(page, "#charts .chart") == 12
    paths = page.evaluate("[...document.querySelectorAll('#charts path.line')].map((p) => p.getAttribute('d'))")
    assert len(paths) > 12
    assert all(path.count("L") >= 1 and "NaN" not in path for path in paths)
    assert count(page, "#stacks rect.bar.e-submitted") == 6
    assert page.evaluate("document.querySelector('#headline').textContent").count("95 % interval") == 2


def test_pointing_at_a_curve_reads_that_step_in_all_of_them(page):
    page.hover("#charts .chart:nth-child(3) svg")
    steps = page.evaluate("[...document.querySelectorAll('.readout .at')].map((e) => e.textContent)")
    assert len(set(steps)) == 1
    step = int(steps[0].split()[1])
    assert 0 < step < 5
    assert f"{1.4 * 0.95**step:.4g}" in page.evaluate("document.querySelector('#charts .chart:nth-child(3) .readout').textContent")


def test_arrow_keys_read_a_curve(page):
    page.evaluate("document.querySelector('#charts .chart svg').focus()")
    page.press("ArrowLeft")
    assert page.evaluate("document.querySelector('.readout .at').textContent") == "step 4"


def test_totals_of_endings_are_the_episodes(page):
    cells = page.evaluate("[...document.querySelectorAll('#ending-totals tbody tr')].map((r) => r.children[2].textContent)")
    numbers = [int(cell) for cell in cells]
    assert sum(numbers[:-2]) == numbers[-2] == numbers[-1] == 49


def test_every_token_is_shown_once_by_its_author(page, stored):
    for step, name in ((0, "s0-g1-m2"), (5, "s5-g0-m99")):
        choose_episode(page, step, name)
        spans = [span for segment in stored[1][name].segments for span in segment.spans]
        for author in Author:
            n = sum(len(span.tokens) for span in spans if span.author is author)
            assert count(page, f"#episode .text .span.{author.name.lower()} .t") == n
        assert count(page, "#episode .text .t") == sum(len(span.tokens) for span in spans)


def test_turns_have_boundaries(page, stored):
    choose_episode(page, 3, "s3-g0-m1")
    titles = page.evaluate("[...document.querySelectorAll('#episode .turn h4')].map((e) => e.firstChild.textContent)")
    assert titles == [f"Turn {i}" for i in range(len(stored[1]["s3-g0-m1"].turns))]


def test_the_tooltip_tells_all_of_a_policy_token(page, stored):
    choose_episode(page, 3, "s3-g0-m1")
    page.hover("#episode .policy .t:nth-child(3)")
    span = next(s for s in stored[1]["s3-g0-m1"].segments[0].spans if s.author is Author.POLICY)
    told = tip(page)
    assert told["token id"] == str(span.tokens[2])
    assert json.loads(told["text"]) == runs.tokenizer().decode(span.tokens[2:3])
    assert told["log-prob"].startswith(f"{span.logprobs[2]:.4f}")
    assert (told["author"], told["turn"], told["version"], told["temperature"]) == ("POLICY", "0", "3", "1")
    assert "advantage" in told


def test_the_tooltip_of_another_author_has_no_log_prob(page):
    page.hover("#episode .environment .t")
    assert tip(page)["author"] == "ENVIRONMENT"
    assert not {"log-prob", "advantage", "version"} & set(tip(page))
    page.hover("#episode h3")
    assert tip(page) is None


def test_keys_walk_along_the_tokens(page):
    page.evaluate("document.querySelector('#episode .t[tabindex=\"0\"]').focus()")
    first = tip(page)
    page.press("ArrowRight")
    assert tip(page) != first
    page.press("ArrowLeft")
    assert tip(page) == first
    assert count(page, "#episode .t[tabindex='0']") == 1
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"


def test_shading_has_the_sign_of_the_advantage(page, stored):
    episodes = [e for e in stored[1].values() if e.step == 3]
    credit = runs.credit(episodes)
    signs = set()
    for name, parts in credit.items():
        choose_episode(page, 3, name)
        values = np.concatenate([p[s.mask] for p, s in zip(parts, stored[1][name].segments, strict=True)])
        assert count(page, "#episode .text [class*='plus']") == (values > 0).sum()
        assert count(page, "#episode .text [class*='minus']") == (values < 0).sum()
        assert count(page, "#episode .text .zero") == (values == 0).sum()
        signs |= set(np.sign(values).tolist())
    assert {-1.0, 1.0} <= signs
    assert count(page, "#episode .text .t:is([class*='plus'], [class*='minus'], .zero)") == count(page, "#episode .policy .t[data-i]")


def test_shading_by_log_prob(page, stored):
    choose_episode(page, 3, "s3-g0-m1")
    page.choose("#pick-shade", "log-prob")
    logprobs = np.concatenate([s.logprobs for s in stored[1]["s3-g0-m1"].segments[0].spans if s.logprobs is not None])
    assert count(page, "#episode .text .low0") == (np.exp(logprobs) >= 0.9).sum()
    assert count(page, "#episode .text .low4") == (np.exp(logprobs) < 0.01).sum()


def test_arrow_keys_go_from_episode_to_episode(page):
    names = listed(page)
    page.evaluate("document.querySelector('#episode-list').focus()")
    for _ in range(2):
        page.press("ArrowDown")
    page.press("ArrowUp")
    assert shown(page) == names[1]
    assert count(page, "#episode-list [aria-selected='true']") == 1
    page.click("[aria-label='Next episode']")
    assert shown(page) == names[2]


def test_filters(page, stored):
    episodes = list(stored[1].values())
    page.choose("#pick-step", "")
    assert len(listed(page)) == len(episodes)
    page.choose("#pick-success", "true")
    assert set(listed(page)) == {e.id for e in episodes if e.outcome is not None and e.outcome.true_success}
    page.choose("#pick-success", "")
    page.choose("#pick-ending", Ending.SANDBOX_FAILED.value)
    assert set(listed(page)) == {e.id for e in episodes if e.ending is Ending.SANDBOX_FAILED}
    page.choose("#pick-ending", "")
    page.choose("#pick-group", "s2-g1")
    assert set(listed(page)) == {e.id for e in episodes if e.group == "s2-g1"}
    page.choose("#pick-success", "null")
    page.choose("#pick-group", "s0-g0")


def test_text_of_the_environment_stays_text(page, stored):
    choose_episode(page, 5, "s5-g0-m99")
    assert count(page, "#injected, #episode img, #episode b") == 0
    text = page.evaluate("document.querySelector('#episode .text .environment').textContent")
    assert text.startswith('</script><b id="injected">bold</b><img src=x onerror="document.title=1"><!-- ')
    assert "U+0007" in text
    assert page.evaluate("document.title") == "median · run report"


def test_characters_that_would_not_show_are_spelt_out(page):
    config = page.evaluate("document.querySelector('#config').textContent")
    assert "\\u202e" in config
    assert "\u202e" not in config


def test_bytes_that_are_no_character_are_shown_and_told_apart(page):
    choose_episode(page, 5, "s5-g0-m99")
    raw = page.evaluate("[...document.querySelectorAll('#episode .policy .raw')].slice(0, 3).map((e) => e.textContent)")
    assert raw == ["\\xE2", "\\x86", "\\x92"]
    page.hover("#episode .policy .raw")
    assert tip(page)["bytes"] == '\\xE2, part of "→"'


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(page, stored, width):
    page.open(stored[0] / "report.html", width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_rewritten_history_shows_its_segments(tab, tmp_path):
    first = runs.segment(runs.dialogue(1))
    second = runs.segment(
        [(Author.TEMPLATE, 1, "<|im_start|>"), (Author.SUMMARIZER, 1, "so far"), (Author.COPY, 1, "a summary"), (Author.POLICY, 2, "go")]
    )
    turns = (Turn(), Turn(reward=0.5), Turn(valid=False))
    episode = Episode("two", "t", "g", 0, 0, (first, second), turns, Ending.TURN_LIMIT, Outcome(-0.25))
    with EpisodeWriter(tmp_path / EPISODES) as store:
        store.append(episode, Episode("lost", "t", "g", 1, 0, (), (), Ending.SANDBOX_FAILED, None))
    runs.tokenizer().save(tmp_path / TOKENIZER)
    tab.open(build(tmp_path))
    assert "Segment 1" in tab.evaluate("document.querySelector('#episode .segment').textContent")
    notes = tab.evaluate("[...document.querySelectorAll('#episode h4')].map((e) => e.textContent)")
    assert notes == ["Turn 0", "Turn 1reward 0.5", "Turn 1reward 0.5", "Turn 2no valid action"]
    assert count(tab, "#episode .summarizer .t") == len(second.spans[1].tokens)
    assert tab.evaluate("document.querySelector('#pick-shade').value") == "log-prob", "without credit there is no advantage to show"
    tab.click("#episode-list .row:nth-child(2)")
    assert "before its first token" in tab.evaluate("document.querySelector('#episode').textContent")
    assert tab.complaints() == []


def test_parts_that_are_missing_are_missed_in_words(tab, stored, tmp_path):
    (tmp_path / METRICS).write_bytes((stored[0] / METRICS).read_bytes().splitlines(keepends=True)[0])
    tab.open(build(tmp_path))
    assert "no episodes" in tab.evaluate("document.querySelector('#viewer').textContent")
    assert "no configuration" in tab.evaluate("document.querySelector('#config').textContent")
    assert "NaN" not in tab.evaluate("document.querySelector('#charts').innerHTML")
    assert count(tab, "#charts circle.dot") > 5
    assert tab.complaints() == []


def test_values_that_are_not_finite_are_marked(tab, tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
            metrics.write(step, {"train/gradient_norm": value})
    tab.open(build(tmp_path))
    assert count(tab, "#charts .bad") == 2
    assert count(tab, "#charts .dot") == 2
    assert tab.complaints() == []


def test_what_the_reward_was_paid_for_stands_beside_true_success(tab, tmp_path):
    records = runs.gamed(tmp_path)
    tab.open(build(tmp_path))
    chart = "[...document.querySelectorAll('#stacks .chart')].find((e) => e.textContent.startsWith('What the reward was paid for'))"
    read = tab.evaluate(f"[...{chart}.querySelectorAll('.value')].map((e) => e.textContent)")
    last = records[-1]
    assert read == [
        f"true fixes {last['rollout/audit/true']:.4g}",
        f"wrong fixes {last['rollout/audit/wrong']:.4g}",
        f"tampering {last['rollout/audit/tampering']:.4g}",
        f"true success {last['rollout/success']:.4g}",
    ]
    top = "Math.min(...[...{}.querySelectorAll('rect.p-{}')].map((e) => Number(e.getAttribute('y'))))"
    tops = [tab.evaluate(top.format(chart, part)) for part in ("true", "wrong", "tampering")]
    assert tops == sorted(tops, reverse=True), "on top of each other"
    assert tab.evaluate(f"{chart}.querySelector('path.line').getAttribute('d')").count("L") == len(records) - 1
    alarm = tab.evaluate("document.querySelector('#alarm').textContent")
    assert "may be gaming the verifier" in alarm
    assert str(Watch(records).first) in alarm
    assert tab.complaints() == []


def test_bars_show_no_reward_below_0(tab, tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"rollout/success": 0.5, "rollout/audit/true": 0.5, "rollout/audit/wrong": -0.1})
    tab.open(build(tmp_path))
    assert "paid for" not in tab.evaluate("document.querySelector('#stacks').textContent")
    assert count(tab, "#alarm") == 0
    assert tab.complaints() == []
