"""The episodes of a run on disk: one compact append-only file of events.

    with EpisodeWriter(path) as store:
        store.add(Start(...), SpanAdded(...))   # as things happen
        store.append(episode, ...)              # or finished episodes at once
        store.sync()                            # at the end of a step
    for episode in read(path): ...

Each frame holds successive events of one episode and the crc of that episode's frame before it, so that an event that was lost with a
damaged frame is noticed instead of being folded over. A frame of the other kind is a rewind: a run that resumed at a step declares
what it is about to collect again. Nothing is ever rewritten.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgpack

from agentrl_jax.data.episode import Episode
from agentrl_jax.data.events import Event, Packed, Start, Unfinished, events_of, fold
from agentrl_jax.data.frames import Content, Frame, FrameWriter, StoreError, encode, scan

_CONTENT = Content(b"EPIS", "an episode store", "Copy what is left with agentrl_jax.data.store.salvage(path, new_path) and use the copy")
_EVENTS, _REWIND = 0, 1


class EpisodeWriter(FrameWriter):
    """Appends to the store of a run; makes the file, or takes up where an earlier writer stopped. Opening reads the file once."""

    def __init__(self, path: Path) -> None:
        self._ledger = _Ledger(path)
        super().__init__(path, _CONTENT, seen=self._ledger.take)

    def add(self, *events: Event) -> None:
        """Append events, of any episodes, as they happen.

        All are kept, or none where StoreError (the disk) or ValueError (an event that cannot follow, an id that is taken) is raised.
        """
        by_episode: dict[str, list[Event]] = {}
        for event in events:
            by_episode.setdefault(event.episode, []).append(event)
        frames: list[Frame] = []
        entries: list[_Entry] = []
        for episode, own in by_episode.items():
            before = None if isinstance(own[0], Start) else self._ledger.running.get(episode)
            state = fold(own, before and before.fold())
            packed = Packed.of(episode, before.link if before else 0, own)
            frames.append(encode(_EVENTS, packed.to_bytes(), frames[-1].end if frames else self.end))
            entries.append(replace(self._ledger.after(frames[-1], packed), state=state))
        self.write(b"".join(frame.raw for frame in frames))
        for entry in entries:
            self._ledger.enter(entry)

    def append(self, *episodes: Episode) -> None:
        """Append finished episodes in one write, all or none, as `add` does with their events."""
        self.add(*(event for episode in episodes for event in events_of(episode)))

    def rewind(self, step: int) -> None:
        """The run resumed at `step`: episodes started for it or a later one until now are superseded, and will be collected again."""
        frame = encode(_REWIND, msgpack.packb(step) or b"", self.end)
        self.write(frame.raw)
        self._ledger.take(frame)


def read(path: Path, *, superseded: bool = False) -> Iterator[Episode]:
    """The finished episodes of a store in the order they ended, read one by one; a writer may go on meanwhile.

    superseded: also those that a rewind declared void

    Raises StoreError for damage, after all episodes before it.
    """
    rewinds = [] if superseded else _rewinds(path)
    ledger = _Ledger(path)
    for frame in scan(path, _CONTENT):
        entry = ledger.take(frame)
        if entry is not None and entry.ended and not any(entry.offset < offset and entry.step >= step for offset, step in rewinds):
            episode = ledger.fold(entry)
            assert isinstance(episode, Episode)
            yield episode


def unfinished(path: Path) -> list[Unfinished]:
    """The episodes that were started and have not ended, as far as they came; without those that a rewind declared void."""
    ledger = _Ledger(path)
    for frame in scan(path, _CONTENT):
        ledger.take(frame)
    states = [ledger.fold(entry) for entry in ledger.running.values()]
    return [state for state in states if isinstance(state, Unfinished)]


@dataclass(frozen=True)
class Salvaged:
    """What `salvage` did.

    frames: good frames that were copied
    lost:   bytes that were unreadable
    cut:    ids of episodes with later events that could not be kept, because one before them was lost
    """

    frames: int
    lost: int
    cut: tuple[str, ...]


def salvage(path: Path, target: Path) -> Salvaged:
    """Copy what is good of a damaged store to the new file `target`. The damaged file stays as it is."""
    if target.exists():
        raise StoreError(f"{target}: exists already; salvage into a new file")
    lost: list[int] = []
    cut: dict[str, None] = {}
    good: list[Frame] = []
    ledger = _Ledger(path)
    for frame in scan(path, _CONTENT, damaged=lambda offset, size: lost.append(size)):
        try:
            ledger.take(frame)
        except StoreError:
            cut[Packed.from_bytes(frame.payload).episode] = None
        else:
            good.append(frame)
    with FrameWriter(target, _CONTENT) as copy:
        copy.write(b"".join(frame.raw for frame in good))
        copy.sync()
    return Salvaged(len(good), sum(lost), tuple(cut))


def _rewinds(path: Path) -> list[tuple[int, int]]:
    """Offset and step of each rewind. Damage is for the scan that reads the episodes to report."""
    frames = scan(path, _CONTENT, only=_REWIND, damaged=lambda offset, size: None)
    return [(frame.offset, msgpack.unpackb(frame.payload)) for frame in frames]


@dataclass(frozen=True)
class _Entry:
    """An episode as far as it came: the offset of its first frame, the crc of its last, and all its events.

    state: their fold, where it is known already
    """

    id: str
    step: int
    offset: int
    link: int
    packed: tuple[Packed, ...]
    state: Unfinished | Episode | None = None

    @property
    def ended(self) -> bool:
        return self.packed[-1].ends

    def fold(self) -> Unfinished | Episode:
        return self.state or fold(event for packed in self.packed for event in packed.unpack())


@dataclass
class _Ledger:
    """What the frames of a store add up to: the episodes that go on, and the steps of those that ended, by id.

    It looks into no event but the first and last of a frame, so that opening a long store is quick.
    """

    path: Path
    running: dict[str, _Entry] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)

    def take(self, frame: Frame) -> _Entry | None:
        """Account for a frame of the file: its episode's entry, or None for a rewind. Raises StoreError if it follows from nothing."""
        if frame.kind == _REWIND:
            step = msgpack.unpackb(frame.payload)
            self.running = {key: entry for key, entry in self.running.items() if entry.step < step}
            self.ended = {key: ended for key, ended in self.ended.items() if ended < step}
            return None
        try:
            entry = self.after(frame, Packed.from_bytes(frame.payload))
        except ValueError as error:
            raise self._misfit(frame.offset, error) from error
        self.enter(entry)
        return entry

    def after(self, frame: Frame, packed: Packed) -> _Entry:
        """The episode of a frame with these events, once they have happened. Raises ValueError where they follow from nothing."""
        if packed.episode in self.ended:
            raise ValueError(f"episode {packed.episode}: it ended already; ids are unique in a run, up to a rewind")
        step = packed.starts
        if step is not None:
            return _Entry(packed.episode, step, frame.offset, frame.crc, (packed,))
        before = self.running.get(packed.episode)
        if before is None or before.link != packed.link:
            raise ValueError(f"episode {packed.episode}: a frame before this one is missing")
        return replace(before, link=frame.crc, packed=(*before.packed, packed), state=None)

    def enter(self, entry: _Entry) -> None:
        """Account for what `after` said."""
        if entry.ended:
            self.running.pop(entry.id, None)
            self.ended[entry.id] = entry.step
        else:
            self.running[entry.id] = entry

    def fold(self, entry: _Entry) -> Unfinished | Episode:
        """The record. Raises StoreError where the events make none."""
        try:
            return entry.fold()
        except ValueError as error:
            raise self._misfit(entry.offset, error) from error

    def _misfit(self, offset: int, error: ValueError) -> StoreError:
        return StoreError(f"{self.path}: the frame at byte {offset} does not fit: {error}. {_CONTENT.remedy}")
