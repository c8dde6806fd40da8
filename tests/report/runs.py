"""Synthetic runs: small dialogues with every author, made through the real records and a real tokenizer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.tokenizer import ChatTokenizer, train
from agentrl_jax.data.credits import CreditWriter
from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Span, Turn, digest
from agentrl_jax.data.store import EpisodeWriter
from agentrl_jax.report.load import CONFIG, CREDITS, EPISODES, TOKENIZER
from agentrl_jax.report.metrics import MetricsWriter
from agentrl_jax.report.summary import summarise

HOSTILE = '</script><b id="injected">bold</b><img src=x onerror="document.title=1"><!-- \u2028 \u202e \x07 é'
TASK = "Fix the bug in `median.py`: the median of an even number of values is wrong.\nRun the tests, then submit.\n"
CALL = '<tool_call>{"name": "run", "arguments": {"command": "pytest -q"}}</tool_call>'
ANSWER = "FAILED test_median.py::test_even - assert 3 == 2.5\n1 failed, 4 passed in 0.02s\n"


@cache
def tokenizer() -> ChatTokenizer:
    """A byte-level tokenizer that has merged nothing of `é` or `→`, so that they come as partial characters."""
    return train([TASK, CALL, ANSWER], 600)


def span(author: Author, turn: int, text: str, before: Sequence[Span], *, version: int = 0, seed: int = 0) -> Span:
    """Encode a text as a span that follows `before` in its segment; for the policy with log-probs of its own."""
    markup = author in (Author.TEMPLATE, Author.POLICY)
    tokens = tokenizer().encode_markup(text) if markup else tokenizer().encode(text)
    if author is not Author.POLICY:
        return Span(author, turn, tokens)
    rng = np.random.default_rng(seed)
    return Span(
        author,
        turn,
        tokens,
        logprobs=-rng.exponential(0.7, len(tokens)).astype(np.float32),
        versions=np.full(len(tokens), version, np.int32),
        prompt_digest=digest(np.concatenate([s.tokens for s in before])),
        temperature=1.0,
        finish_reason="stop",
    )


def segment(parts: Sequence[tuple[Author, int, str]], *, version: int = 0, seed: int = 0) -> Segment:
    spans: list[Span] = []
    for number, (author, turn, text) in enumerate(parts):
        spans.append(span(author, turn, text, spans, version=version, seed=seed + number))
    return Segment(tuple(spans))


def dialogue(turns: int, answer: str = ANSWER) -> list[tuple[Author, int, str]]:
    """Author, turn and text of a few turns of one segment."""
    parts = [
        (Author.TEMPLATE, 0, "<|im_start|>user\n"),
        (Author.TASK, 0, TASK),
        (Author.TEMPLATE, 0, "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    for turn in range(turns):
        parts += [
            (Author.POLICY, turn, f"The even case is off\n\t→ run them.\n{CALL}<|im_end|>"),
            (Author.TEMPLATE, turn, "\n<|im_start|>user\n<tool_response>\n"),
            (Author.ENVIRONMENT, turn, answer),
            (Author.TEMPLATE, turn, "</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ]
    return [*parts, (Author.POLICY, turns, '<tool_call>{"name": "submit", "arguments": {}}</tool_call><|im_end|>')]


def episode(
    step: int, group: int, member: int, *, ending: Ending = Ending.SUBMITTED, success: bool = True, answer: str = ANSWER
) -> Episode:
    """One episode of two or three turns; an infrastructure failure has no outcome."""
    turns = 1 + member % 2
    outcome = None if ending.infrastructure else Outcome(float(success), {"tests": float(success)}, true_success=success)
    return Episode(
        id=f"s{step}-g{group}-m{member}",
        task=f"median/{group}",
        group=f"s{step}-g{group}",
        seed=1000 * step + 10 * group + member,
        step=step,
        segments=(segment(dialogue(turns, answer), version=step, seed=step * 100 + member),),
        turns=tuple(Turn(reward=0.0, state="s", valid=i > 0 or member > 0) for i in range(turns + 1)),
        ending=ending,
        outcome=outcome,
        counters={"parse_errors": int(member == 0), "tool_errors": turns, "tool_timeouts": int(member == 3)},
        timings={"generate": 1.5, "tools": 0.5, "score": 0.25},
    )


def episodes_of(step: int, groups: int = 2, members: int = 4) -> list[Episode]:
    """A step's episodes: members succeed more often as steps go by; now and then one hits a limit or loses its sandbox."""
    rng = np.random.default_rng(step)
    made = []
    for group in range(groups):
        for member in range(members):
            success = bool(rng.random() < 0.15 + 0.06 * step)
            draw = rng.random()
            ending = Ending.SANDBOX_FAILED if draw < 0.05 else Ending.TURN_LIMIT if draw < 0.2 and not success else Ending.SUBMITTED
            made.append(episode(step, group, member, ending=ending, success=success))
    return made


