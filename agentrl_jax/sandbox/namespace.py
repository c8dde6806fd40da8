"""The host's side of a keeper: one namespace that holds the files and processes of some boxes. See keeper.py for the other side."""

import asyncio
import itertools
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl_jax.sandbox.protocol import Sandbox, SandboxError

START = 30.0  # seconds for anything that should take milliseconds; past it the host is broken
NOBODY = 65534
SETTINGS = (  # kernel setting, value with which it forbids user namespaces, value to set
    ("user.max_user_namespaces", "0", "10000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)
ISOLATED = ("--unshare-user", "--unshare-all", "--die-with-parent", "--as-pid-1", "--clearenv")


class Namespace:
    """A running keeper.

    Every request gets one answer, a status that its future holds. All futures fail with SandboxError when the keeper ends.
    `boxes` are those whose files are here; they come and go themselves.
    """

    def __init__(self, process: asyncio.subprocess.Process, link: socket.socket) -> None:
        self._process, self._link = process, link
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[int]] = {}
        self.boxes: set[Sandbox] = set()
        self.closed = False
        self._loop.add_reader(link, self._read)

    @classmethod
    async def open(cls, root: Path) -> "Namespace":
        """Start a keeper over the root file system. Raises SandboxError with the reason and what to do about it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = os.memfd_create("errors")
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *(root / "usr/bin/bwrap", *ISOLATED, "--uid", "0", "--gid", "0", "--cap-add", "ALL"),
                *("--ro-bind", root / "usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
                *("--ro-bind", root, "/image", "--proc", "/proc", "--dev", "/dev", "--dir", "/boxes", "--dir", "/tmp", "--chdir", "/"),
                *("/usr/bin/python3", "-I", "-S", "/usr/lib/agentrl/keeper.pyc"),
                stdin=theirs.fileno(),
                stdout=errors,
                stderr=errors,
                env={"LD_LIBRARY_PATH": str(root / "usr/lib/native")},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us, we close the boxes
                **_unprivileged(),
            )
            theirs.close()
            ours.settimeout(START)  # of a send: the keeper reads within milliseconds
            async with asyncio.timeout(START):
                if await asyncio.get_running_loop().sock_recv(ours, 16) != b"ready":
                    raise SandboxError(explain(read_all(errors)))
            return cls(process, ours)
        except BaseException as error:
            ours.close()
            if process:
                await _end(process)
            if isinstance(error, OSError):
                raise SandboxError(
                    f"{root} holds a program that cannot be started ({error}): set TMPDIR to a folder that all users may enter, "
                    "on a file system that is not mounted noexec"
                ) from error
            raise
        finally:
            theirs.close()
            os.close(errors)

    def request(self, verb: str, *arguments: object, descriptors: Sequence[int] = ()) -> "Request":
        """Send a request at once, without waiting. Raises SandboxError if the keeper is gone."""
        key = next(self._ids)
        answer = self._answers[key] = self._loop.create_future()
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())  # an answer nobody waits for is no warning
        self._send([str(key), verb, *map(str, arguments)], descriptors)
        return Request(self, key, answer)

    def kill(self, key: int) -> None:
        with suppress(SandboxError):  # no keeper, no process
            self._send([str(key), "kill"], ())

    def _send(self, fields: list[str], descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self._link, [encode(fields)], list(descriptors))
        except OSError as error:
            raise SandboxError(f"the sandbox's keeper is gone: {error!r}") from error

    def _read(self) -> None:
        try:
            message = self._link.recv(1 << 12)
        except OSError:
            message = b""
        if not message:
            self._fail()
            return
        key, status, text = message.decode(errors="replace").split(" ", 2)
        answer = self._answers.pop(int(key), None)
        if answer and not answer.done():
            answer.set_exception(SandboxError(text)) if text else answer.set_result(int(status))

    def _fail(self) -> None:
        self.closed = True
        self._loop.remove_reader(self._link)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxError("the sandbox's keeper is gone"))
        self._answers.clear()

    async def close(self) -> None:
        """Close the boxes, and end the keeper: the kernel ends every process and mount in it."""
        try:
            await asyncio.gather(*(box.close() for box in tuple(self.boxes)))
        finally:
            self._fail()
            self._link.close()  # the keeper ends
            await _end(self._process)


class Request:
    """What was asked of a keeper: `answer` is the status, of a process its exit status."""

    def __init__(self, namespace: Namespace, key: int, answer: asyncio.Future[int]) -> None:
        self._namespace, self._key, self.answer = namespace, key, answer
        self.killed = False

    def kill(self) -> None:
        """SIGKILL the process, without waiting; when `answer` is there, everything that ran in it is gone."""
        self.killed = True
        if not self.answer.done():
            self._namespace.kill(self._key)

    async def done(self, seconds: float = START) -> int:
        """The answer. Raises SandboxError if the keeper could not do it, is gone, or takes longer."""
        await asyncio.wait({self.answer}, timeout=seconds)
        if not self.answer.done():
            raise SandboxError(f"the sandbox's keeper did not answer within {seconds:g} s")
        return self.answer.result()


def encode(fields: Sequence[str]) -> bytes:
    """Fields as keeper.py and guest.py read them. Raises ValueError for text that no program can be given."""
    if any("\0" in field for field in fields):
        raise ValueError("text holds a NUL byte")
    return "".join(f"{field}\0" for field in fields).encode(errors="surrogateescape")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a keeper whose socket is closed."""
    try:
        await asyncio.wait_for(process.wait(), START)
    finally:
        if process.returncode is None:
            process.kill()


def read_all(descriptor: int) -> str:
    """The text in a memory file that a process had as its stderr."""
    return os.pread(descriptor, 4096, 0).decode(errors="replace")


def explain(stderr: str) -> str:
    """One line: what is wrong with this host, and what to do about it, where bubblewrap failed with this message."""
    stderr = " ".join(stderr.split())
    for setting, bad, good in SETTINGS:
        path = Path("/proc/sys", setting.replace(".", "/"))
        if path.exists() and path.read_text().strip() == bad:
            cause, remedy = f"{setting} is {bad} on this host", f"`sudo sysctl -w {setting}={good}`"
            break
    else:
        if "namespace" in stderr or "Operation not permitted" in stderr:
            cause = "this process may not make user namespaces, as in a container with the default seccomp profile"
            remedy = "start the container with `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`"
        else:
            cause, remedy = "bubblewrap fails", "change what its message names"
    return f"the embedded sandbox cannot start: {cause}; {remedy}, or use the Docker backend (message: {stderr or 'none'})"


def _unprivileged() -> dict[str, Any]:
    """How to start a process as nobody if we are root: the kernel does not apply limits on processes to the real root."""
    if os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}
