"""Batches to measure training on: episodes of agents, long and short, and the ways in which PyTorch may be given them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.data.batch import Batch
from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Span, Turn, digest

TURNS = 8
CONTEXT = 9  # tokens of context for one of an action
SORTED = 4  # pieces of the batch that is sorted by length

Piece = dict[str, NDArray[Any]]
"""ids, positions and action of some rows, each [rows, length]. Positions begin again with every segment."""


def lengths(count: int, median: int, longest: int) -> list[int]:
    """Tokens of each episode: log-normal, always the same. A quarter of them are 1.5 times the median or longer."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.6, count)
    return np.clip(drawn, (CONTEXT + 1) * TURNS, longest).astype(int).tolist()


def turns_of(length: int) -> list[int]:
    """An episode of this length in turns of equal size, each context and then action; what is left over joins the first context."""
    action = length // ((CONTEXT + 1) * TURNS)
    context = (length - action * TURNS) // TURNS
    spans = [context, action] * TURNS
    spans[0] += length - sum(spans)
    return spans


def episode(name: str, spans: Sequence[int], vocabulary: int, rng: np.random.Generator) -> Episode:
    """Spans of these sizes: an observation, an action, and so on. Ids are random, from 2 on: PyTorch trains no embedding of padding."""
    parts: list[Span] = []
    before = np.zeros(0, np.int32)
    for i, n in enumerate(spans):
        tokens = rng.integers(2, vocabulary, n).astype(np.int32)
        if i % 2:
            zeros, versions = np.zeros(n, np.float32), np.zeros(n, np.int32)
            parts.append(Span(Author.POLICY, i // 2, tokens, zeros, versions, digest(before), 1.0, "stop"))
        else:
            parts.append(Span(Author.ENVIRONMENT, i // 2, tokens))
        before = np.concatenate([before, tokens])
    turns = tuple(Turn() for _ in range(-(-len(spans) // 2)))
    return Episode(name, name, name, 0, 0, (Segment(tuple(parts)),), turns, Ending.SUBMITTED, Outcome(1.0))


def ragged(count: int, median: int, longest: int, vocabulary: int) -> list[Episode]:
    """Episodes of `TURNS` turns."""
    rng = np.random.default_rng(1)
    return [episode(f"ragged{i}", turns_of(n), vocabulary, rng) for i, n in enumerate(lengths(count, median, longest))]


def dense(count: int, length: int, vocabulary: int) -> list[Episode]:
    """Episodes of one length, all of which is trained but the first token."""
    rng = np.random.default_rng(2)
    return [episode(f"dense{i}", [1, length - 1], vocabulary, rng) for i in range(count)]


def padded(segments: Sequence[Segment]) -> Piece:
    """One segment a row. Padding goes on with the positions: no query of a real token sees it."""
    longest = max(map(len, segments))

    def rows(of: Callable[[Segment], NDArray[Any]]) -> NDArray[Any]:
        return np.stack([np.pad(of(segment), (0, longest - len(segment))) for segment in segments])

    positions = np.tile(np.arange(longest, dtype=np.int32), (len(segments), 1))
    return {"ids": rows(lambda s: s.tokens), "positions": positions, "action": rows(lambda s: s.mask)}


def sorted_by_length(segments: Sequence[Segment]) -> Iterator[Piece]:
    """`SORTED` pieces, each padded to its own longest."""
    by_length = sorted(segments, key=len)
    size = -(-len(by_length) // SORTED)
    return (padded(by_length[i : i + size]) for i in range(0, len(by_length), size))


def packed(batch: Batch) -> Piece:
    """The rows that this package trains on."""
    tokens: Any = batch.tokens
    return {"ids": tokens.ids, "positions": tokens.position, "action": tokens.mask}


def flat(segments: Sequence[Segment]) -> Piece:
    """All segments in one row, without any padding."""
    positions = [np.arange(len(segment), dtype=np.int32) for segment in segments]
    arrays = {"ids": [s.tokens for s in segments], "positions": positions, "action": [s.mask for s in segments]}
    return {part: np.concatenate(of_segments)[None] for part, of_segments in arrays.items()}


def layouts(episodes: Sequence[Episode], batch: Batch) -> dict[str, list[Piece]]:
    """What PyTorch may be given, by name; the pieces of a batch are run one after the other."""
    segments = [segment for episode in episodes for segment in episode.segments]
    return {
        "padded": [padded(segments)],
        "sorted": list(sorted_by_length(segments)),
        "packed": [packed(batch)],
        "flat": [flat(segments)],
    }
