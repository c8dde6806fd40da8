"""Instance files in the format of SWE-bench: an issue, the repository it was raised in, and the tests of its fix. Read offline.

A file holds JSON objects, one a line or in a list, with the fields of https://www.swebench.com/SWE-bench/guides/datasets/. `repo` is a
folder beside the file: a git repository, of which `base_commit` is taken, or with an empty `base_commit` a folder taken as it is. `git`
is needed on the host. Links and submodules are refused; files lose their executable bit.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

LARGEST = 256 << 20  # bytes of a work tree
TEXTS = ("instance_id", "repo", "base_commit", "problem_statement", "test_patch", "patch")
TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
UNUSED = ("version", "hints_text", "created_at", "environment_setup_commit", "difficulty")
NAMED = re.compile(rb"^(?:--- a/|\+\+\+ b/|rename from |rename to |copy from |copy to )([^\n\t\r]+)", re.MULTILINE)


class _FieldError(ValueError):
    """What is wrong with a field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


@dataclass(frozen=True)
class Instance:
    """One issue. Files are path -> bytes.

    base:     work tree before the fix
    tests:    files that the test patch makes or changes, as it leaves them
    gold:     files that the gold patch makes, changes or (None) removes
    required: ids of the tests that must pass, FAIL_TO_PASS first
    broken:   how many of these are FAIL_TO_PASS
    """

    id: str
    statement: str
    base: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    gold: Mapping[str, bytes | None]
    required: tuple[str, ...]
    broken: int


def load(path: str | os.PathLike[str]) -> tuple[tuple[Instance, ...], tuple[str, ...]]:
    """(instances, errors): one error for each that cannot be used, naming file, line, instance and field."""
    path = Path(path)
    found: dict[str, Instance] = {}
    errors: list[str] = []
    try:
        data = path.read_bytes()
    except OSError as error:
        return (), (f"{path}: cannot be read: {error.strerror}",)
    for line, record in _records(data):
        name = record.get("instance_id") if isinstance(record, dict) else None
        where = f"{path}:{line}: " + (f"{name}: " if isinstance(name, str) and name else "")
        try:
            if isinstance(record, ValueError):
                raise record
            instance = _instance(record, path.parent)
            if instance.id in found:
                raise _FieldError("instance_id", "another instance has it")
            found[instance.id] = instance
        except ValueError as error:
            errors.append(f"{where}{error}")
    return tuple(found.values()), tuple(errors)


