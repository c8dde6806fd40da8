"""Files of a box to a tar and back, inside the container and without a new process: see docker_agent.py, which brings it along.

`tar` the program would need a process, which a box at its limit cannot start, and Python's tarfile cannot write sparse files.
"""

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, Any

BLOCK = 512  # of a tar
CHUNK = 1 << 16


class Pieces:
    """A file of pieces, which are made when they are read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._buffer = pieces, bytearray()

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size and (piece := next(self._pieces, None)) is not None:
            self._buffer += piece
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def unpack(source: Any) -> str | None:
    """Extract a tar; why that failed, or None. What is in the way of a file is replaced, not opened."""
    folders: list[tarfile.TarInfo] = []
    try:
        with tarfile.open(fileobj=source, mode="r|", encoding="utf-8") as archive:
            archive.extraction_filter = lambda member, _: member  # the user can write to its own files only, wherever a path leads
            for member in archive:
                if member.isdir():
                    folders.append(member)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join("/", member.name))
                archive.extract(member, "/", set_attrs=not member.isdir())
            for folder in reversed(folders):  # their modes could have kept their files out
                with contextlib.suppress(tarfile.ExtractError):  # /tmp itself belongs to root
                    archive.chmod(folder, os.path.join("/", folder.name))
    except (OSError, tarfile.TarError, ValueError) as error:
        return f"{getattr(error, 'filename', None) or 'tar'}: {getattr(error, 'strerror', None) or error}"
    return None


def pack(target: Any, longest: int) -> None:
    """Write a tar of /workspace and /tmp, in the order of names, without paths of `longest` bytes or more. Nothing may run meanwhile."""
    os.chdir("/")
    opened: list[tuple[str, int]] = []
    try:
        with tarfile.open(fileobj=target, mode="w|", bufsize=CHUNK, format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
            _add_all(archive, longest, opened)
    finally:
        for path, mode in reversed(opened):
            os.chmod(path, mode)


def _add_all(archive: tarfile.TarFile, longest: int, opened: list[tuple[str, int]]) -> None:
    """`opened`: the folders that had to be made readable, which their owner may do, and their modes."""
    links: dict[tuple[int, int], str] = {}
    pending = ["workspace", "tmp"]
    while pending:
        path = pending.pop()
        facts = os.lstat(path)
        kind, key = stat.S_IFMT(facts.st_mode), (facts.st_dev, facts.st_ino)
        entry = tarfile.TarInfo(path)
        entry.mode, entry.mtime = stat.S_IMODE(facts.st_mode), int(facts.st_mtime)
        if key in links:
            entry.type, entry.linkname = tarfile.LNKTYPE, links[key]
            archive.addfile(entry)
        elif kind == stat.S_IFREG:
            with _open(path, entry.mode) as file:
                _add_file(archive, entry, file, facts.st_size)
        elif kind == stat.S_IFDIR:
            entry.type = tarfile.DIRTYPE
            archive.addfile(entry)
            if entry.mode & 0o500 != 0o500:
                os.chmod(path, 0o700)
                opened.append((path, entry.mode))
            children = [f"{path}/{name}" for name in sorted(os.listdir(path), reverse=True)]
            pending += [child for child in children if len(os.fsencode(child)) < longest]
        elif kind == stat.S_IFLNK:
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(entry)
        elif kind == stat.S_IFIFO:
            entry.type = tarfile.FIFOTYPE
            archive.addfile(entry)
        if facts.st_nlink > 1 and kind not in (stat.S_IFDIR, stat.S_IFSOCK):  # sockets are left out: nobody would listen
            links[key] = path


def _open(path: str, mode: int) -> IO[bytes]:
    """A file to be read, even if its owner had given up that right."""
    try:
        return open(path, "rb", buffering=0)
    except PermissionError:
        os.chmod(path, 0o400)
        try:
            return open(path, "rb", buffering=0)
        finally:
            os.chmod(path, mode)


def _add_file(archive: tarfile.TarFile, entry: tarfile.TarInfo, file: IO[bytes], size: int) -> None:
    """A regular file without its holes, in the PAX format 1.0 of GNU tar's manual, "Storing Sparse Files"."""
    parts, table = list(_ranges(file.fileno(), size)), b""
    if size and parts != [(0, size)]:
        numbers = [len(parts) + 1, *(number for part in parts for number in part), size, 0]
        table = "".join(f"{number}\n" for number in numbers).encode()
        table += bytes(-len(table) % BLOCK)
        entry.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": entry.name,
            "GNU.sparse.realsize": str(size),
        }
    entry.size = len(table) + sum(length for _, length in parts)
    archive.addfile(entry, Pieces(_content(file.fileno(), parts, table)))  # pyright: ignore[reportArgumentType]


def _ranges(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data: offset and length."""
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # a hole up to the end
            return
        at = os.lseek(file, start, os.SEEK_HOLE)
        yield start, at - start


def _content(file: int, parts: list[tuple[int, int]], before: bytes) -> Iterator[bytes]:
    yield before
    for start, length in parts:
        for at in range(start, start + length, CHUNK):
            yield os.pread(file, min(CHUNK, start + length - at), at)
