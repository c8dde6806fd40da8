"""The only door between host and device: episodes in, a `Batch` of bucketed shapes out, then one explicit transfer.

Everything up to `to_device` is numpy and depends on its arguments alone. Packing moves segments, never tokens within one, and never
touches the table, so what an episode is credited with cannot depend on who shares its row.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.data.batch import Batch, Episodes, Tokens
from agentrl_jax.data.episode import Author, Episode, Span

Limits = Literal["score", "drop"]
_Tree = TypeVar("_Tree")

# 1, 2, 3, 4, 6, 8, 12, ...: two shapes per doubling, at most half of an axis is padding's fault.
LADDER = tuple(sorted([2**k for k in range(25)] + [3 * 2**k for k in range(24)]))


def bucket(n: int, ladder: Sequence[int] = LADDER) -> int:
    """The lowest rung of the ascending `ladder` that holds `n`.

    >>> [bucket(n) for n in (1, 5, 9, 100)]
    [1, 6, 12, 128]
    """
    rung = bisect_left(ladder, n)
    if rung == len(ladder):
        raise ValueError(f"{n} is above the largest bucket {ladder[-1]}")
    return ladder[rung]


class Shape(NamedTuple):
    """The axes of a batch: B rows of T tokens with A predicted positions, E episodes of K turns."""

    rows: int = 1
    length: int = 1
    predict: int = 1
    episodes: int = 1
    turns: int = 1


@dataclass(frozen=True)
class Packing:
    """Where each of the S segments lies; what `unpack` needs to bring token arrays back to their episodes.

    shape:    axes of the batch
    count:    episodes in the table that are not filler
    episode:  i32[S] row of the episode table, ascending
    row:      i32[S] row of the batch
    start:    i32[S] first column
    length:   i32[S] tokens
    """

    shape: Shape
    count: int
    episode: NDArray[np.int32]
    row: NDArray[np.int32]
    start: NDArray[np.int32]
    length: NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.length.sum())

    @property
    def fill(self) -> float:
        """Share of the positions that hold a token."""
        return self.tokens / (self.shape.rows * self.shape.length)


def collate(
    episodes: Sequence[Episode],
    *,
    row_length: int | Sequence[int],
    limits: Limits = "score",
    dropped_in_stats: bool = False,
    components: Sequence[str] = (),
    row_multiple: int = 1,
    at_least: Shape = Shape(),  # noqa: B008 - immutable
    pack: bool = True,
) -> tuple[Batch, Packing]:
    """Lay episodes out in rows and in a table. All arrays are numpy.

    Every episode has a row in the table; only the segments of usable ones (own ending, a reward, a sampled token) take up tokens.

    row_length:       T, or the ladder of T's of which the lowest that holds the longest segment is taken
    limits:           episodes that ran into a limit count with their reward ("score") or leave the loss ("drop")
    dropped_in_stats: they still count in the statistics of their group
    components:       names of the reward components of the table, in this order
    row_multiple:     B is a multiple of it: minibatches x accumulation steps x devices along the rows
    at_least:         no axis is smaller. A run that passes the `Packing.shape` of its largest step compiles once
    pack:             False lays one segment in each row

    Raises ValueError for a segment longer than a row and for a usable episode without one of the `components`.
    """
    ladder = [row_length] if isinstance(row_length, int) else sorted(row_length)
    placed = [(e, segment) for e, episode in enumerate(episodes) if episode.usable for segment in episode.segments]
    owner = np.array([e for e, _ in placed], np.int32)
    length = np.array([len(segment) for _, segment in placed], np.int32)
    sampled = np.array([segment.mask.sum() for _, segment in placed], np.int32)
    for (e, _), n in zip(placed, length, strict=True):
        if n > ladder[-1]:
            raise ValueError(
                f"episode {episodes[e].id}: a segment of {n} tokens is longer than a row of {ladder[-1]}; "
                "raise row_length or lower the context limit of the rollouts"
            )
    t = bucket(max(int(length.max(initial=1)), at_least.length), ladder)

    table = _table(episodes, at_least, limits, dropped_in_stats, components)
    if pack:
        order = sorted(range(len(placed)), key=lambda i: (-length[i], episodes[owner[i]].id, i))
        row, start = _first_fit(length, order, t)
        row = _rows_by_group(row, np.asarray(table.group)[owner])
    else:
        row, start = np.arange(len(placed), dtype=np.int32), np.zeros(len(placed), np.int32)

    rows = bucket(-(-max(int(row.max(initial=0)) + 1, at_least.rows) // row_multiple)) * row_multiple
    widest = int(np.bincount(row, weights=sampled, minlength=1).max())
    predict = min(bucket(max(widest, at_least.predict)), t)
    packing = Packing(Shape(rows, t, predict, *table.state.shape), len(episodes), owner, row, start, length)
    return Batch(_tokens([segment.spans for _, segment in placed], packing), table), packing


def unpack(array: NDArray[Any], packing: Packing) -> list[tuple[NDArray[Any], ...]]:
    """Bring `array` [B, T, ...] back: for each episode, its values segment by segment; () for one that took up no tokens."""
    episodes: list[list[NDArray[Any]]] = [[] for _ in range(packing.count)]
    for e, row, start, n in zip(packing.episode, packing.row, packing.start, packing.length, strict=True):
        episodes[e].append(array[row, start : start + n])
    return [tuple(segments) for segments in episodes]


def minibatch_rows(batch: Batch, n: int, *, seed: int) -> NDArray[np.int32]:
    """Deal the rows of a host batch into `n` minibatches: i32[n, B / n], random by `seed`, with similar numbers of trained tokens.

    Rows are sorted by their trained tokens, ties at random, and each n in succession go to different minibatches. So no minibatch is
    a step of another size than the rest, although the denominators are those of the whole update.
    """
    tokens, table = batch.tokens, batch.episodes
    rows = tokens.mask.shape[0]
    if rows % n:
        raise ValueError(f"{rows} rows cannot be dealt into {n} equal minibatches; collate with row_multiple={n} or a multiple of it")
    episode, turn = np.asarray(tokens.episode), np.asarray(tokens.turn)
    trained = np.asarray(tokens.mask & tokens.in_loss) & np.asarray(table.in_loss)[episode] & np.asarray(table.turn_in_loss)[episode, turn]
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(rows)
    by_size = shuffled[np.argsort(-trained.sum(1)[shuffled], kind="stable")]
    return rng.permuted(by_size.reshape(-1, n), axis=1).T.astype(np.int32)


def minibatches(batch: Batch, n: int, *, seed: int) -> list[Batch]:
    """The minibatches of `minibatch_rows`; all share the whole table. For credit that walks tokens, compute it before splitting."""
    return [Batch(take_rows(batch.tokens, rows), batch.episodes) for rows in minibatch_rows(batch, n, seed=seed)]


def take_rows(tree: _Tree, rows: NDArray[np.int32]) -> _Tree:
    """The given rows of every array [B, ...] of a pytree."""
    return jax.tree.map(lambda x: x[rows], tree)


def to_device(batch: Batch, *, rows: jax.sharding.Sharding | None = None, table: jax.sharding.Sharding | None = None) -> Batch:
    """The one transfer: token rows by the sharding `rows`, the table by `table`; None is the default device."""
    tokens, episodes = jax.device_put((batch.tokens, batch.episodes), (rows, table))
    return Batch(tokens, episodes)


def _first_fit(length: NDArray[np.int32], order: Sequence[int], t: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Row and start column of each segment: in this order, each goes into the first row with room."""
    row, start = np.zeros_like(length), np.zeros_like(length)
    room = np.full(len(length), t, np.int32)
    for i in order:
        row[i] = np.argmax(room >= length[i])
        start[i] = t - room[row[i]]
        room[row[i]] -= length[i]
    return row, start


