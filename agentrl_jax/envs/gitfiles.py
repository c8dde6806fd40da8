"""A git repository as plain files, written without git: a task brings its history among its files, the same bytes on every machine.

Loose objects, one branch `main`, an index that agrees with the last commit; no remotes, no reflog, and no object that is not reachable.
Formats: gitformat-index and the chapter "Git Internals" of Pro Git (https://git-scm.com/docs).
"""

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AUTHOR = "Maintainer <maintainer@example.org>"
CONFIG = b"""[core]
\trepositoryformatversion = 0
\tfilemode = false
\tbare = false
[user]
\tname = You
\temail = you@example.org
"""


@dataclass(frozen=True)
class Commit:
    """A commit. files: path -> bytes of the whole tree; time: seconds since 1970, UTC."""

    message: str
    time: int
    files: Mapping[str, bytes]


def repository(commits: Sequence[Commit]) -> dict[str, bytes]:
    """`.git/...` -> bytes of a repository with these commits, first to last; every file has mode 644."""
    made: dict[str, bytes] = {".git/HEAD": b"ref: refs/heads/main\n", ".git/config": CONFIG}
    parent = ""
    for commit in commits:
        tree = _tree(commit.files, made)
        about = f"tree {tree}\n{parent}author {AUTHOR} {commit.time} +0000\ncommitter {AUTHOR} {commit.time} +0000\n\n{commit.message}\n"
        name = _object("commit", about.encode(), made)
        parent = f"parent {name}\n"
        made[".git/refs/heads/main"] = f"{name}\n".encode()
    made[".git/index"] = _index(commits[-1].files)
    return made


def _tree(files: Mapping[str, bytes], made: dict[str, bytes]) -> str:
    """Name of the tree of these files."""
    entries: list[tuple[bytes, bytes]] = []  # (what git sorts by, the entry)
    folders: dict[str, dict[str, bytes]] = {}
    for path, data in files.items():
        first, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(first, {})[rest] = data
        else:
            entries.append((first.encode(), b"100644 %b\0" % first.encode() + bytes.fromhex(_object("blob", data, made))))
    for folder, inside in folders.items():
        entries.append((folder.encode() + b"/", b"40000 %b\0" % folder.encode() + bytes.fromhex(_tree(inside, made))))
    return _object("tree", b"".join(entry for _, entry in sorted(entries)), made)


def _object(kind: str, data: bytes, made: dict[str, bytes]) -> str:
    """Write an object; its name."""
    whole = b"%b %d\0" % (kind.encode(), len(data)) + data
    name = _sha1(whole).hex()
    made[f".git/objects/{name[:2]}/{name[2:]}"] = _stored(whole)
    return name


def _stored(data: bytes) -> bytes:
    """A zlib stream that holds `data` as it is: what a compressor makes depends on its version."""
    blocks = [data[i : i + 65535] for i in range(0, len(data), 65535)]
    parts = [struct.pack("<BHH", i == len(blocks) - 1, len(block), 65535 - len(block)) + block for i, block in enumerate(blocks)]
    return b"\x78\x01" + b"".join(parts) + struct.pack(">I", zlib.adler32(data))


def _index(files: Mapping[str, bytes]) -> bytes:
    """The index of a tree just read: facts about files are zero, which has git look at the files themselves."""
    content = b"DIRC" + struct.pack(">II", 2, len(files))
    for name, data in sorted((path.encode(), data) for path, data in files.items()):
        blob = _sha1(b"blob %d\0" % len(data) + data)
        entry = struct.pack(">24xI12x20sH", 0o100644, blob, min(len(name), 0xFFF)) + name
        content += entry + b"\0" * (8 - len(entry) % 8)
    return content + _sha1(content)


def _sha1(data: bytes) -> bytes:
    return hashlib.sha1(data, usedforsecurity=False).digest()
