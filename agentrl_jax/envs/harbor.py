"""Tasks of others, from folders in Harbor's format (see `taskfolder`): the tests of the folder give the reward.

The policy runs commands in the box, whose folder is the Dockerfile's WORKDIR, and submits. Then the tests are put to /tests of a fork, and
/tests/test.sh is run there by processes of their own, apart from whatever the policy left running. It writes the reward, a number to
/logs/verifier/reward.txt or named numbers to reward.json; the first is read where both are there. Of several numbers "reward" counts, else
their mean. Tests that write neither, or run out of time, give 0: the policy can cause both, so `make check-env` is what tells broken tests.

Differences from the format: commands run as user 1000 without a network, HOME is /tmp, and only WORKDIR and /tmp can be written to. Tasks
that need more than that fail their own solution.

Splits: "train" and "held_out", by name, disjoint; "all", both.

What the verifier cannot see: the tests run in the files that the policy left, so tests that trust those (a module, a tool in the work
tree) can be cheated.
"""

import base64
import io
import json
import logging
import math
import shlex
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from random import Random
from typing import Any

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import runtests, shell
from agentrl_jax.envs.bugs import HELD_OUT, share
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.envs.shell import Entry
from agentrl_jax.envs.taskfolder import FolderError, TaskFolder, load
from agentrl_jax.sandbox.protocol import Sandbox

logger = logging.getLogger(__name__)

SPLITS = ("train", "held_out", "all")
SCRIPT = Path(runtests.__file__).read_text(encoding="utf-8")
DEFENCES: Mapping[str, str] = {
    "fork": "tests run in a copy of the files, out of reach of whatever the episode left running; else in the box itself",
    "clear": "what lay at /tests and /logs is gone before; else a reward or a test that the policy put there may count",
    "python": "packages and start-up files in the policy's HOME are not loaded; else they run within the tests",
}
ALL = frozenset(DEFENCES)
REWARD = 1 << 16  # bytes of a file with rewards


class Harbor:
    """The environment over a folder of tasks, or one task. `defences`: names in `DEFENCES`.

    `errors` says what is wrong with the folders that are no tasks; the others are used. Raises FolderError where none is left.
    """

    tools = shell.TOOLS

    def __init__(self, root: Path | str, defences: Collection[str] = ALL) -> None:
        if unknown := sorted(set(defences) - ALL):
            raise ValueError(f"no defence {', '.join(unknown)}: there are {', '.join(DEFENCES)}")
        self.root, self.defences = Path(root), tuple(name for name in DEFENCES if name in defences)
        folders, errors = load(self.root)
        self.errors = tuple(errors)
        for error in errors:
            logger.warning("left out: %s", error)
        if not folders:
            raise FolderError(f"{root}: no task; {'; '.join(errors) or 'a task is a folder with a task.toml'}")
        self._tasks = [_task(folder) for folder in folders]

    def task(self, seed: int, split: str = "train") -> Task:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
        tasks = [task for task in self._tasks if split == "all" or (share(task.id) < HELD_OUT) == (split == "held_out")]
        if not tasks:
            raise ValueError(f"{self.root}: none of its {len(self._tasks)} tasks is in the split {split!r}; use 'all'")
        return Random(f"harbor/{split}/{seed}").choice(tasks)

    def gold(self, task: Task) -> list[Call]:
        """The folder's own solution, put to /solution. Raises ValueError where it has none."""
        if not task.hidden["solution"]:
            raise ValueError(f"{task.id}: the folder has no solution/solve.sh")
        packed = base64.b64encode(_archive(task.hidden["solution"])).decode()
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in task.hidden["solution_env"].items())
        put = f"mkdir -p /tmp/solution && echo {packed} | base64 -d | tar -xf - -C /tmp/solution"
        return [("run", {"command": f"{put} && {variables} bash /solution/solve.sh"}), ("submit", {})]

    def wrong(self, task: Task) -> list[Call]:
        """Looking about: of tasks of others no plausible mistake is known."""
        return [("run", {"command": "ls -la"}), ("submit", {})]

    async def step(self, task: Task, name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
        return await shell.step(name, arguments, box, task.hidden["env"])

    async def state(self, task: Task, box: Sandbox) -> str:
        """Hash of the files in WORKDIR: paths, kinds, permissions and contents."""
        return await shell.state(box)

    async def score(self, task: Task, box: Sandbox) -> Outcome:
        """What the tests say. Components: their named rewards, and "verified", whether they wrote any. Raises SandboxError only."""
        strict = await _verify(task, box, ALL)
        paid = strict if len(self.defences) == len(ALL) else await _verify(task, box, self.defences)
        components = {"verified": float(paid is not None), **{f"reward/{name}": value for name, value in (paid or {}).items()}}
        return Outcome(_reward(paid), components, true_success=_reward(strict) >= 1)


def _task(folder: TaskFolder) -> Task:
    hidden = {name: getattr(folder, name) for name in ("env", "tests", "verifier_env", "verifier_seconds", "solution", "solution_env")}
    solve = folder.solution.get("solve.sh", b"").decode(errors="replace")
    return Task(
        id=f"harbor/{folder.name}",
        prompt=folder.instruction,
        files=folder.files,
        hidden=hidden,
        limits=folder.limits,
        privileged=solve,
        image=folder.image,
    )


async def _verify(task: Task, box: Sandbox, defences: Collection[str]) -> dict[str, float] | None:
    """The rewards that the tests write; None where they write none that can be read."""
    hidden = task.hidden
    env = {**hidden["env"], **hidden["verifier_env"], **({"PYTHONNOUSERSITE": "1"} if "python" in defences else {})}
    argv = ["python3", "-I", "-S", "-c", SCRIPT, "clear" if "clear" in defences else "keep"]
    place = await box.fork() if "fork" in defences else box
    try:
        run = place.exec_fresh if "fork" in defences else place.exec
        await run(argv, stdin=_archive(hidden["tests"]), seconds=hidden["verifier_seconds"], env=env)
        return rewards(await shell.tree(place) or {})
    finally:
        if place is not box:
            await place.close()


def rewards(entries: Mapping[str, Entry]) -> dict[str, float] | None:
    """Of the files of a box: name -> finite number, or None."""
    folder = "tmp/logs/verifier"
    text, named = (entries.get(f"{folder}/reward.{ending}") for ending in ("txt", "json"))
    entry = text or named
    if entry is None or entry.kind != "file" or entry.size > REWARD:
        return None
    try:
        found = {"reward": float(entry.content)} if entry is text else json.loads(entry.content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found:
        return None
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e30 and math.isfinite(v) for v in found.values()):
        return None
    return {name: float(value) for name, value in found.items()}


def _reward(found: Mapping[str, float] | None) -> float:
    if not found:
        return 0.0
    return found.get("reward", sum(found.values()) / len(found))


def _archive(files: Mapping[str, bytes]) -> bytes:
    """A tar, the same for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
