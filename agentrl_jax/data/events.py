"""What happens in an episode, event by event; an `Episode` is the fold of its events.

Events are what the store keeps, so an episode that a crash cut short is known up to its last event and can be taken up again.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Span, Turn


@dataclass(frozen=True)
class Start:
    """The episode begins. Fields as in `Episode`, of which `episode` is the id."""

    episode: str
    task: str
    group: str
    seed: int
    step: int


@dataclass(frozen=True)
class SpanAdded:
    """The newest segment grew by a span, or a new segment begins with it (`segment` counts from 0)."""

    episode: str
    segment: int
    span: Span


@dataclass(frozen=True)
class TurnDone:
    """The next turn is complete. `snapshot` names the kept state of the sandbox after it, if there is one."""

    episode: str
    turn: Turn
    snapshot: str | None = None


@dataclass(frozen=True)
class Ended:
    """The episode is over; nothing of it changes any more."""

    episode: str
    ending: Ending
    outcome: Outcome | None
    counters: Mapping[str, int] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)


Event = Start | SpanAdded | TurnDone | Ended


@dataclass(frozen=True)
class Unfinished:
    """An episode so far. `snapshot` is the newest one that was kept."""

    start: Start
    segments: tuple[tuple[Span, ...], ...] = ()
    turns: tuple[Turn, ...] = ()
    snapshot: str | None = None

    @property
    def step(self) -> int:
        return self.start.step


def advance(state: Unfinished | Episode | None, event: Event) -> Unfinished | Episode:
    """One step of the fold. Raises ValueError for an event that cannot follow, or if the finished record is not valid."""
    if isinstance(state, Episode):
        raise ValueError(f"episode {event.episode}: {type(event).__name__} after its end")  # noqa: TRY004 - the order is wrong, no type
    if isinstance(event, Start):
        if state is not None:
            raise ValueError(f"episode {event.episode}: it started already")
        return Unfinished(event)
    if state is None:
        raise ValueError(f"episode {event.episode}: {type(event).__name__} of an episode that is not running")
    if isinstance(event, SpanAdded):
        segments = state.segments
        if event.segment == len(segments):
            return replace(state, segments=(*segments, (event.span,)))
        if event.segment == len(segments) - 1:
            return replace(state, segments=(*segments[:-1], (*segments[-1], event.span)))
        raise ValueError(f"episode {event.episode}: a span of segment {event.segment}, but there are {len(segments)} segments")
    if isinstance(event, TurnDone):
        return replace(state, turns=(*state.turns, event.turn), snapshot=event.snapshot or state.snapshot)
    start = state.start
    return Episode(
        id=start.episode,
        task=start.task,
        group=start.group,
        seed=start.seed,
        step=start.step,
        segments=tuple(Segment(spans) for spans in state.segments),
        turns=state.turns,
        ending=event.ending,
        outcome=event.outcome,
        counters=event.counters,
        timings=event.timings,
    )


def fold(events: Iterable[Event], state: Unfinished | Episode | None = None) -> Unfinished | Episode:
    """The episode that the events tell of, from `state` on. Raises ValueError as `advance` does."""
    for event in events:
        state = advance(state, event)
    if state is None:
        raise ValueError("no events, no episode")
    return state


def events_of(episode: Episode) -> Iterator[Event]:
    """Events whose fold is `episode`."""
    yield Start(episode.id, episode.task, episode.group, episode.seed, episode.step)
    for s, segment in enumerate(episode.segments):
        for span in segment.spans:
            yield SpanAdded(episode.id, s, span)
    for turn in episode.turns:
        yield TurnDone(episode.id, turn)
    yield Ended(episode.id, episode.ending, episode.outcome, episode.counters, episode.timings)


class _Kind(enum.IntEnum):
    START = 0
    SPAN = 1
    TURN = 2
    ENDED = 3


@dataclass(frozen=True)
class Packed:
    """Successive events of one episode as they are stored: plain lists, made into records only when someone asks.

    link: crc of the episode's frame before this one, 0 where there is none
    """

    episode: str
    link: int
    events: list[list[Any]]

    @classmethod
    def of(cls, episode: str, link: int, events: Iterable[Event]) -> "Packed":
        return cls(episode, link, [_to_list(event) for event in events])

    @classmethod
    def from_bytes(cls, payload: bytes) -> "Packed":
        return cls(*msgpack.unpackb(payload))

    def to_bytes(self) -> bytes:
        """Raises ValueError for a value that has no stored form."""
        try:
            return msgpack.packb([self.episode, self.link, self.events], default=_plain) or b""
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"episode {self.episode}: cannot be stored: {error}") from error

    @property
    def starts(self) -> int | None:
        """The step of an episode that begins with these events; None where it began earlier."""
        kind, *fields = self.events[0]
        return fields[3] if kind == _Kind.START else None

    @property
    def ends(self) -> bool:
        return self.events[-1][0] == _Kind.ENDED

    def unpack(self) -> Iterator[Event]:
        return (_to_event(self.episode, *event) for event in self.events)


def _to_list(event: Event) -> list[Any]:
    match event:
        case Start():
            return [_Kind.START, event.task, event.group, event.seed, event.step]
        case SpanAdded(segment=segment, span=span):
            arrays = [_bytes(span.tokens), _bytes(span.logprobs), _bytes(span.versions)]
            rest = [span.prompt_digest, span.temperature, span.finish_reason, span.kv]
            return [_Kind.SPAN, segment, int(span.author), span.turn, *arrays, *rest]
        case TurnDone(turn=turn):
            return [_Kind.TURN, turn.reward, turn.state, turn.valid, event.snapshot]
        case Ended(outcome=outcome):
            scored = None if outcome is None else [outcome.reward, dict(outcome.components), outcome.true_success, outcome.tampering]
            return [_Kind.ENDED, event.ending.value, scored, dict(event.counters), dict(event.timings)]


def _to_event(episode: str, kind: int, *fields: Any) -> Event:
    match kind:
        case _Kind.START:
            return Start(episode, *fields)
        case _Kind.SPAN:
            segment, author, turn, tokens, logprobs, versions, *rest = fields
            if logprobs is not None:
                logprobs, versions = _array(logprobs, "<f4"), _array(versions, "<i4")
            return SpanAdded(episode, segment, Span(Author(author), turn, _array(tokens, "<i4"), logprobs, versions, *rest))
        case _Kind.TURN:
            *turn, snapshot = fields
            return TurnDone(episode, Turn(*turn), snapshot)
        case _Kind.ENDED:
            ending, scored, counters, timings = fields
            outcome = None if scored is None else Outcome(*scored[:3], tampering=tuple(scored[3]))
            return Ended(episode, Ending(ending), outcome, counters, timings)
        case _:
            raise ValueError(f"episode {episode}: unknown kind of event {kind}")


def _bytes(array: NDArray[Any] | None) -> bytes | None:
    return None if array is None else array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(data: bytes, dtype: str) -> NDArray[Any]:
    return np.frombuffer(data, dtype).astype(np.dtype(dtype).newbyteorder("="), copy=False)


def _plain(value: Any) -> Any:
    """Numbers that came out of numpy."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be stored")
