"""What runs inside the box when a repository is scored: `python3 -c <the text of this file>`, one command a process.

stdin is one Python literal: (command, arguments...). It knows what was handed out and which tests must pass; what is expected of the code
is known to the host alone (`values`), or to test files (`tests`). Its memory and descriptors are closed to the code under test, which runs
as the same user: it marks itself as not dumpable, and the kernel then lets nobody read or trace it.
"""
# ruff: noqa: ANN001, ANN201
# pyright: reportMissingParameterType=false, reportCallIssue=false, reportArgumentType=false

import os
import stat
import sys

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
LONGEST = 40_000  # characters of all paths reported
TOO_LARGE = 1 << 20  # bytes of a source file


def allow(folder) -> None:
    """Let its owner use a folder; one that is not ours stays as it is."""
    try:  # noqa: SIM105 - contextlib would be one more import to pay
        os.chmod(folder, 0o755)
    except OSError:
        pass


def tree(top="."):
    """(path, mode) of all that is no folder, .git left out, links not followed. Folders are opened up to their owner."""
    folders = [top]
    while folders:
        folder = folders.pop()
        allow(folder)
        try:
            names = os.listdir(folder)
        except OSError:  # too deep for any path
            continue
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                continue
            if not stat.S_ISDIR(mode):
                yield os.path.relpath(path, top), mode
            elif path != os.path.join(top, ".git"):
                folders.append(path)


def read(path, limit=64 << 20):
    """Content of a regular file that is no link, nor beyond one; None where there is none, or it is too large."""
    if os.path.realpath(path) != os.path.abspath(path):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(facts.st_mode) and facts.st_size <= limit else None
    except OSError:
        return None


def survey(handed_out):
    """(path, what): how the work tree differs from `handed_out`, path -> digest. The new files come last and may be cut short.

    what: "missing" | "changed" | "replaced" by something that is no file | "new" | "strange": new, and no file
    """
    from _blake2 import blake2b  # `hashlib` would load OpenSSL

    present = dict(tree())
    found = []
    for path, digest in handed_out.items():
        if path not in present:
            found.append((path, "missing"))
        elif not stat.S_ISREG(present[path]):
            found.append((path, "replaced"))
        elif blake2b(read(path) or b"", digest_size=16).hexdigest() != digest:
            found.append((path, "changed"))
    new = [(path, "new" if stat.S_ISREG(mode) else "strange") for path, mode in present.items() if path not in handed_out]
    reported, length = [], 0
    for entry in found + sorted(new, key=lambda entry: (entry[1] == "new", entry[0])):
        length += len(ascii(entry)) + 2
        if length > LONGEST:
            break
        reported.append(entry)
    return reported


def clear(folder):
    """Remove all that is in a folder, however deep. Folders are moved up to it first, so that their paths stay short."""
    left, moved = [folder], 0
    while left:
        inside = left.pop()
        allow(inside)
        for name in os.listdir(inside):
            path = os.path.join(inside, name)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                allow(path)
                moved += 1
                target = os.path.join(folder, f".removed-{os.getpid()}-{moved}")
                os.rename(path, target)
                left.append(target)
            else:
                os.unlink(path)
        if inside != folder:
            os.rmdir(inside)


def put(path, data):
    """Write a file, whatever is in its way."""
    parts = path.split("/")
    for i in range(1, len(parts) + 1):
        step, last = "/".join(parts[:i]), i == len(parts)
        if os.path.lexists(step) and (os.path.islink(step) or os.path.isdir(step) == last):
            if os.path.isdir(step) and not os.path.islink(step):
                clear(step)
                os.rmdir(step)
            else:
                os.unlink(step)
        if not last:
            os.makedirs(step, exist_ok=True)
            allow(step)
        elif os.path.lexists(step):
            os.unlink(step)
    with open(path, "xb") as file:
        file.write(data)


def sweep(files, handed_out, keep):
    """Put `files` into the work tree. `keep`: the new files that stay; None for all of them, for links, history and /tmp."""
    if keep is not None:
        for path, mode in list(tree()):
            if not stat.S_ISREG(mode) or (path not in handed_out and path not in keep):
                os.unlink(path)
        for folder in (".git", "/tmp"):
            if os.path.isdir(folder) and not os.path.islink(folder):
                clear(folder)
            elif os.path.lexists(folder):
                os.unlink(folder)
    for path, data in files.items():
        put(path, data)


class Sources:
    """Imports from memory: `sources` is module name -> (text, whether it is a package)."""

    def __init__(self, sources) -> None:
        self.sources = sources

    def find_spec(self, name, path=None, target=None):
        if name not in self.sources:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, origin=name, is_package=self.sources[name][1])

    def create_module(self, spec) -> None:
        """The usual kind."""

    def exec_module(self, module) -> None:
        exec(compile(self.sources[module.__name__][0], module.__name__, "exec"), module.__dict__)  # noqa: S102


