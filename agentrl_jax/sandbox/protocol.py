"""What an isolated machine can do, whatever runs it. Files are forked and kept; processes are not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


class SandboxError(Exception):
    """Infrastructure failed: the box could not be started or used, for a reason no command inside could cause."""


class ImageError(SandboxError):
    """There is no box for this task, as its image cannot be had; those of other tasks start all the same."""


@dataclass(frozen=True)
class Limits:
    """What a box may use. Seconds, bytes, counts.

    seconds:   wall time of one command; at its end every process of the box is killed and the partial output returned
    memory:    address space of one process
    processes: processes and threads alive at once
    disk:      bytes in the box's writable files
    inodes:    files in the box's writable file system
    output:    bytes of output returned of one command: the head and the tail; a command is killed at 16 MiB
    """

    seconds: float = 5.0
    memory: int = 256 << 20
    processes: int = 32
    disk: int = 16 << 20
    inodes: int = 4000
    output: int = 64 << 10


@dataclass(frozen=True)
class Result:
    """What a command did. Never raised: a command that fails is data.

    exit_code: None where the command was killed by a limit; -n where signal n ended it
    output:    stdout and stderr together, as bytes, head and tail if `dropped` bytes were left out
    timed_out: the time limit ended it
    killed:    what other than time ended it, or None: "output" | "memory" (a limit), "box" (it took the box's own process with it;
               the box comes back, over the same files, for the next command)
    seconds:   wall time
    """

    exit_code: int | None
    output: bytes
    dropped: int = 0
    timed_out: bool = False
    killed: str | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The output for people and models: bytes that are not UTF-8 are replaced, never raised."""
        return self.output.decode("utf-8", errors="replace")


@runtime_checkable
class Sandbox(Protocol):
    """One isolated machine with a working directory `/workspace`.

    Commands of one box run one after another. Every method raises `SandboxError` for infrastructure faults only.
    """

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run `argv` in `/workspace`. `python3 ...` runs in a fork of the box's warm interpreter where the backend has one."""
        ...

    async def exec_fresh(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """`exec` for scoring: over the same files, but nothing that earlier commands left running can see or touch this one.

        It runs in an isolated process tree of its own, and its exit code is the kernel's word rather than a message from inside
        (128+n where signal n ended it). `exec` shares its user and its processes with whatever the policy left there.
        """
        ...

    async def put(self, files: Mapping[str, bytes]) -> Result:
        """Write files (paths relative to `/workspace`, parents made), as the box's user, never following links out of the box.

        Files that the box refuses (disk full, a folder in the way) are the policy's doing: an exit code other than 0, and why.
        Raises ValueError for a path that leads out of `/workspace`.
        """
        ...

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        """Read a regular file (relative to `/workspace`); None where there is none, or it is larger than `limit`."""
        ...

    async def fork(self) -> "Sandbox":
        """A new box with a copy of this one's files. Changes in either are not seen by the other."""
        ...

    async def snapshot(self) -> bytes:
        """The writable files as a tar; `Backend.start(snapshot=...)` makes a box of it.

        Paths of more than 1000 bytes are left out: they could grow without limit, and the tar with them.
        """
        ...

    async def pause(self) -> None:
        """Stop every process that commands left running. Files can still be used; commands cannot, until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Kill everything in the box and drop its files. Safe to call twice."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Starts boxes and reaps what it started. `async with backend:` opens and closes it."""

    async def __aenter__(self) -> "Backend": ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def start(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        snapshot: bytes | None = None,
        limits: Limits | None = None,
        image: str | Path | None = None,
    ) -> Sandbox:
        """A fresh box holding `files` in `/workspace`, or the files of a `snapshot`. Raises ValueError if they do not fit.

        image: the name of an image, or the folder of a Dockerfile, which is built at its first use; None for the backend's own. ImageError
               where it cannot be had, and where the backend knows no images
        """
        ...