def _rows_by_group(row: NDArray[np.int32], group: NDArray[np.int32]) -> NDArray[np.int32]:
    """Renumber rows by the first group they hold, so that a group's rows lie together."""
    first = np.full(int(row.max(initial=-1)) + 1, np.iinfo(np.int32).max)
    np.minimum.at(first, row, group)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[row]


def _tokens(segments: Sequence[Sequence[Span]], packing: Packing) -> Tokens:
    """The token half. One pass over spans; per-token work is whole-array."""
    spans = [span for segment in segments for span in segment]
    policy = [span for span in spans if span.author is Author.POLICY]
    sizes = np.array([len(span.tokens) for span in spans], np.int32)

    def per_span(values: list[Any], dtype: type) -> NDArray[Any]:
        return np.repeat(np.array(values, dtype), sizes)

    def per_segment(values: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.repeat(values, packing.length)

    mask = per_span([span.author is Author.POLICY for span in spans], np.bool_)

    def sampled(arrays: list[Any], dtype: type, fill: int | float) -> NDArray[Any]:
        out = np.full(len(mask), fill, dtype)
        if arrays:
            out[mask] = np.concatenate(arrays)
        return out

    episode = per_segment(packing.episode)
    position = np.arange(len(mask), dtype=np.int32) - per_segment(_starts(packing.length))
    # Counted over the flat list of policy tokens, less where the episode's own begin.
    acted = np.cumsum(mask, dtype=np.int32)
    before = (acted - mask)[np.searchsorted(episode, episode)] if len(mask) else acted
    column = per_segment(packing.start) + position
    place = (per_segment(packing.row), column)
    number = np.zeros_like(packing.row)
    number[np.lexsort((packing.start, packing.row))] = _rank_within(np.sort(packing.row)) + 1

    b, t = packing.shape.rows, packing.shape.length

    def rows(values: NDArray[Any], fill: int | float = 0) -> Any:
        out = np.full((b, t), fill, values.dtype)
        out[place] = values
        return out

    laid_mask = rows(mask)
    action_row, action_column = np.nonzero(laid_mask)
    predicted = np.full((b, packing.shape.predict), t, np.int32)
    predicted[action_row, _rank_within(action_row)] = action_column

    return Tokens(
        ids=rows(np.concatenate([span.tokens for span in spans] or [np.zeros(0, np.int32)])),
        position=rows(position),
        segment=rows(per_segment(number)),
        episode=rows(episode),
        turn=rows(per_span([span.turn for span in spans], np.int32)),
        action=rows(np.where(mask, acted - 1 - before, np.int32(-1)), -1),
        mask=laid_mask,
        in_loss=laid_mask.copy(),
        logprob=rows(sampled([span.logprobs for span in policy], np.float32, 0)),
        # Greedy decoding (temperature 0) reports the log-probs of temperature 1.
        temperature=rows(per_span([span.temperature or 1.0 for span in spans], np.float32), 1),
        version=rows(sampled([span.versions for span in policy], np.int32, -1), -1),
        predict=predicted,  # pyright: ignore[reportArgumentType] - numpy until `to_device`
    )


def _table(episodes: Sequence[Episode], at_least: Shape, limits: Limits, dropped_in_stats: bool, components: Sequence[str]) -> Episodes:
    """The table half."""
    if limits not in ("score", "drop"):
        raise ValueError(f'limits must be "score" or "drop", got {limits!r}')
    e = bucket(max(len(episodes), at_least.episodes))
    k = bucket(max([at_least.turns, *(len(episode.turns) for episode in episodes)]))
    groups: dict[str, int] = {}
    states: dict[tuple[str, str], int] = {}

    def column(values: list[Any], dtype: type, fill: int | float = 0) -> Any:
        out = np.full(e, fill, dtype)
        out[: len(values)] = values
        return out

    def turns(values: list[list[Any]], dtype: type, fill: int | float = 0) -> Any:
        out = np.full((e, k), fill, dtype)
        for i, row in enumerate(values):
            out[i, : len(row)] = row
        return out

    def anchor(group: str, state: str | None) -> int:
        return -1 if state is None else states.setdefault((group, state), len(states))

    def parts(episode: Episode) -> list[float]:
        if not episode.usable or episode.outcome is None:
            return [0.0] * len(components)
        missing = [name for name in components if name not in episode.outcome.components]
        if missing:
            known = ", ".join(episode.outcome.components) or "none"
            raise ValueError(f"episode {episode.id}: no reward component {missing[0]!r}; its verifier gave: {known}")
        return [episode.outcome.components[name] for name in components]

    numbers = [groups.setdefault(episode.group, len(groups)) for episode in episodes]
    kept = [episode.usable and not (limits == "drop" and episode.ending.limit) for episode in episodes]
    exists = turns([[True] * len(episode.turns) for episode in episodes], np.bool_)
    named: Any = np.zeros((e, len(components)), np.float32)
    for i, episode in enumerate(episodes):
        named[i] = parts(episode)
    return Episodes(
        group=column(numbers, np.int32, len(groups)),
        reward=column([episode.reward or 0.0 for episode in episodes], np.float32),
        components=named,
        in_stats=column([episode.usable for episode in episodes] if dropped_in_stats else kept, np.bool_),
        in_loss=column(kept, np.bool_),
        truncated=column([episode.ending.limit for episode in episodes], np.bool_),
        turn_exists=exists,
        turn_reward=turns([[turn.reward or 0.0 for turn in episode.turns] for episode in episodes], np.float32),
        turn_valid=turns([[turn.valid for turn in episode.turns] for episode in episodes], np.bool_),
        turn_in_loss=exists.copy(),
        state=turns([[anchor(episode.group, turn.state) for turn in episode.turns] for episode in episodes], np.int32, -1),
    )


def _starts(sizes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where each of consecutive runs begins."""
    return (np.cumsum(sizes) - sizes).astype(np.int32)


def _rank_within(keys: NDArray[Any]) -> NDArray[np.int32]:
    """For ascending keys, the index of each entry among the entries of its key."""
    return (np.arange(len(keys)) - np.searchsorted(keys, keys)).astype(np.int32)