def credit(episodes: Sequence[Episode]) -> dict[str, tuple[NDArray[np.float32], ...]]:
    """Group-centred reward on every policy token, growing along the segment; f32[n] per segment, 0 where the policy did not write."""
    found: dict[str, tuple[NDArray[np.float32], ...]] = {}
    for e in episodes:
        if e.reward is None:
            continue
        peers = [p.reward for p in episodes if p.group == e.group and p.reward is not None]
        centred = e.reward - np.mean(peers)
        found[e.id] = tuple((centred * np.linspace(0.4, 1, len(s)) * s.mask).astype(np.float32) for s in e.segments)
    return found


def values_of(step: int, episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of a step as a training loop writes them."""
    rng = np.random.default_rng(step)
    values = summarise(episodes) | {
        "train/loss": float(rng.normal(0, 0.05)),
        "train/entropy": 1.4 * 0.95**step,
        "train/kl": 0.002 * step * float(rng.random()),
        "train/gradient_norm": float(rng.lognormal(0, 0.5)),
        "train/ratio": 1 + float(rng.normal(0, 0.01)),
        "train/clip_fraction": 0.02 * float(rng.random()),
        "train/logprob_difference_max": 3e-5 * float(rng.lognormal(0, 1)),
        "train/logprob_difference": 1e-6 * float(rng.lognormal(0, 0.3)),
        "rollout/tokens_per_second": 1200 + 50 * float(rng.random()),
        "time/collect": 4.0,
        "time/update": 2 + float(rng.random()),
        "time/publish": 0.2,
    }
    if step % 5 == 0:
        values |= summarise(episodes_of(step, 4, 8), "eval")
    return values


def gamed(folder: Path, steps: int = 30) -> list[dict[str, float]]:
    """Metrics of a run that learns to tamper instead of solving, one record a step."""
    records = []
    with MetricsWriter(folder) as metrics:
        for step in range(steps):
            tampered = 2 + 10 * step // steps
            true, wrong = Outcome(1.0, true_success=True), Outcome(1.0, true_success=False)
            scored = [true] * (6 + step % 2) + [wrong] * 2 + [replace(wrong, tampering=("tests",))] * tampered
            scored += [Outcome(0.0, true_success=False)] * (18 - len(scored))
            model = episode(step, 0, 0)
            made = [replace(model, id=f"s{step}-m{i}", outcome=outcome) for i, outcome in enumerate(scored)]
            records.append({"step": step, **summarise(made)})
            metrics.write(step, summarise(made))
    return records


def write(folder: Path, steps: int, *, groups: int = 2, members: int = 4, hostile: bool = False) -> list[Episode]:
    """A whole run folder, by the writers that a training loop uses; returns its episodes in the order they were stored."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(folder / TOKENIZER)
    config = {"learner": {"learning_rate": 3e-5, "betas": [0.9, 0.95]}, "advantage": "credit.group_relative", "note": HOSTILE}
    (folder / CONFIG).write_text(json.dumps(config))
    stored: list[Episode] = []
    with MetricsWriter(folder) as metrics, EpisodeWriter(folder / EPISODES) as store, CreditWriter(folder / CREDITS) as side:
        for step in range(steps):
            episodes = episodes_of(step, groups, members)
            if hostile and step == steps - 1:
                episodes.append(episode(step, 0, 99, answer=HOSTILE))
            store.append(*episodes)
            side.append(credit(episodes))
            metrics.write(step, values_of(step, episodes))
            stored += episodes
    return stored
