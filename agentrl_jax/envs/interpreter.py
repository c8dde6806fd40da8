"""What runs inside the box for a notebook: `python3 -I -c <the text of this file> run|state`, one process a call; a cell is its stdin.

It hands the cell, and its own output to write to, to the interpreter: a process that an earlier call left running, or that it starts now.
When the cell is done it writes a NUL and the report: "<ended> <new> <state>".
    ended: ok | error (an exception) | exit (the interpreter is gone)
    new:   1 where an interpreter with variables was there before, and is no more; else 0
    state: key of the files in the box and of the cells that this interpreter ran, but those that only look at something
Nothing here is proof against the cells, which have the rights of this process. They can lie to the policy that wrote them, to no one else.

The socket's name is of the box's network namespace: no file of it can be copied to a fork, where no interpreter would listen.
`_socket` and `_blake2` stand in for `socket` and `hashlib`, whose imports would double the time of a call.
"""
# ruff: noqa: ANN001, ANN201
# pyright: reportMissingParameterType=false

import _blake2
import _socket
import builtins
import contextlib
import os
import stat
import sys

NAME = "\0notebook"
CELLS = "/tmp/.cells"  # the key of the cells that the running interpreter has run; empty if it has gone and the policy was told
HASHED = 32 << 20  # bytes of files that the key covers; of the rest, names and sizes
LOOKING = {"abs", "dir", "isinstance", "len", "print", "repr", "round", "type"}
METHODS = {"describe", "head", "keys", "nunique", "tail", "value_counts"}


def digest(*parts: bytes) -> str:
    """16 hex digits."""
    return _blake2.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def only_looks(tree) -> bool:
    """Whether a cell can change nothing: it prints names, parts of them and what a few harmless calls give."""
    import ast

    plain = (ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr)
    parts = (ast.Module, ast.Expr, ast.Load, ast.FormattedValue, ast.operator, ast.unaryop, ast.cmpop)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            method = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if not (name in LOOKING or method in METHODS):
                return False
        elif not isinstance(node, (*plain, *parts)):
            return False
    return True


def explain(error) -> str:
    """An exception in one line, with the line of the cell."""
    kind, line, trace = type(error).__name__, getattr(error, "lineno", None), error.__traceback__
    while trace is not None and not isinstance(error, SyntaxError):
        if trace.tb_frame.f_code.co_filename == "<cell>":
            line = trace.tb_lineno
            break
        trace = trace.tb_next
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException:  # noqa: BLE001 - the cell's own class
        text = ""
    return f"{f'line {line}: ' if line else ''}{kind}{': ' if text else ''}{text}"


def say(text: str) -> None:
    """Write a line where the cell writes, whatever it did to its streams."""
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    with contextlib.suppress(OSError), open(1, "wb", closefd=False) as file:
        file.write(f"{text}\n".encode(errors="backslashreplace"))


def run(source: str, names: dict[str, object]) -> tuple[str, str]:
    """Run a cell: how it ended, and its text if it may have changed something."""
    import ast

    told = ""
    try:
        tree = ast.parse(source, "<cell>")
        told = "" if only_looks(tree) else ast.unparse(tree)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, "<cell>", "exec"), names)  # noqa: S102 - what a box is for
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)  # noqa: S307
            if value is not None:
                say(repr(value))
    except BaseException as error:  # noqa: BLE001 - exit() and Ctrl-C end the cell, not the interpreter
        say(explain(error))
        return "error", told
    return "ok", told


def serve(listener) -> None:
    """Be the interpreter: run one cell after another, until something in a cell ends this process."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = builtins
    sys.path.insert(0, "/workspace")
    me = os.getpid()
    while True:
        for target in (0, 1, 2):
            os.dup2(null, target)
        link = _socket.socket(fileno=listener._accept()[0])
        message, ancillary, _, _ = link.recvmsg(16, _socket.CMSG_SPACE(2 * 4))
        fds = [int.from_bytes(data[i : i + 4], sys.byteorder) for _, _, data in ancillary for i in range(0, len(data), 4)]
        if message == b"run" and len(fds) == 2:
            with open(fds[0], encoding="utf-8", errors="replace") as file:
                source = file.read()
            for target in (1, 2):
                os.dup2(fds[1], target)
            os.close(fds[1])
            # New ones for each cell: the last one may have closed or replaced them.
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the streams of the process
            sys.stdout = sys.stderr = open(1, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
            ended, told = run(source, main.__dict__)
            if os.getpid() != me:  # a fork that the cell made and did not end
                os._exit(0)
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            link.send(f"{ended} {digest(told.encode()) if told else ''}".encode())
        link.close()


def interpreter(start: bool):
    """(a connection to the interpreter, whether it is another one than before); no connection where none runs and none is to start."""
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        link.connect(NAME)
    except OSError:
        if not start:
            return None, False
        lost = bool(cells())
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        listener.bind(NAME)
        listener.listen(1)
        if os.fork() == 0:
            try:
                serve(listener)
            finally:
                os._exit(1)
        listener.close()
        link.connect(NAME)
        remember(digest())
        return link, lost
    return link, False


def cells() -> str:
    """What CELLS holds."""
    with contextlib.suppress(OSError), open(os.open(CELLS, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        return file.read(16).decode(errors="replace")
    return ""


def remember(key: str) -> None:
    """Write CELLS. On a full disk it stays what it was: the key is of use to the trainer, not to the policy."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
    with contextlib.suppress(OSError), open(os.open(CELLS, flags, 0o600), "wb") as file:
        file.truncate(len(key))
        file.write(key.encode())


def files() -> bytes:
    """Hash of the names and contents below /workspace."""
    total, left, folders = _blake2.blake2b(digest_size=8), HASHED, ["/workspace"]
    while folders:
        try:
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path = os.fsencode(entry.path)
            facts = entry.stat(follow_symlinks=False)
            total.update(b"%b\0%d\0%d\0" % (path, stat.S_IFMT(facts.st_mode), facts.st_size * stat.S_ISREG(facts.st_mode)))
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.is_symlink():
                total.update(os.readlink(path))
            elif stat.S_ISREG(facts.st_mode):
                with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                    content = file.read(left)
                    left -= len(content)
                    total.update(content)
    return total.digest()


def main() -> None:
    """One call."""
    link, lost = interpreter(start=sys.argv[1] == "run")
    ended = b"ok"
    if link is not None and sys.argv[1] == "run":
        descriptors = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1))
        with contextlib.suppress(OSError):
            link.sendmsg([b"run"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
        try:
            ended, _, told = link.recv(64).partition(b" ")
        except OSError:
            ended, told = b"", b""
        if not ended:
            ended = b"exit"
            remember("")
        elif told:
            remember(digest(cells().encode(), told))
    key = cells() if link is not None and ended != b"exit" else ""
    state = digest((key if key != digest() else "").encode(), files())
    os.write(1, b"\0%b %d %b" % (ended, lost, state.encode()))
    os._exit(0)


if __name__ == "__main__":
    main()
