"""Process 1 of a box: runs commands one at a time, Python programs in a fork of itself so that no interpreter start is paid.

It runs inside the box as the same user as the commands, and still they cannot kill, stop or trace it, nor reach its socket: signals from
inside a process namespace do not reach its process 1, and the kernel lets nobody open a process marked non-dumpable. As process 1 it also
reaps orphans. `_signal` and `_socket` stand in for `signal` and `socket`, whose imports cost 4 and 8 ms at every start of a box.

Started as `python3 -s -S -P guest.pyc serve|once` with a SOCK_SEQPACKET socket at descriptor 3; says b"0" when ready. Messages in:
    b"run" with three descriptors: the request, the pipe for output, the standard input -> b"<exit code>", -n for signal n
    b"stop", b"cont": signal every process but this one -> b"0"
The request is a file of fields that end in NUL: memory, processes, number of arguments, the arguments, then KEY=VALUE pairs.
`once` runs one command and exits with its status (128+n for signal n), so that the status comes from the kernel, not in a message.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import builtins
import ctypes
import gc
import os
import resource
import site
import sys
from io import TextIOWrapper
from types import ModuleType, TracebackType

PR_SET_DUMPABLE = 4
PYTHON = ("python3", "python", sys.executable)
FLAGS = set("IESsPBu")
prctl = ctypes.CDLL(None).prctl


def set_dumpable(value: int) -> None:
    """Whether processes of the same user may look into this one."""
    prctl(PR_SET_DUMPABLE, value, 0, 0, 0)


def receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    """The next message and the descriptors that came with it; b"" when the host has hung up."""
    message, ancillary, _, _ = control.recvmsg(64, _socket.CMSG_SPACE(3 * 4), _socket.MSG_CMSG_CLOEXEC)
    data = b"".join(payload for _, _, payload in ancillary)
    return message, [int.from_bytes(data[i : i + 4], sys.byteorder) for i in range(0, len(data), 4)]


def signal_all(number: int) -> None:
    """Signal every process of the box but this one."""
    try:  # noqa: SIM105 - contextlib would be one more import to pay
        os.kill(-1, number)
    except ProcessLookupError:  # there is none
        pass


def reap_zombies() -> None:
    """Orphans that ended between two commands."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def wait_for(child: int) -> int:
    """The exit code of a child, -n for signal n; orphans that end meanwhile are reaped too."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def serve(control: _socket.socket, once: bool) -> list[int]:
    """Answer messages until the host hangs up. Returns only in the process of a command: its three descriptors."""
    control.send(b"0")
    while True:
        message, descriptors = receive(control)
        reap_zombies()
        if message == b"run":
            child = os.fork()
            if child == 0:
                return descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            code = wait_for(child)
            if once:
                os._exit(code if code >= 0 else 128 - code)
            control.send(b"%d" % code)
        elif message in (b"stop", b"cont"):
            signal_all(_signal.SIGSTOP if message == b"stop" else _signal.SIGCONT)
            control.send(b"0")
        else:
            os._exit(0)


def enter(request: int, output: int, stdin: int) -> tuple[list[str], dict[str, str]]:
    """Make this the process of a command, all but running it: its arguments and the environment variables given with it."""
    os.setsid()
    for source, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(output)
    with open(request, "rb") as file:
        memory, processes, count, *fields = os.fsdecode(file.read()).split("\0")[:-1]
    limits = {resource.RLIMIT_AS: int(memory), resource.RLIMIT_NPROC: int(processes) + 1, resource.RLIMIT_CORE: 0}  # 1: process 1
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    env = dict(field.split("=", 1) for field in fields[int(count) :])
    os.environ.update(env)
    return fields[: int(count)], env


def replace_process(argv: list[str]) -> None:
    """Run any program; does not return."""
    for number in (_signal.SIGINT, _signal.SIGPIPE, _signal.SIGXFSZ):  # Python's own settings would be inherited
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, os.fsencode(f"{argv[0]}: {error.strerror}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def reopen_streams(unbuffered: bool) -> None:
    """The interpreter's streams were made for other files; what they remember (can it seek?) is stale."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        file = open(fd, f"{mode}b", 0 if unbuffered and fd else -1, closefd=False)  # noqa: SIM115 - the streams of the process
        errors, lines = getattr(sys, name).errors, fd == 2 and not unbuffered
        stream = TextIOWrapper(file, "utf-8", errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def python_program(argv: list[str], env: dict[str, str]) -> tuple[str | bytes, str] | None:
    """Source and file name of what `python3 ...` would run, with `sys` set up for it; None where a real start is needed.

    Two differences to a real start remain: `sys.flags` are those of this interpreter (-s -S -P), and the traceback of a `-c` program
    has no source lines, which Python 3.13 shows.
    """
    if argv[0] not in PYTHON or any(name.startswith("PYTHON") for name in env):
        return None
    rest, flags = argv[1:], set()
    while rest and rest[0] != "-" and rest[0][:1] == "-" and set(rest[0][1:]) <= FLAGS:
        flags.update(rest.pop(0)[1:])
    if not rest:
        return None
    reopen_streams("u" in flags)
    first, folder = rest[0], ""
    if first == "-c" and len(rest) > 1:
        source, name = rest.pop(1), "<string>"
    elif first == "-":
        source, name = sys.stdin.buffer.read(), "<stdin>"
    elif first.endswith(".py") and os.path.isfile(first):
        try:
            with open(first, "rb") as file:
                source = file.read()
        except OSError:
            return None
        name, folder = os.path.join(os.getcwd(), first), os.path.dirname(os.path.realpath(first))
    else:
        return None
    sys.argv = rest
    if "S" not in flags:
        site.addsitepackages(set())
    if not flags & set("IP"):
        sys.path.insert(0, folder)
    return source, name


def main_module(name: str) -> ModuleType:
    """A fresh `__main__` for a program from file `name`."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if name != "<string>":
        module.__file__ = name
    return module


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback that begins where the program does."""
    inner = trace and trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(inner), inner)


if __name__ == "__main__":
    set_dumpable(0)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # a handler is the one way a signal from inside reaches process 1
    site.setquit()
    site.sethelper()
    compile("", "", "exec")  # the first call makes the types of syntax trees: 1.5 ms that no command has to pay
    gc.freeze()  # what a command shares with this process need not be walked, and so copied, when it collects
    socket = _socket.socket(fileno=3)
    socket_descriptors = serve(socket, once=sys.argv[1] == "once")

    # Only the process of a command gets here. The program runs at this level so that exit codes, exit handlers and threads
    # are left to the interpreter itself.
    socket.close()
    arguments, variables = enter(*socket_descriptors)
    set_dumpable(1)
    program = python_program(arguments, variables)
    if program is None:
        replace_process(arguments)
    else:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        sys.modules["__main__"] = main_module(program[1])
        sys.excepthook = show_error
        exec(compile(*program, "exec", dont_inherit=True), sys.modules["__main__"].__dict__)  # noqa: S102 - what a box is for
