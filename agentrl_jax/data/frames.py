"""Append-only files of checked frames: crash-safe, readable while written, one writer.

    file  = "agentrl\\n", 4 bytes of content tag, u32 format version, frame ...
    frame = 4 bytes of marker, u16 kind, u16 codec, u32 bytes of payload, u32 crc32 of all the rest, payload

A frame is good or it does not exist. Bad bytes with no good frame after them are the tail of a write that did not finish: readers stop
before it, the next writer cuts it off. Bad bytes with a good frame after them are damage, and an error.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_HEADER = struct.Struct("<8s4sI")
_FRAME = struct.Struct("<4sHHII")
_MAGIC = b"agentrl\n"
_MARKER = b"\xf5AG\n"
_VERSION = 1
_RAW, _ZLIB = 0, 1
_CHUNK = 1 << 20

_Writer = TypeVar("_Writer", bound="FrameWriter")
Damage = Callable[[int, int], None]


class StoreError(Exception):
    """A file of frames is damaged, foreign, locked or cannot be written."""


@dataclass(frozen=True)
class Content:
    """What the frames of a file hold.

    tag:    4 bytes in the file's header
    name:   for messages
    remedy: what to do about a damaged file
    """

    tag: bytes
    name: str
    remedy: str


@dataclass(frozen=True)
class Frame:
    """A good frame. `raw` are its bytes as they are in the file, `crc` tells it from every other one."""

    offset: int
    kind: int
    crc: int
    raw: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.raw)

    @property
    def payload(self) -> bytes:
        codec = _FRAME.unpack_from(self.raw)[2]
        body = self.raw[_FRAME.size :]
        return zlib.decompress(body) if codec == _ZLIB else body


def encode(kind: int, payload: bytes, offset: int = 0) -> Frame:
    """A frame of `payload`, compressed where that makes it smaller."""
    codec, body = _ZLIB, zlib.compress(payload, level=1)
    if len(body) >= len(payload):
        codec, body = _RAW, payload
    head = _FRAME.pack(_MARKER, kind, codec, len(body), 0)[:-4]
    crc = zlib.crc32(body, zlib.crc32(head))
    return Frame(offset, kind, crc, head + crc.to_bytes(4, "little") + body)


def scan(path: Path, content: Content, *, only: int | None = None, damaged: Damage | None = None) -> Iterator[Frame]:
    """The good frames of a file as it is now, in order. Never blocks a writer.

    only:    frames of this kind; the others are skipped by their headers, unchecked
    damaged: called with offset and number of bytes for each damaged stretch, which is then skipped

    Raises StoreError for a foreign file, and for damage where `damaged` is None, after all frames before it.
    """
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        if not _check_header(fd, path, content):
            return
        offset, end = _HEADER.size, os.fstat(fd).st_size
        while offset < end:
            header = _header_at(fd, offset)
            if header is not None and only not in (None, header[0]) and offset + _FRAME.size + header[1] <= end:
                offset += _FRAME.size + header[1]
                continue
            frame, following = _frame_at(fd, offset), None
            if frame is None:
                following = _next_frame(fd, offset + 1)
                # Looked at again because a writer may have finished it since; one that has is done before any that follows.
                frame = _frame_at(fd, offset)
            if frame is None:
                if following is None:
                    return
                lost = following.offset - offset
                if damaged is None:
                    raise StoreError(f"{path}: damaged at byte {offset}, {lost} bytes are unreadable. {content.remedy}")
                damaged(offset, lost)
                frame = following
            if only in (None, frame.kind):
                yield frame
            offset = frame.end


class FrameWriter:
    """The one writer of a file: locks it, cuts off what a crash left half-written, and appends whole frames or nothing.

    end:     bytes of the file
    dropped: bytes that were cut off when it was opened

    `seen` is called with every frame that is there already. Not for several threads at once. Raises StoreError where another writer has
    the file open, it is damaged, or holds something else.
    """

    def __init__(self, path: Path, content: Content, *, seen: Callable[[Frame], object] = lambda frame: None) -> None:
        self.path = path
        self._fd = _open(path)
        try:
            self._lock()
            self.end = self._recover(content, seen)
            self.dropped = max(os.fstat(self._fd).st_size - self.end, 0)
            if self.dropped:
                os.ftruncate(self._fd, self.end)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced_directory = False

    def write(self, data: bytes) -> None:
        """Append the bytes of whole frames. Raises StoreError, with the file as it was, where they do not fit."""
        try:
            view, offset = memoryview(data), self.end
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written
        except BaseException as error:
            os.ftruncate(self._fd, self.end)
            if isinstance(error, OSError):
                raise StoreError(
                    f"{self.path}: could not write {len(data)} bytes: {error.strerror}. Nothing already saved is lost; "
                    "make room on the disk and append again"
                ) from error
            raise
        self.end += len(data)

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        try:
            os.fsync(self._fd)
            if not self._synced_directory:
                directory = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
                self._synced_directory = True
        except OSError as error:
            raise StoreError(f"{self.path}: could not be synced to the disk: {error.strerror}") from error

    def close(self) -> None:
        """Give the file and its lock back. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self: _Writer) -> _Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{self.path}: another writer has this file open; a run needs a file of its own") from None

    def _recover(self, content: Content, seen: Callable[[Frame], object]) -> int:
        """Where the good frames end; writes the header of a new file."""
        if not _check_header(self._fd, self.path, content):
            self.end = 0
            self.write(_HEADER.pack(_MAGIC, content.tag, _VERSION))
            return self.end
        end = _HEADER.size
        for frame in scan(self.path, content):
            seen(frame)
            end = frame.end
        return end


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}") from error


