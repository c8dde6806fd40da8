"""Git itself finds nothing wrong with a repository that was written without it."""

import subprocess
from pathlib import Path

import pytest

from agentrl_jax.envs.gitfiles import Commit, repository

FIRST = {"README": b"hi\n", "a/b.py": b"x = 1\n", "a.py": b"", "a/c/d": b"x" * 200_000, "\xe4": b"\0\xff"}
SECOND = {**FIRST, "a/b.py": b"x = 2\n"}
FILES = repository([Commit("One", 10**9, FIRST), Commit("Two\n\nwith a body", 10**9 + 60, SECOND)])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, data in {**SECOND, **FILES}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True, text=True).stdout


def test_git_takes_it_for_its_own(tree: Path) -> None:
    subprocess.run(["git", "fsck", "--strict", "--full"], cwd=tree, check=True)
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "diff") == ""
    assert git(tree, "log", "--format=%s %an %at") == "Two Maintainer 1000000060\nOne Maintainer 1000000000\n"
    assert git(tree, "show", "HEAD~:a/b.py") == "x = 1\n"
    assert git(tree, "remote") == git(tree, "stash", "list") == ""
    assert git(tree, "fsck", "--unreachable", "--no-reflogs") == ""


def test_work_can_be_committed(tree: Path) -> None:
    (tree / "a/b.py").write_text("x = 3\n")
    assert git(tree, "status", "--porcelain") == " M a/b.py\n"
    git(tree, "commit", "-qam", "Three")
    assert git(tree, "log", "--format=%s", "-2") == "Three\nTwo\n"


def test_the_bytes_are_the_same_on_every_machine() -> None:
    tip = FILES[".git/refs/heads/main"].decode().strip()
    assert tip == "e186379745cd3cc5e44926fe08bdd19d42eea882"
