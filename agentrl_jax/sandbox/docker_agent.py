"""The root process of a container: runs commands one at a time as user 1000, and reads and writes that user's files itself.

No command can kill, stop, trace or impersonate it, as it belongs to another user. To limit, to clean up and to move files it needs neither
a new process nor a new thread, so a box whose processes fill its limit can still be used. Of root's rights it has those to change its user
(CAP_SETUID, CAP_SETGID) and to signal others (CAP_KILL); a last one (CAP_SETPCAP) serves, at the start, to bar commands from all of them.

It is sent as source through its own standard input (docker_link.py): any image with Python >= 3.11 will do. Then, on stdin and stdout:
    frame:    4 bytes of length, big-endian, and as many bytes
    request:  a frame of JSON, frames of data up to an empty one
    answer:   frames of data up to an empty one, a frame of JSON
While a command runs, an empty frame has it and everything else in the box killed; between requests it came too late. Requests, by "do":
    run      argv, env, seconds, keep, most, memory, alone (whether all that it started ends with it); data: standard input
             -> its output; code, dropped, cause, oom, seconds
    unpack   data: a tar -> error
    pack     still, longest -> a tar
    read     path, limit -> the file; found
    stop, cont
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import stat
import time
from collections.abc import Iterator
from ctypes import CDLL
from typing import Any

from agentrl_jax.sandbox.docker_files import CHUNK, Pieces, pack, unpack

USER = 1000
QUIET = 0.2  # seconds without output after which a background process that holds the pipe is not waited for
STOPPING = 5.0  # seconds
PR_CAPBSET_DROP = 24
ENVIRONMENT = dict(os.environ)  # the image's own
OOM_COUNTERS = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")  # cgroup v1, v2


def receive() -> bytes:
    """The next frame; ends this process when the host has hung up."""
    frame = bytearray()
    size = 4
    for reading in ("length", "content"):
        while len(frame) < size:
            chunk = os.read(0, size - len(frame))
            if not chunk:
                os._exit(0)
            frame += chunk
        if reading == "length":
            size = int.from_bytes(frame, "big")
            frame.clear()
    return bytes(frame)


def send(*frames: bytes) -> None:
    """Frames, at once."""
    rest = memoryview(b"".join(part for frame in frames for part in (len(frame).to_bytes(4, "big"), frame)))
    while rest:
        rest = rest[os.write(1, rest) :]


def received() -> Iterator[bytes]:
    """The data of a request."""
    while frame := receive():
        yield frame


class Sent:
    """A file whose content is sent."""

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), CHUNK):
            send(data[start : start + CHUNK])
        return len(data)


# Processes


def signal_all(number: int) -> bool:
    """Signal every process but this one and init; whether there was one."""
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        return False
    return True


def stop_all() -> None:
    """And wait for it: a signal is delivered when a process leaves the kernel, and files would change under whoever reads them."""
    deadline = time.monotonic() + STOPPING
    while signal_all(signal.SIGSTOP) and time.monotonic() < deadline:
        tasks = [f"/proc/{process}/task" for process in os.listdir("/proc") if process.isdigit() and int(process) not in (1, os.getpid())]
        states = set()
        for task in tasks:
            with contextlib.suppress(OSError):
                for thread in os.listdir(task):
                    with open(f"{task}/{thread}/stat", "rb") as file:
                        states.add(file.read().rpartition(b") ")[2][:1])
        if states <= {b"T", b"t", b"Z", b"X"}:
            return
        time.sleep(0.001)


def kill_all() -> None:
    """Until none is left: init has to reap them."""
    while signal_all(signal.SIGKILL):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.001)


def memory_kills() -> int:
    """How often the kernel ended a process of this container for want of memory."""
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError), open(path) as file:
            counters = dict(line.split() for line in file)
            return int(counters.get("oom_kill", 0))
    return 0


def become(request: dict[str, Any], stdin: int, output: int) -> None:
    """Turn this new process into the command; does not return."""
    try:
        for source, target in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        with contextlib.suppress(OSError):
            os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"1000")  # before this container's root process
        os.setsid()
        os.setgid(USER)
        os.setuid(USER)
        os.chdir("/workspace")
        for limit, value in ((resource.RLIMIT_AS, request["memory"]), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(limit, (value, value))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own settings would be inherited
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], ENVIRONMENT | request["env"])
    except OSError as error:
        os.write(2, os.fsencode(f"{request['argv'][0]}: {error.strerror}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(126)


class Output:
    """What a command says: the head and the tail are kept, the middle is counted."""

    def __init__(self, keep: int) -> None:
        self._half = max(keep // 2, 1)
        self._head, self._tail, self.total = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:] if room > 0 else chunk
        if len(self._tail) > self._half + CHUNK:
            del self._tail[: -self._half]

    def send(self) -> int:
        """The number of bytes left out."""
        kept = bytes(self._head + self._tail[-self._half :])
        Sent().write(kept)
        return self.total - len(kept)


def watch(child: int, pipe: int, output: Output, seconds: float, most: int) -> tuple[int | None, str]:
    """Read a command's output until it has ended: its exit status, None if something else came first; and what ended it."""
    poll, process = select.poll(), os.pidfd_open(child)
    for descriptor in (0, pipe, process):
        poll.register(descriptor, select.POLLIN)
    limit = deadline = time.monotonic() + seconds
    code, open_pipe = None, True
    try:
        while code is None or open_pipe:
            events = poll.poll(max(deadline - time.monotonic(), 0) * 1e3)
            if not events:
                return code, "time" if code is None else "exit"
            for descriptor, _ in events:
                if descriptor == pipe:
                    chunk = os.read(pipe, CHUNK)
                    output.add(chunk)
                    if output.total > most:
                        return None, "output"
                    if not chunk:
                        poll.unregister(pipe)
                        open_pipe = False
                elif descriptor == process:
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    poll.unregister(process)
                    limit = max(limit, time.monotonic() + QUIET)
                elif receive() == b"":
                    return None, "host"
            if code is not None:
                deadline = min(time.monotonic() + QUIET, limit)
        return code, "exit"
    finally:
        os.close(process)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command to its end or a limit, and send its output."""
    began, kills = time.monotonic(), memory_kills()
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(stdin, "wb", closefd=False) as file:
        file.writelines(received())
    os.lseek(stdin, 0, os.SEEK_SET)
    fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    pipe, write_end = os.pipe()
    output = Output(request["keep"])
    code, cause = 126, "exit"
    try:
        child = os.fork()
    except OSError as error:  # the box's processes are at their limit
        child = None
        output.add(os.fsencode(f"{request['argv'][0]}: {error.strerror}\n"))
    if child == 0:
        become(request, stdin, write_end)
    os.close(stdin)
    os.close(write_end)
    if child:
        code, cause = watch(child, pipe, output, request["seconds"], request["most"])
        if cause != "exit" or request["alone"]:
            kill_all()
    os.close(pipe)
    oom = memory_kills() > kills
    return {"code": code, "cause": cause, "oom": oom, "seconds": time.monotonic() - began, "dropped": output.send()}


# Files


@contextlib.contextmanager
def user() -> Iterator[None]:
    """Meanwhile this process has the rights of the commands' user, who still can neither signal nor trace it: its real user is root."""
    os.setegid(USER)
    os.seteuid(USER)
    try:
        os.chmod("/workspace", 0o755)  # a command may have locked everybody out, which must not look like a broken sandbox
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def read(path: str, limit: int) -> dict[str, Any]:
    """Send a regular file that is not larger than the limit."""
    try:
        with open(os.open(os.path.join("/workspace", path), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            content = file.read(limit + 1) if stat.S_ISREG(facts.st_mode) and facts.st_size <= limit else None
    except OSError:
        content = None
    if content is None or len(content) > limit:
        return {"found": False}
    Sent().write(content)
    return {"found": True}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request says."""
    match request["do"]:
        case "run":
            with user():
                pass
            return run(request)
        case "unpack":
            data = received()
            with user():
                error = unpack(Pieces(data))
            for _ in data:  # what was left unread
                pass
            return {"error": error}
    for _ in received():
        pass
    match request["do"]:
        case "read":
            with user():
                return read(request["path"], request["limit"])
        case "pack":
            if not request["still"]:
                stop_all()
            try:
                with user():
                    pack(Sent(), request["longest"])
            finally:
                if not request["still"]:
                    signal_all(signal.SIGCONT)
        case "stop":
            stop_all()
        case "cont":
            signal_all(signal.SIGCONT)
    return {}


def main() -> None:
    """Serve until the host hangs up."""
    os.setgroups([])
    prctl = CDLL(None).prctl
    for capability in range(64):
        prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    answer: dict[str, Any] = {}  # the first one says that it is ready
    while True:
        send(b"", json.dumps(answer).encode())
        while not (frame := receive()):  # to end a command that has ended
            pass
        answer = handle(json.loads(frame))


if __name__ == "__main__":
    main()
