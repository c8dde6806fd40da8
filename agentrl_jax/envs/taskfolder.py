"""Task folders in the format of Harbor and Terminal-Bench 2, read as they are (https://www.harborframework.com/docs/tasks):

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh

What a box here cannot give (graphics cards, services, other users, steps) is an error of the folder and not left out silently. Not taken
over: `cpus`, which a backend has for all of its boxes, and `allow_internet`, as no box has a network.
"""

import math
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl_jax.sandbox.protocol import Limits

OWN_IMAGE = "agentrl-jax-sandbox"  # in a Dockerfile: the image that boxes have anyway
WORKDIRS = ("/app", "/workspace")  # names of the folder that commands start in, in the boxes' own image
LARGEST = 16 << 20  # bytes of tests, and of files that a Dockerfile copies
SOLUTION = 64 << 10  # bytes of a solution, which has to fit into a command
MOST = Limits(seconds=60.0, memory=2 << 30, processes=256, disk=256 << 20, inodes=20_000)
"""What a task may ask for. One that asks for more gets this: the format's usual figures are those of whole machines."""

TESTING = 240.0  # seconds of the tests at most: two runs of tests that loop stay below the deadline of a grader, and score 0

NUMBER, TEXT, TABLE, ANY = (int, float), (str,), (dict,), (object,)
KEYS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "": {
        **dict.fromkeys(("version", "schema_version", "source"), TEXT),
        **dict.fromkeys(("task", "metadata", "verifier", "agent", "environment", "solution"), TABLE),
    },
    "verifier": {"timeout_sec": NUMBER, "env": TABLE},
    "agent": {"timeout_sec": NUMBER},
    "solution": {"env": TABLE},
    "environment": {
        **dict.fromkeys(("build_timeout_sec", "cpus", "memory_mb", "storage_mb", "gpus"), NUMBER),
        **dict.fromkeys(("docker_image", "memory", "storage", "os"), TEXT),
        "allow_internet": (bool,),
        "env": TABLE,
        **dict.fromkeys(("mcp_servers", "gpu_types"), (list,)),
    },
}
INSTRUCTIONS = "ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK LABEL MAINTAINER ONBUILD RUN SHELL STOPSIGNAL USER VOLUME WORKDIR"
NEUTRAL: Mapping[str, Sequence[object]] = {"gpus": (0,), "gpu_types": ([],), "mcp_servers": ([],), "os": ("linux",)}
BEYOND = ("steps", "artifacts", "user", "healthcheck", "skills_dir", "workdir", "network_mode", "environment_mode", "collect")


class FolderError(ValueError):
    """A folder is no task; the message names the file and the field."""


@dataclass(frozen=True)
class TaskFolder:
    """A task as its folder has it.

    image:                            None where the Dockerfile says `FROM agentrl-jax-sandbox` and then only where to work and what files
                                      to copy there: those are `files`, and every backend will do
    env, verifier_env, solution_env:  variables of all commands, and of those of the tests and the solution besides
    tests, solution:                  files relative to /tests and /solution
    verifier_seconds:                 wall time of the tests
    """

    name: str
    instruction: str
    image: str | Path | None
    files: Mapping[str, bytes]
    env: Mapping[str, str]
    limits: Limits
    tests: Mapping[str, bytes]
    verifier_env: Mapping[str, str]
    verifier_seconds: float
    solution: Mapping[str, bytes]
    solution_env: Mapping[str, str]


def load(root: Path) -> tuple[list[TaskFolder], list[str]]:
    """The tasks of a folder, which is one itself or holds some, by name; and what is wrong with the others, a sentence each."""
    if not root.is_dir():
        raise FolderError(f"{root}: no folder")
    single = (root / "task.toml").exists()
    tasks: list[TaskFolder] = []
    errors: list[str] = []
    for folder in [root] if single else sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        try:
            tasks.append(read(folder))
        except FolderError as error:
            errors.append(str(error))
    return tasks, errors


def read(folder: Path) -> TaskFolder:
    """One task. Raises FolderError."""
    path = folder / "task.toml"
    try:
        config = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise FolderError(f"{path}: not TOML: {error}") from error
    _check(path, "", config)
    for table in KEYS:
        if table:
            _check(path, table, config.get(table, {}))
    environment = config.get("environment", {})
    image, files = _environment(folder, environment)
    tests, solution = _files(folder / "tests", "test.sh"), _files(folder / "solution", "solve.sh", needed=False)
    if sum(map(len, solution.values())) > SOLUTION:
        raise FolderError(f"{folder / 'solution'}: more than {SOLUTION >> 10} KiB, which do not fit into a command")
    seconds = _number(path, config, "agent", "timeout_sec", 600.0)
    megabytes = [_number(path, config, "environment", f"{what}_mb", _size(path, environment, what, usual)) for what, usual in SIZES]
    memory, disk = (int(amount * (1 << 20)) for amount in megabytes)
    return TaskFolder(
        name=folder.resolve().name,
        instruction=_text(folder / "instruction.md"),
        image=image,
        files=files,
        env=_variables(path, config, "environment"),
        limits=Limits(min(seconds, MOST.seconds), min(memory, MOST.memory), MOST.processes, min(disk, MOST.disk), MOST.inodes, MOST.output),
        tests=tests,
        verifier_env=_variables(path, config, "verifier"),
        verifier_seconds=min(_number(path, config, "verifier", "timeout_sec", 600.0), TESTING),
        solution=solution,
        solution_env=_variables(path, config, "solution"),
    )


SIZES = (("memory", 2048.0), ("storage", 10240.0))


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FolderError(f"{path}: not UTF-8 at byte {error.start}") from error
    if not text.strip():
        raise FolderError(f"{path}: empty")
    return text


