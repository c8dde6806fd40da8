"""Which episodes a page shows, and how their tokens are written into it."""

import base64
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.data.episode import Author, Episode, Span

TOKENS, EPISODES = 500_000, 2_000
"""Bounds of what one page holds: at most 8 MB of base64 where every token is the policy's."""


@dataclass(frozen=True)
class Entry:
    """Outline of an episode: what `choose` needs to know of it."""

    id: str
    step: int
    group: str
    tokens: int

    @classmethod
    def of(cls, episode: Episode) -> "Entry":
        return cls(episode.id, episode.step, episode.group, sum(map(len, episode.segments)))


def choose(entries: Sequence[Entry], tokens: int = TOKENS, count: int = EPISODES) -> list[Entry]:
    """The first and the last step and every k-th between, whole, with the smallest k that keeps both bounds.

    Where even the first and the last step are too much: whole groups of the two in turn, while they fit. Where not even one group
    does: members of it while they fit, and one in any case.
    """
    if not entries:
        return []
    steps: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        steps[entry.step].append(entry)
    order = sorted(steps)
    for k in range(1, max(len(order), 2)):
        shown = [entry for step in sorted({*order[::k], order[-1]}) for entry in steps[step]]
        if _fits(shown, tokens, count):
            return shown
    ends = [_groups(steps[step]) for step in dict.fromkeys((order[0], order[-1]))]
    chosen: list[Entry] = []
    for group in (groups[i] for i in range(max(map(len, ends))) for groups in ends if i < len(groups)):
        if not _fits(chosen + group, tokens, count):
            break
        chosen += group
    if not chosen:
        members = ends[0][0]
        chosen = next(members[:n] for n in range(len(members), 0, -1) if n == 1 or _fits(members[:n], tokens, count))
    return sorted(chosen, key=lambda entry: entry.step)


def _fits(entries: Sequence[Entry], tokens: int, count: int) -> bool:
    return len(entries) <= count and sum(entry.tokens for entry in entries) <= tokens


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    by_group: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_group[entry.group].append(entry)
    return list(by_group.values())


def encode(
    episodes: Sequence[Episode], advantages: Mapping[str, NDArray[np.float32]], spell: Callable[[int], bytes] | None
) -> dict[str, Any]:
    """Episodes as the viewer reads them: small objects, and the tokens of all of them in three base64 arrays.

    advantages: by episode id, f32[n] of its policy tokens in order; an episode may be missing
    spell:      bytes of one token id; None where there is no tokenizer

    `ids` holds an index into the vocabulary of the page per token (u16, u32 above 65,536 entries); `logprobs` and `advantages`
    are f32 per policy token, NaN where an advantage is not known. A vocabulary entry is `[id, text]`, or `[id, null, hex]`
    where the bytes are not whole characters.
    """
    spans = [span for episode in episodes for segment in episode.segments for span in segment.spans]
    vocabulary, ids = np.unique(_join([s.tokens for s in spans], np.int32), return_inverse=True)
    wide = len(vocabulary) > 1 << 16
    return {
        "episodes": [_describe(episode, episode.id in advantages) for episode in episodes],
        "authors": [author.name for author in Author],
        "vocabulary": [_entry(int(token), spell) for token in vocabulary],
        "wide": wide,
        "ids": _base64(ids.astype("<u4" if wide else "<u2")),
        "logprobs": _base64(_join([s.logprobs for s in spans if s.logprobs is not None], np.float32)),
        "advantages": _base64(_join([_advantages(e, advantages) for e in episodes], np.float32)),
    }


def _join(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _entry(token: int, spell: Callable[[int], bytes] | None) -> list[Any]:
    data = b"" if spell is None else spell(token)
    if not data:
        return [token, f"\u27e8{token}\u27e9"]
    try:
        return [token, data.decode()]
    except UnicodeDecodeError:
        return [token, None, data.hex()]


def _advantages(episode: Episode, advantages: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    n = episode.policy_tokens
    given = advantages.get(episode.id, np.full(n, np.nan, np.float32))
    if given.shape != (n,):
        raise ValueError(f"episode {episode.id}: {given.shape} advantages for {n} policy tokens")
    return given


def _describe(episode: Episode, credited: bool) -> dict[str, Any]:
    outcome = episode.outcome
    return {
        "id": episode.id,
        "task": episode.task,
        "group": episode.group,
        "step": episode.step,
        "seed": episode.seed,
        "ending": episode.ending.value,
        "reward": None if outcome is None else outcome.reward,
        "success": None if outcome is None else outcome.true_success,
        "components": {} if outcome is None else dict(outcome.components),
        "tampering": [] if outcome is None else list(outcome.tampering),
        "counters": dict(episode.counters),
        "timings": dict(episode.timings),
        "credited": credited,
        "turns": [[t.reward, t.valid] for t in episode.turns],
        "spans": [[number, *_span(span)] for number, segment in enumerate(episode.segments) for span in segment.spans],
    }


def _span(span: Span) -> list[Any]:
    """`[author, turn, length]`, and for the policy `temperature, finish reason, kv, [version, count, version, count, ...]`."""
    head: list[Any] = [int(span.author), span.turn, len(span.tokens)]
    if span.versions is None:
        return head
    runs = [x for version, run in groupby(span.versions.tolist()) for x in (version, len(list(run)))]
    return [*head, span.temperature, span.finish_reason, span.kv, runs]
