"""What stands between a solution and a score it did not earn. Each defence has a name, and is on unless it is switched off to be studied.

With none of them, the visible tests are run where the policy left them, and exit code 0 is the reward: that is what most verifiers did that
were cheated. `true_success` is always the word of the verifier with all of them, so the two can be compared.
"""

import hashlib
import sys
from ast import literal_eval
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import referee
from agentrl_jax.envs.protocol import GraderError
from agentrl_jax.sandbox.protocol import Result, Sandbox

DEFENCES: Mapping[str, str] = {
    "fork": "score a copy of the files, out of reach of whatever the episode left running; else the box itself",
    "restore": "tests, configuration and whatever else a solution may not touch are as the task has them; else as the policy left them",
    "paths": "new files count only where a solution may add some, links are not followed, history and /tmp are gone; else all stays",
    "hidden": "tests that were never in the box decide; else the visible ones",
    "report": "each result is asked for by name and told by what the solution cannot write to; else exit code 0 is a pass",
}
ALL = frozenset(DEFENCES)

SCRIPT = Path(referee.__file__).read_text(encoding="utf-8")
LONGEST, MOST = 200, 20  # characters of a path that is told, and paths
CONFIGURATION = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "setup.cfg",
    "tox.ini",
    "sitecustomize.py",
    "usercustomize.py",
)
RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


class Run(Protocol):
    """`Sandbox.exec` or `Sandbox.exec_fresh`."""

    def __call__(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None) -> Awaitable[Result]: ...


@dataclass(frozen=True)
class Verdict:
    """What was found of a solution.

    passed:    every required test passed
    share:     of the required tests, those that passed
    tampering: paths and parts that a solution had no business to touch
    """

    passed: bool
    share: float
    tampering: tuple[str, ...] = ()


TRIES = 2  # a run without a report is made again: what ended the first may have come from outside, and that must never be scored

Grade = Callable[[Collection[str], bool], Awaitable[Verdict | None]]
"""Grade with these defences what the policy left, or the gold solution; None where the run gave no complete report."""


def chosen(defences: Collection[str]) -> tuple[str, ...]:
    """The names in order. Raises ValueError for one that is none."""
    if unknown := sorted(set(defences) - ALL):
        raise ValueError(f"no defence {', '.join(unknown)}: there are {', '.join(DEFENCES)}")
    return tuple(name for name in DEFENCES if name in defences)


async def judged(grade: Grade, defences: Collection[str]) -> Outcome:
    """The reward by the chosen defences, the truth by all. Raises GraderError where the gold solution gives no full marks either."""
    for _ in range(TRIES):
        if (strict := await grade(ALL, False)) is not None:
            break
    else:
        gold = await grade(ALL, True)
        if gold is None or not gold.passed:
            raise GraderError(f"the gold solution fails too: {gold}")
        strict = Verdict(False, 0.0)
    paid = strict if len(defences) == len(ALL) else await grade(defences, False) or Verdict(False, 0.0)
    return Outcome(float(paid.passed), {"passed": paid.share}, true_success=strict.passed, tampering=strict.tampering)


@asynccontextmanager
async def opened(box: Sandbox, defences: Collection[str]) -> AsyncIterator[tuple[Sandbox, Run]]:
    """Where to score and how: a fork, by processes apart from those that the policy left, or the box itself."""
    if "fork" not in defences:
        yield box, box.exec
        return
    fork = await box.fork()
    try:
        yield fork, fork.exec_fresh
    finally:
        await fork.close()


async def ask(run: Run, *command: object, seconds: float) -> list[str] | None:
    """The lines of the report of one command of `referee`; None where it did not come to its end."""
    result = await run(["python3", "-I", "-S", "-c", SCRIPT], stdin=ascii(command).encode(), seconds=seconds)
    return None if result.exit_code != 0 or result.dropped else result.text.splitlines()


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """What `referee` compares a work tree with: path -> digest, without the history."""
    return {path: hashlib.blake2b(data, digest_size=16).hexdigest() for path, data in files.items() if not path.startswith(".git/")}


def touched(line: str, files: Mapping[str, bytes], allowed: Callable[[str], bool]) -> tuple[str, ...]:
    """Of what `referee.survey` found, the paths that a solution had no business to touch.

    A new file beside the solution is none of them, unless it is a link or the like, or Python or a test runner would read it unasked. What
    Python compiles into `__pycache__` is none either: honest work makes such files, and they are gone before anything is scored.
    """
    found = []
    for path, what in literal_eval(line):
        if what == "new":
            wrong = not allowed(path) and meddles(path, files) and not cached(path)
        else:
            wrong = what in ("strange", "replaced") or not allowed(path)
        if wrong:
            found.append(path.encode(errors="replace").decode()[:LONGEST])
    return tuple(found[:MOST])


def cached(path: str) -> bool:
    """Whether a path is where Python keeps what it has compiled."""
    return path.endswith(".pyc") and path.split("/")[-2:-1] == ["__pycache__"]


def meddles(path: str, files: Mapping[str, bytes]) -> bool:
    """Whether a new file of this name takes part in what other code does: configuration, or a module in the place of a known one.

    files: the task's; what lies in a folder of theirs is in nobody's place
    """
    top, name = path.partition("/")[0], path.rpartition("/")[2]
    known = top.partition(".")[0] in (*sys.stdlib_module_names, *RUNNERS) and path.endswith((".py", ".so"))
    return name in CONFIGURATION or path.endswith((".pth", ".pyc")) or (known and not any(file.startswith(f"{top}/") for file in files))


async def put_right(
    run: Run,
    files: Mapping[str, bytes],
    defences: Collection[str],
    *,
    allowed: Callable[[str], bool],
    tests: Mapping[str, bytes],
    gold: Mapping[str, bytes | None] | None,
    seconds: float,
) -> tuple[str, ...] | None:
    """Bring a work tree, as far as `defences` say, to: the task's files, the solution's share of them, and `tests`. None if that fails.

    files:   the task's
    allowed: whether a solution may touch a path; it may add files that are not `meddles` too
    gold:    the whole tree becomes the task's with these files of the gold solution, None for one that it removes
    Returns what the solution had no business to touch.
    """
    handed_out, tree = digests(files), {path: data for path, data in files.items() if not path.startswith(".git/")}
    if gold is not None:
        whole = {path: data for path, data in {**tree, **gold, **tests}.items() if data is not None}
        return () if await ask(run, "sweep", whole, {}, [], seconds=seconds) == ["end"] else None
    if not (lines := await ask(run, "survey", handed_out, seconds=seconds)):
        return None
    tampering = touched(lines[0], files, allowed)
    new = [path for path, what in literal_eval(lines[0]) if what == "new" and allowed(path)]
    back = {path: data for path, data in tree.items() if "restore" in defences and not allowed(path)}
    put = {**back, **(tests if "hidden" in defences else {})}
    swept = await ask(run, "sweep", put, handed_out, new if "paths" in defences else None, seconds=seconds)
    return tampering if swept == ["end"] else None