def _records(data: bytes) -> Iterator[tuple[int, Any]]:
    """(line, record or what is wrong with it)."""
    if not data.lstrip().startswith(b"["):
        for line, part in enumerate(data.split(b"\n"), 1):
            if part.strip():
                yield line, _parsed(part)
        return
    records = _parsed(data)
    if isinstance(records, ValueError):
        yield getattr(records, "lineno", 1), records
        return
    text, decoder, position = data.decode(), json.JSONDecoder(), data.decode().index("[") + 1
    for record in records:
        position = re.compile(r"[\s,]*").match(text, position).end()  # type: ignore[union-attr] - it matches nothing as well
        yield text.count("\n", 0, position) + 1, record
        position = decoder.raw_decode(text, position)[1]


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: byte {data[error.start]:#x} at {error.start}")
    except (json.JSONDecodeError, RecursionError) as error:
        return error if isinstance(error, ValueError) else ValueError("nested too deeply")


def _instance(record: Any, folder: Path) -> Instance:
    """Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"an instance is an object, not {type(record).__name__}")  # noqa: TRY004 - data, not an argument
    known = (*TEXTS, *TESTS)
    if missing := [key for key in known if key not in record]:
        raise _FieldError(missing[0], "missing")
    if unknown := [key for key in record if key not in (*known, *UNUSED)]:
        raise _FieldError(unknown[0][:80], f"unknown; the fields are {', '.join((*known, *UNUSED))}")
    for key in TEXTS:
        if not isinstance(record[key], str):
            raise _FieldError(key, f"must be a string, got {type(record[key]).__name__}")
    for key in ("instance_id", "repo", "problem_statement"):
        if not record[key].strip():
            raise _FieldError(key, "empty")
    required = {key: _ids(key, record[key]) for key in TESTS}
    if not required["FAIL_TO_PASS"]:
        raise _FieldError("FAIL_TO_PASS", "empty: no test would tell a fix from nothing")
    base = _base(folder, record["repo"], record["base_commit"])
    tests = {path: data for path, data in _patched("test_patch", base, record["test_patch"]).items() if data is not None}
    gold = _patched("patch", base, record["patch"])
    for path, data in gold.items():
        try:
            (data or b"").decode()
        except UnicodeDecodeError:
            raise _FieldError("patch", f"{path} is no text") from None
    for key, ids in required.items():
        if absent := [test for test in ids if test.partition("::")[0] not in {**base, **tests}]:
            raise _FieldError(key, f"{absent[0]!r}: no such file in the repository or the test patch")
    ids = tuple(dict.fromkeys(required["FAIL_TO_PASS"] + required["PASS_TO_PASS"]))
    return Instance(record["instance_id"], record["problem_statement"], base, tests, gold, ids, len(set(required["FAIL_TO_PASS"])))


def _ids(key: str, value: Any) -> tuple[str, ...]:
    """Test ids: a list of strings, or as in the published data sets the JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _FieldError(key, "must be a list of test ids, or the JSON text of one") from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _FieldError(key, "must be a list of strings")
    for item in value:
        _inside(key, item.partition("::")[0])
    return tuple(value)


def _inside(field: str, path: str) -> None:
    """Raises unless a path leads to a place below where it starts."""
    if not path or "\0" in path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise _FieldError(field, f"{path!r} must be a relative path without '..'")


def _base(folder: Path, repo: str, commit: str) -> Mapping[str, bytes]:
    _inside("repo", repo)
    top = folder / repo
    if not top.is_dir():
        raise _FieldError("repo", f"no folder {top}")
    if top.resolve() != folder.resolve() / repo:
        raise _FieldError("repo", f"{repo!r} leads through a link")
    history = top / ".git" if (top / ".git").exists() else top if (top / "HEAD").is_file() and (top / "objects").is_dir() else None
    if history is None:
        if commit:
            raise _FieldError("base_commit", f"{top} is no git repository: give one, or leave base_commit empty to take it as it is")
        return _of_folder(top)
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise _FieldError("base_commit", f"{commit!r} is no name of a commit")
    return _of_commit(history, commit)


def _of_folder(top: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in sorted(top.rglob("*")):
        name = path.relative_to(top).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise _FieldError("repo", f"{name} is no regular file")
        if path.is_file():
            try:
                files[name] = path.read_bytes()
            except OSError as error:
                raise _FieldError("repo", f"{name} cannot be read: {error.strerror}") from None
    return _checked(files)


@cache
def _of_commit(history: Path, commit: str) -> dict[str, bytes]:
    git = "git", f"--git-dir={history}"
    listing = _git("base_commit", *git, "ls-tree", "-r", "-z", "--full-tree", commit)
    entries = [entry.split(b"\t", 1) for entry in listing.split(b"\0") if entry]
    names: list[str] = []
    for facts, name in entries:
        path = name.decode(errors="surrogateescape")
        if not facts.startswith(b"100"):
            raise _FieldError("repo", f"{path} is a link or a submodule")
        _inside("repo", path)
        names.append(path)
    blobs = _git("repo", *git, "cat-file", "--batch", data=b"".join(facts.split()[2] + b"\n" for facts, _ in entries))
    files, at = {}, 0
    for name in names:
        head = blobs.index(b"\n", at)
        size = int(blobs[at:head].split()[2])
        files[name] = blobs[head + 1 : head + 1 + size]
        at = head + size + 2
    return _checked(files)


def _checked(files: dict[str, bytes]) -> dict[str, bytes]:
    if (size := sum(map(len, files.values()))) > LARGEST:
        raise _FieldError("repo", f"{size} bytes, more than {LARGEST}")
    for path in files:
        if not path.isprintable():
            raise _FieldError("repo", f"{path!a} is no name for a file of a task")
    return files


def _patched(field: str, base: Mapping[str, bytes], patch: str) -> dict[str, bytes | None]:
    """What a patch changes: path -> bytes, None for a file that it removes."""
    data = patch.encode(errors="surrogatepass")
    named = [name.decode(errors="replace") for name in dict.fromkeys(NAMED.findall(data))]
    for name in named:
        _inside(field, name)
    with tempfile.TemporaryDirectory() as folder:
        before = {name: base[name] for name in named if name in base}
        for name, content in before.items():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if data.strip():
            _git(field, "git", "apply", "--whitespace=nowarn", "-", data=data, cwd=folder)
        if links := [path for path in Path(folder).rglob("*") if path.is_symlink()]:
            raise _FieldError(field, f"{links[0].relative_to(folder)} is a link")
        after = _of_folder(Path(folder))
    changed: dict[str, bytes | None] = {path: content for path, content in after.items() if before.get(path) != content}
    return {**changed, **dict.fromkeys(path for path in before if path not in after)}


def _git(field: str, *command: str, data: bytes = b"", cwd: str | None = None) -> bytes:
    """Output of git, which is told nothing by the environment and looks for no repository but the one it is given."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"LC_ALL": "C", "GIT_CEILING_DIRECTORIES": str(Path(cwd).parent) if cwd else "/"}
    try:
        done = subprocess.run(command, input=data, capture_output=True, check=False, cwd=cwd, env=env)
    except FileNotFoundError:
        raise _FieldError(field, "there is no git on this host: install it") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _FieldError(field, said[0][:300] if said else f"git ended with {done.returncode}")
    return done.stdout