def _check(path: Path, table: str, values: Mapping[str, Any]) -> None:
    """Whether all keys are known and of their types, and ask for nothing that boxes lack."""
    for key, value in values.items():
        name = f"{table}.{key}" if table else key
        if key in BEYOND or (key in NEUTRAL and key in KEYS[table] and value not in NEUTRAL[key]):
            raise FolderError(f"{path}: {name} = {value!r}: boxes here have nothing of the kind")
        if key not in KEYS[table]:
            raise FolderError(f"{path}: {name}: unknown; known are {', '.join(sorted(KEYS[table]))}")
        kinds = KEYS[table][key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise FolderError(f"{path}: {name}: must be {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}")


def _number(path: Path, config: Mapping[str, Any], table: str, key: str, usual: float) -> float:
    value = config.get(table, {}).get(key, usual)
    if not (math.isfinite(value) and value > 0):
        raise FolderError(f"{path}: {table}.{key}: must be positive, got {value}")
    return float(value)


def _size(path: Path, environment: Mapping[str, Any], key: str, usual: float) -> float:
    """Megabytes as the older form of the format writes them, such as "2G"."""
    text = environment.get(key)
    if text is None:
        return usual
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])i?B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise FolderError(f'{path}: environment.{key}: must be a size such as "2G", got {text!r}')
    return float(found[1]) * {"K": 1 / 1024, "M": 1.0, "G": 1024.0}[found[2].upper()]


def _variables(path: Path, config: Mapping[str, Any], table: str) -> dict[str, str]:
    """Variables; "${NAME:-otherwise}" is `otherwise`, as nothing of this machine's environment enters a box."""
    found: dict[str, str] = {}
    for name, value in config.get(table, {}).get("env", {}).items():
        where = f"{path}: {table}.env.{name}"
        if not isinstance(value, str) or "\0" in value or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise FolderError(f"{where}: must be a name and a text, got {value!r}")
        if (asked := re.fullmatch(r"\$\{\w+(?::-(.*))?\}", value)) and asked[1] is None:
            raise FolderError(f"{where} = {value!r}: variables of this machine do not enter boxes; write the value")
        found[name] = asked[1] if asked else value
    return found


def _files(folder: Path, entry: str, *, needed: bool = True) -> dict[str, bytes]:
    """The regular files below a folder, which has to hold `entry`."""
    found: dict[str, bytes] = {}
    if not (needed or folder.exists()):
        return found
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise FolderError(f"{path}: neither a regular file nor a folder")
        if path.is_file():
            found[str(path.relative_to(folder))] = _bytes(path)
    if entry not in found:
        raise FolderError(f"{folder / entry}: missing")
    if sum(map(len, found.values())) > LARGEST:
        raise FolderError(f"{folder}: more than {LARGEST >> 20} MiB")
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}") from error


def _environment(folder: Path, environment: Mapping[str, Any]) -> tuple[str | Path | None, dict[str, bytes]]:
    """(image, files) of a task."""
    context = folder / "environment"
    if name := environment.get("docker_image"):
        return name, {}
    for other in ("docker-compose.yaml", "docker-compose.yml"):
        if (context / other).exists():
            raise FolderError(f"{context / other}: boxes here are one container each; use a Dockerfile")
    dockerfile = context / "Dockerfile"
    lines = re.sub(r"\\\s*\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", _text(dockerfile))).splitlines()
    steps = [(word.upper(), rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]
    if not any(word == "FROM" for word, _ in steps):
        raise FolderError(f"{dockerfile}: FROM is missing")
    for word, rest in steps:
        if word not in INSTRUCTIONS.split() and not any("<<" in line for line in lines):
            raise FolderError(f"{dockerfile}: {word}: no instruction of a Dockerfile")
        if word == "VOLUME":
            raise FolderError(f"{dockerfile}: VOLUME {rest} would be a disk without limit; remove the line")
        if word in ("COPY", "ADD") and "--from" not in rest:
            for source in [part for part in rest.split() if not part.startswith("--")][:-1]:
                if ".." in PurePosixPath(source).parts:
                    raise FolderError(f"{dockerfile}: {word} {rest}: {source} leads out of {context}")
    files = _copied(context, steps)
    return (context, {}) if files is None else (None, files)


def _copied(context: Path, steps: Sequence[tuple[str, str]]) -> dict[str, bytes] | None:
    """The files that a Dockerfile puts into the boxes' own image; None where it does anything besides."""
    if not steps or steps[0] != ("FROM", OWN_IMAGE):
        return None
    files: dict[str, bytes] = {}
    for word, rest in steps[1:]:
        parts = shlex.split(rest, posix=True) if word == "COPY" and "[" not in rest else []
        if word == "WORKDIR" and rest.rstrip("/") in WORKDIRS:
            continue
        if len(parts) != 2 or any(part.startswith("--") or set(part) & set("*?$~") for part in parts):
            return None
        source, target = context / parts[0].lstrip("/"), parts[1]
        for top in WORKDIRS:
            target = "./" + target.removeprefix(top).lstrip("/") if PurePosixPath(target).is_relative_to(top) else target
        if target.startswith("/") or ".." in PurePosixPath(target).parts or not source.exists():
            return None
        found = [source] if source.is_file() else sorted(path for path in source.rglob("*") if not path.is_dir())
        for path in found:
            if path.is_symlink() or not path.is_file() or os.access(path, os.X_OK):  # files of a task are plain ones
                return None
            if source.is_dir():
                name = PurePosixPath(target, path.relative_to(source))
            else:
                name = PurePosixPath(target, path.name) if target.endswith(("/", ".")) else PurePosixPath(target)
            files[str(name)] = _bytes(path)
    return files