def _check_header(fd: int, path: Path, content: Content) -> bool:
    """True for a file of this content, False for one whose header was never finished."""
    head = os.pread(fd, _HEADER.size, 0)
    wanted = _HEADER.pack(_MAGIC, content.tag, _VERSION)
    if head == wanted:
        return True
    if len(head) < _HEADER.size and wanted.startswith(head):
        return False
    if head.startswith(wanted[:-4]):
        version = _HEADER.unpack(head)[2]
        raise StoreError(f"{path}: format version {version}, but this code reads version {_VERSION}; use the code that wrote it")
    raise StoreError(f"{path}: this is not {content.name}; it is left as it is")


def _header_at(fd: int, offset: int) -> tuple[int, int] | None:
    """Kind and payload bytes that the header at `offset` claims."""
    head = os.pread(fd, _FRAME.size, offset)
    if len(head) < _FRAME.size or not head.startswith(_MARKER):
        return None
    _, kind, _, size, _ = _FRAME.unpack(head)
    return kind, size


def _frame_at(fd: int, offset: int) -> Frame | None:
    """The good frame that begins at `offset`, if there is one."""
    header = _header_at(fd, offset)
    if header is None or offset + _FRAME.size + header[1] > os.fstat(fd).st_size:
        return None
    raw = os.pread(fd, _FRAME.size + header[1], offset)
    if len(raw) < _FRAME.size + header[1]:
        return None
    crc = _FRAME.unpack_from(raw)[4]
    good = crc == zlib.crc32(memoryview(raw)[_FRAME.size :], zlib.crc32(raw[: _FRAME.size - 4]))
    return Frame(offset, header[0], crc, raw) if good else None


def _next_frame(fd: int, offset: int) -> Frame | None:
    """The first good frame that begins at `offset` or later."""
    while chunk := os.pread(fd, _CHUNK, offset):
        at = chunk.find(_MARKER)
        while at >= 0:
            frame = _frame_at(fd, offset + at)
            if frame is not None:
                return frame
            at = chunk.find(_MARKER, at + 1)
        if len(chunk) < len(_MARKER):
            return None
        # A marker may lie across two chunks.
        offset += len(chunk) - len(_MARKER) + 1
    return None