def sources(package, texts):
    """`Sources` of a package: of path -> text, or of the work tree's files below it where that is None."""
    if texts is None:
        paths = [path for path, _ in tree() if path.startswith(f"{package}/") and path.endswith(".py")]
        texts = {path: (read(path, TOO_LARGE) or b"").decode("utf-8", "replace") for path in paths}
    names = {path: path.removesuffix(".py").replace("/", ".") for path in texts}
    return Sources({name.removesuffix(".__init__"): (texts[path], name.endswith(".__init__")) for path, name in names.items()})


def values(out, handed_out, package, texts, calls, inbox, seconds):
    """Write a line of `survey`, before any other code can; then a line per call of what it does, and `end`.

    texts: path -> text of the package; None for the files below it in the work tree; "import" for whatever Python imports from there
    calls: (module, function, source text of the arguments); what is expected is not here
    inbox: source text of `agentrl_jax.envs.inbox`, which says how results are written
    """
    print(ascii(survey(handed_out)), file=out, flush=True)
    grader = {"__name__": "inbox"}
    exec(inbox, grader)  # noqa: S102
    if texts == "import":
        sys.path.insert(0, os.getcwd())
    else:
        sys.meta_path.insert(0, sources(package, texts))
    if texts is None:  # nothing that a solution is made of may come from elsewhere
        clear(".")
        clear("/tmp")
    grader["limit"](seconds)
    for name, function, arguments in calls:
        try:
            module = __import__(name, fromlist=[function])
            called = getattr(module, function, None)
        except BaseException as error:  # noqa: BLE001 - exit() in a module too
            print(f"!import: {type(error).__name__[:40]}", file=out)
            continue
        print(grader["outcome"](called, eval(arguments)), file=out)  # noqa: S307
    print("end", file=out, flush=True)


def tests(out, nonce, required, protected, options, runner):
    """Run test files, each in a process of its own, and write a line: nonce, a 1 or 0 for each required test, what went wrong.

    required:  test file -> ids of its tests that must pass
    protected: path -> bytes that these files have and must still have when the tests are over
    options:   of pytest
    runner:    source text of the process that runs the tests of a file
    """
    from ast import literal_eval

    passed, wrong = [], set()
    for path, ids in required.items():
        token = os.urandom(16).hex()
        results = {}
        for line in run(runner, ascii((path, options, token)).encode()).splitlines():
            if not line.startswith(token):
                wrong.add("report")  # something wrote to descriptors that it had not opened
                continue
            name, outcome = literal_eval(line.removeprefix(token))
            if name is None:
                wrong.add(outcome)
            else:
                results[name] = outcome if results.get(name, outcome) == outcome else "failed"
        passed += [results.get(name) == "passed" for name in ids]
        for name, data in protected.items():
            if read(name) != data:
                wrong.add(name)
                put(name, data)
    print(nonce, "".join("01"[p] for p in passed), ascii(sorted(wrong)[:100]), file=out, flush=True)


def run(runner, job):
    """Run a Python program in a process with a home of its own; what it wrote to descriptor 3 before it and all it started were ended.

    That is a socket: unlike a pipe or a file, nobody can open it again and read what was written.
    """
    import socket
    import threading

    home = f"/tmp/home-{os.urandom(8).hex()}"
    os.mkdir(home)
    env = {"PATH": os.environ.get("PATH", "/usr/bin"), "HOME": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ours, theirs = socket.socketpair()
    source = os.memfd_create("job")
    os.write(source, job)
    os.lseek(source, 0, os.SEEK_SET)
    null = os.open(os.devnull, os.O_WRONLY)
    streams = [(os.POSIX_SPAWN_DUP2, old, new) for old, new in ((source, 0), (null, 1), (null, 2), (theirs.fileno(), 3))]
    command = [sys.executable, "-s", "-P", "-B", "-c", runner]
    child = os.posix_spawn(sys.executable, command, env, file_actions=streams, setsid=True)
    theirs.close()
    os.close(source)
    os.close(null)
    parts = []

    def receive() -> None:
        while part := ours.recv(1 << 16):
            if len(parts) < 1000:
                parts.append(part)

    receiver = threading.Thread(target=receive)
    receiver.start()
    os.waitpid(child, 0)
    end_children()
    receiver.join()
    return b"".join(parts).decode("utf-8", "replace")


def end_children() -> None:
    """Kill what the tests left running: this process adopts the orphans among its descendants."""
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(name), 9)
            except OSError:  # it ended meanwhile
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> None:
    """One command."""
    import ctypes

    if os.getcwd() != "/workspace":
        sys.exit("this removes files and kills processes: it runs in a box only")
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # What the code under test prints is dropped, so that it cannot get between the lines of the report.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    null = os.open(os.devnull, os.O_RDWR)
    command, *arguments = eval(sys.stdin.read())  # noqa: S307
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if command == "survey":
        print(ascii(survey(*arguments)), file=out)
    elif command == "sweep":
        sweep(*arguments)
        print("end", file=out)
    else:
        {"values": values, "tests": tests}[command](out, *arguments)
    out.flush()
    os._exit(0)  # no exit handlers, no waiting for threads that the code under test left


if __name__ == "__main__":
    main()
