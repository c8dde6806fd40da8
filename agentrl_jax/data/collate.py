"""The only door between host and device: episodes in, a `Batch` of bucketed shapes out, made for one `jax.device_put`.

All here is numpy and depends on its arguments alone. Packing moves segments, never tokens within one, and never
touches the table, so what an episode is credited with cannot depend on who shares its row.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.data.anchors import AnchorFn, anchor_groups
from agentrl_jax.data.batch import Batch, Episodes, Tokens
from agentrl_jax.data.episode import Author, Episode, Span

Limits = Literal["score", "drop"]

# 1, 2, 3, 4, 6, 8, 12, ...: two shapes per doubling.
LADDER = tuple(sorted([2**k for k in range(25)] + [3 * 2**k for k in range(24)]))
# 1, 2, ... 8, 10, 12, 14, 16, 20, ...: four per doubling, as a row too many costs what a full one does.
ROWS = tuple(sorted({m * 2**k for m in (4, 5, 6, 7) for k in range(22)} | {1, 2, 3}))


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
    anchors: AnchorFn = anchor_groups,
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
    anchors:          which turns started in the same state, see `data.anchors`
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

    table = _table(episodes, at_least, limits, dropped_in_stats, components, anchors)
    if pack:
        order = sorted(range(len(placed)), key=lambda i: (-length[i], episodes[owner[i]].id, i))
        row, start = _first_fit(length, order, t)
        row = _rows_by_group(row, np.asarray(table.group)[owner])
    else:
        row, start = np.arange(len(placed), dtype=np.int32), np.zeros(len(placed), np.int32)

    rows = bucket(-(-max(int(row.max(initial=0)) + 1, at_least.rows) // row_multiple), ROWS) * row_multiple
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
    """The token half: one pass over spans, then whole arrays, kept on the flat list of all tokens until each is laid in its place."""
    spans = [span for segment in segments for span in segment]
    policy = [span for span in spans if span.author is Author.POLICY]
    sizes = np.array([len(span.tokens) for span in spans], np.int32)
    b, t, width = packing.shape[:3]

    mask = np.repeat(np.array([span.author is Author.POLICY for span in spans], np.bool_), sizes)
    turn = np.repeat(np.array([span.turn for span in spans], np.int32), sizes)
    # Greedy decoding (temperature 0) reports the log-probs of temperature 1.
    temperature = np.repeat(np.array([span.temperature or 1.0 for span in spans], np.float32), sizes)
    episode = np.repeat(packing.episode, packing.length)
    position = _rank_within(np.repeat(np.arange(len(segments)), packing.length))
    action = np.full(len(mask), -1, np.int32)
    action[mask] = _rank_within(episode[mask])
    number = np.empty_like(packing.row)
    number[np.lexsort((packing.start, packing.row))] = _rank_within(np.sort(packing.row)) + 1

    place = np.repeat(packing.row * t + packing.start, packing.length) + position
    laid = partial(_laid, place=place, shape=(b, t))
    laid_mask = laid(mask)
    row, column = np.nonzero(laid_mask)
    predict: Any = np.full((b, width), t, np.int32)
    predict[row, _rank_within(row)] = column
    return Tokens(
        ids=laid(_joined([span.tokens for span in spans], np.int32)),
        position=laid(position),
        segment=laid(np.repeat(number, packing.length)),
        episode=laid(episode),
        turn=laid(turn),
        action=laid(action, fill=-1),
        mask=laid_mask,
        in_loss=laid_mask.copy(),
        logprob=_laid(_joined([span.logprobs for span in policy], np.float32), place[mask], (b, t)),
        temperature=laid(temperature, fill=1),
        version=_laid(_joined([span.versions for span in policy], np.int32), place[mask], (b, t), fill=-1),
        predict=predict,
    )


def _table(
    episodes: Sequence[Episode], at_least: Shape, limits: Limits, dropped_in_stats: bool, components: Sequence[str], anchors: AnchorFn
) -> Episodes:
    """The table half."""
    if limits not in ("score", "drop"):
        raise ValueError(f'limits must be "score" or "drop", got {limits!r}')
    k = bucket(max([at_least.turns, *(len(episode.turns) for episode in episodes)]))
    shape = (bucket(max(len(episodes), at_least.episodes)), k)
    groups: dict[str, int] = {}
    numbers = [groups.setdefault(episode.group, len(groups)) for episode in episodes]
    turns = [(turn.state, episode.group) for episode in episodes for turn in episode.turns]
    found = iter(anchors([state for state, _ in turns], [group for _, group in turns]))
    state = [[int(next(found)) for _ in episode.turns] for episode in episodes]
    usable = [episode.usable for episode in episodes]
    kept = [episode.usable and not (limits == "drop" and episode.ending.limit) for episode in episodes]
    parts: Any = np.zeros((shape[0], len(components)), np.float32)
    for i, episode in enumerate(episodes):
        parts[i] = _components(episode, components)
    exists = _ragged([[True] * len(episode.turns) for episode in episodes], shape, np.bool_)
    return Episodes(
        group=_column(numbers, shape[0], np.int32, fill=len(groups)),
        reward=_column([episode.reward or 0.0 for episode in episodes], shape[0], np.float32),
        components=parts,
        in_stats=_column(usable if dropped_in_stats else kept, shape[0], np.bool_),
        in_loss=_column(kept, shape[0], np.bool_),
        truncated=_column([episode.ending.limit for episode in episodes], shape[0], np.bool_),
        turn_exists=exists,
        turn_reward=_ragged([[turn.reward or 0.0 for turn in episode.turns] for episode in episodes], shape, np.float32),
        turn_valid=_ragged([[turn.valid for turn in episode.turns] for episode in episodes], shape, np.bool_),
        turn_in_loss=exists.copy(),
        state=_ragged(state, shape, np.int32, fill=-1),
    )


def _components(episode: Episode, names: Sequence[str]) -> list[float]:
    """The named parts of the reward; zeros for an episode that has none to speak of."""
    if not episode.usable or episode.outcome is None:
        return [0.0] * len(names)
    given = episode.outcome.components
    for name in names:
        if name not in given:
            raise ValueError(f"episode {episode.id}: no reward component {name!r}; its verifier gave: {', '.join(given) or 'none'}")
    return [given[name] for name in names]


# The arrays of a `Batch` are declared as JAX's and are numpy's until they are put on a device: hence Any.


def _laid(values: NDArray[Any], place: NDArray[Any], shape: tuple[int, int], fill: int = 0) -> Any:
    """An array [B, T] with the values at their flat places."""
    out = np.full(shape, fill, values.dtype)
    out.reshape(-1)[place] = values
    return out


def _joined(arrays: Sequence[NDArray[Any] | None], dtype: type) -> NDArray[Any]:
    """All arrays in one; none make an empty one."""
    return np.concatenate([np.zeros(0, dtype), *(array for array in arrays if array is not None)])


def _column(values: Sequence[Any], e: int, dtype: type, fill: int = 0) -> Any:
    """An array [E] that begins with the values."""
    out = np.full(e, fill, dtype)
    out[: len(values)] = values
    return out


def _ragged(rows: Sequence[Sequence[Any]], shape: tuple[int, int], dtype: type, fill: int = 0) -> Any:
    """An array [E, K] whose rows begin with the given ones."""
    out = np.full(shape, fill, dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _rank_within(keys: NDArray[Any]) -> NDArray[np.int32]:
    """For ascending keys, the index of each entry among the entries of its key."""
    return (np.arange(len(keys)) - np.searchsorted(keys, keys)).astype(np.int32)
