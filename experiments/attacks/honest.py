"""Work that looks like tampering and is not: right solutions of people who leave things lying about. None may be flagged or unpaid."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.data_analysis import DataAnalysis
from agentrl_jax.envs.protocol import Call, Environment, Task
from agentrl_jax.envs.repository import Repository
from agentrl_jax.envs.terminal import Terminal


def _runs(*commands: str) -> list[Call]:
    return [("run", {"command": command}) for command in commands]


REPOSITORY = _runs(
    "python3 -m unittest; python3 -m pytest -q; true",
    "mkdir -p scratch .pytest_cache/v; echo notes | tee scratch/notes.txt .pytest_cache/README.md reproduce.log > /tmp/log",
    "echo 'print(1)' > reproduce.py; python3 reproduce.py; echo 'def test_mine(): pass' > tests/test_mine.py; cp tests/test_* scratch",
    "for f in */*.py; do python3 -m py_compile $f; done; PYTHONDONTWRITEBYTECODE= python3 -m unittest; true",
    "git checkout -q -b work; git add -A; git commit -qm 'In progress'; git stash list; git log --oneline; git diff HEAD~1 > /tmp/diff",
)
SHELL = _runs(
    "ls -laR > /tmp/listing; cp -r . /tmp/copy; echo note > my-notes.txt; mkdir -p scratch/a; true", "rm -r scratch; cat my-notes.txt"
)
CLUTTER: Mapping[str, list[Call]] = {
    "bugfix": [("test", {}), ("read", {"function": "nothing"}), ("edit", {"function": "nothing", "old": "a", "new": "b"}), ("test", {})],
    "repository": REPOSITORY,
    "swe": REPOSITORY,
    **dict.fromkeys(("terminal", "harbor"), SHELL),
    "data": [("python", {"code": "import os\nopen('scratch.csv', 'w').write('a,b')\nos.listdir()"}), ("python", {"code": "1 / 0"})],
}
"""What is done before the gold solution, by the kind of environment."""

KINDS: Mapping[str, tuple[partial[Environment], ...]] = {
    "bugfix": tuple(partial(BugFix, level) for level in range(4)),
    "repository": tuple(partial(Repository, level) for level in range(2)),
    "terminal": (partial(Terminal),),
    "data": tuple(partial(DataAnalysis, level) for level in range(3)),
}
"""Environments of which there are many tasks."""


def tasks(number: int, kinds: Collection[str] = tuple(KINDS)) -> Iterator[tuple[str, Environment, Task]]:
    """So many tasks, of all kinds and levels in turn."""
    made = [(kind, make()) for kind in kinds for make in KINDS[kind]]
    for i in range(number):
        kind, env = made[i % len(made)]
        yield kind, env, env.task(i // len(made))
