"""Issues of real repositories, loaded from instance files (see `instances`). Real code, its own tests, and pytest in the box.

    Swe("issues.jsonl") with Bubblewrap(packages=("pytest",))

A solution is any file but tests and configuration; the task's own are put back, and its history is one commit. The hidden tests enter a
fork of the box after the episode. A process that the solution cannot reach runs each test file in a process of its own, without plug-ins
and the repository's pytest settings, and demands that every required test passed there.

What remains open, since tests and the code they test share a process there: it can read what a test expects, in its frame or its file;
search the process for the token of the report; undo a patch of the framework before the end; or return objects that equal what they are
compared with and little else. `tampering` names what was seen, and none of it scores: "report" (something wrote to descriptors that it had
not opened), "runner" (the framework was patched), "equality" (an object that equals anything), and files that changed meanwhile. Where the
results are plain values, `repository` shows how the host can compare them instead.

Splits: "train" and "held_out", disjoint by hash of the instance's id; "all", every instance in the order of the file.
"""

import logging
import secrets
import shlex
from ast import literal_eval
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import Any

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import gitfiles, testrun, workbench
from agentrl_jax.envs.bugs import HELD_OUT, share
from agentrl_jax.envs.defences import ALL, CONFIGURATION, Run, Verdict, ask, chosen, judged, meddles, opened, put_right
from agentrl_jax.envs.instances import Instance, load
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.sandbox.protocol import Limits, Sandbox

logger = logging.getLogger(__name__)

SPLITS = ("train", "held_out", "all")
RUNNER = Path(testrun.__file__).read_text(encoding="utf-8")
TEST = "python3 -m pytest -q"
TEST_FILES = ("test_*.py", "*_test.py", "tests.py", *CONFIGURATION)
# A solution that loops must score 0, not exceed the deadline of a grader: of four gradings (two, the gold solution's, that which pays).
SECONDS = 80.0  # wall time of all the tests of an instance
PREPARING = 30.0  # wall time of putting files in their place
EPOCH = 1_600_000_000
WORKSPACE = "/workspace"
NO_PYTEST = "no pytest in the box: Bubblewrap(packages=('pytest',))"


class Swe:
    """The environment of one instance file. `errors`: what is wrong with instances that are left out.

    defences: names in `defences.DEFENCES`
    Raises ValueError where no instance can be used.
    """

    tools = workbench.TOOLS

    def __init__(self, path: str, defences: tuple[str, ...] | frozenset[str] = ALL) -> None:
        self.path = path
        self.defences = chosen(defences)
        self._instances, self.errors = load(path)
        for error in self.errors:
            logger.warning("%s", error)
        if not self._instances:
            raise ValueError("\n".join([f"{path}: no instance can be used", *self.errors]))

    def task(self, seed: int, split: str = "train") -> Task:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
        if split == "all":
            return _task(self._instances[seed % len(self._instances)])
        held_out = split == "held_out"
        of = [instance for instance in self._instances if (share(instance.id) < HELD_OUT) == held_out]
        if not of:
            raise ValueError(f"{self.path}: none of {len(self._instances)} instances is in split {split!r}; 'all' has them all")
        return _task(Random(f"{split}/{seed}").choice(of))

    def gold(self, task: Task) -> list[Call]:
        return [*(_change(path, data) for path, data in task.hidden["gold"].items()), ("submit", {})]

    def wrong(self, task: Task) -> list[Call]:
        """A comment where the fix belongs: the visible tests pass as before."""
        path = next(iter(task.hidden["gold"]))
        return [_change(path, task.files.get(path, b"") + b"\n# fixed\n"), ("run", {"command": TEST}), ("submit", {})]

    async def step(self, task: Task, name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
        return await workbench.step(name, arguments, box)

    async def state(self, task: Task, box: Sandbox) -> str:
        """Hash of the work tree."""
        return await workbench.state(box)

    async def score(self, task: Task, box: Sandbox) -> Outcome:
        async def grade(defences: Collection[str], gold: bool) -> Verdict | None:
            async with opened(box, defences) as (_, run):
                tampering = await put_right(
                    run,
                    task.files,
                    defences,
                    allowed=lambda path: _allowed(path, task),
                    tests=task.hidden["tests"],
                    gold=task.hidden["gold"] if gold else None,
                    seconds=PREPARING,
                )
                if tampering is None:
                    return None
                if "report" in defences:
                    verdict = await _by_report(task, run, defences, tampering)
                    return verdict if gold or verdict is None or NO_PYTEST not in verdict.tampering else None
                return await _by_exit_code(task, run, defences, tampering)

        return await judged(grade, self.defences)


async def _by_report(task: Task, run: Run, defences: Collection[str], tampering: tuple[str, ...]) -> Verdict | None:
    """Ask for every required test by name; None where the report is not whole."""
    hidden = "hidden" in defences
    present = {path: data for path, data in task.files.items() if _is_test(path, task)} | (task.hidden["tests"] if hidden else {})
    required: dict[str, list[str]] = {}
    for test in task.hidden["required"] if hidden else _visible(task):
        required.setdefault(test.partition("::")[0], []).append(test)
    options = ["-q", "-c", "/dev/null", f"--rootdir={WORKSPACE}", "-o", f"pythonpath={WORKSPACE} {WORKSPACE}/src", "-p", "no:cacheprovider"]
    if not any(path.rpartition("/")[2] == "conftest.py" for path in present):
        options.append("--noconftest")
    nonce = secrets.token_hex(16)
    lines = await ask(run, "tests", nonce, required, present, options, RUNNER, seconds=SECONDS)
    if lines is None or len(lines) != 1 or not lines[0].startswith(f"{nonce} "):
        return None
    results, _, wrong = lines[0].removeprefix(f"{nonce} ").partition(" ")
    wrong = literal_eval(wrong)
    passed = results.count("1") / max(len(results), 1)
    return Verdict("0" not in results and not wrong, passed, (*tampering, *wrong))


async def _by_exit_code(task: Task, run: Run, defences: Collection[str], tampering: tuple[str, ...]) -> Verdict:
    """Believe pytest, which shares its process with the solution."""
    files = list(task.hidden["tests"]) if "hidden" in defences else []
    result = await run([*TEST.split(), *(path for path in files if path.endswith(".py"))], seconds=SECONDS)
    passed = result.exit_code == 0
    return Verdict(passed, float(passed), tampering)


def _task(instance: Instance) -> Task:
    history = gitfiles.repository([gitfiles.Commit("Import", EPOCH, instance.base)])
    size = sum(map(len, instance.base.values()))
    return Task(
        id=f"swe/{instance.id}",
        prompt=f"{instance.statement.strip()}\n\nFix this in the repository and submit. Its tests: `{TEST}`.",
        files={**instance.base, **history},
        hidden={"tests": instance.tests, "gold": instance.gold, "required": instance.required, "broken": instance.broken},
        limits=Limits(seconds=60.0, memory=2 << 30, processes=64, disk=(64 << 20) + 6 * size, inodes=4000 + 6 * len(instance.base)),
    )


def _visible(task: Task) -> list[str]:
    """Of the required tests that passed before the fix, those whose function is in the files handed out."""
    passing = task.hidden["required"][task.hidden["broken"] :]
    functions = {test: f"def {test.rpartition('::')[2].partition('[')[0]}(".encode() for test in passing}
    return [test for test in passing if functions[test] in task.files.get(test.partition("::")[0], b"")]


def _allowed(path: str, task: Task) -> bool:
    """Whether a solution may touch a path."""
    if path in task.hidden["gold"] or _is_test(path, task):
        return path in task.hidden["gold"]
    return path in task.files or not meddles(path, task.files)


def _is_test(path: str, task: Task) -> bool:
    """Whether a path belongs to the tests or their configuration."""
    *folders, name = path.split("/")
    return path in task.hidden["tests"] or "tests" in folders or any(fnmatch(name, pattern) for pattern in TEST_FILES)


def _change(path: str, data: bytes | None) -> Call:
    return ("run", {"command": f"rm -- {shlex.quote(path)}"}) if data is None else ("write", {"path": path, "text": data.decode()})
