"""A work tree is put right whatever was done to it, and nowhere else than in a box."""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.defences import ALL, DEFENCES, SCRIPT, Verdict, chosen, judged, meddles, opened, put_right
from agentrl_jax.envs.protocol import GraderError
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

FILES = {"src/a.py": b"a = 1\n", "src/b.py": b"b = 1\n", "tests/test_a.py": b"old\n", ".git/HEAD": b"ref: refs/heads/main\n"}
HIDDEN = {"tests/test_a.py": b"new\n", "tests/deep/test_b.py": b"new\n"}


def test_names_are_checked_and_put_in_order() -> None:
    assert chosen(("report", "fork")) == ("fork", "report")
    assert chosen(ALL) == tuple(DEFENCES)
    with pytest.raises(ValueError, match="no defence forks, hide: there are fork, restore, paths, hidden, report"):
        chosen(("forks", "report", "hide"))


@pytest.mark.parametrize(
    ("path", "does"),
    [
        ("conftest.py", True),
        ("deep/er/conftest.py", True),
        ("pytest.ini", True),
        ("sitecustomize.py", True),
        ("json.py", True),
        ("json/__init__.py", True),
        ("_pytest/runner.py", True),
        ("x.pth", True),
        ("src/x.pyc", True),
        ("test/test_more.py", False),
        ("notes.txt", False),
        ("json.txt", False),
        ("src/json.py", False),
        ("reproduce.py", False),
    ],
)
def test_new_files_that_other_code_reads_unasked(path: str, does: bool) -> None:
    assert meddles(path, {"src/a.py": b"", "test/test_a.py": b""}) == does


async def test_the_reward_is_the_chosen_verdict_and_the_truth_the_strict_one() -> None:
    async def grade(defences: Collection[str], gold: bool) -> Verdict | None:
        return Verdict(set(defences) != ALL, 0.5, ("seen",))

    assert await judged(grade, ("fork",)) == Outcome(1.0, {"passed": 0.5}, true_success=False, tampering=("seen",))
    assert await judged(grade, chosen(ALL)) == Outcome(0.0, {"passed": 0.5}, true_success=False, tampering=("seen",))


async def test_a_run_without_a_report_is_the_graders_where_gold_has_none_either() -> None:
    def grades(gold_passes: bool | None):
        async def grade(defences: Collection[str], gold: bool) -> Verdict | None:
            return Verdict(gold_passes, 1.0) if gold and gold_passes is not None else None

        return grade

    assert await judged(grades(True), chosen(ALL)) == Outcome(0.0, {"passed": 0.0}, true_success=False)
    for gold_passes in (False, None):
        with pytest.raises(GraderError, match="the gold solution fails too"):
            await judged(grades(gold_passes), chosen(ALL))


def test_the_referee_works_in_boxes_only(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "in a box only" in done.stderr


SPOILT = {
    "edited": "echo x > tests/test_a.py",
    "removed": "rm -r tests",
    "a folder in the way": "rm tests/test_a.py; mkdir -p tests/test_a.py/x/y; echo x > tests/test_a.py/x/y/z",
    "a file in the way": "rm -r tests; echo x > tests",
    "a link out": "rm -r tests; mkdir /tmp/tests; ln -s /tmp/tests tests; echo x > /tmp/tests/kept",
    "a link to another file": "ln -sf ../src/a.py tests/test_a.py",
    "a pipe": "rm tests/test_a.py; mkfifo tests/test_a.py",
    "no rights": "chmod 000 tests/test_a.py; chmod 000 tests",
    "very deep": "python3 -c \"import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\"",
    "many files": "mkdir tests/many; for i in $(seq 2000); do : > tests/many/conftest$i.py; done",
}


@pytest.mark.real("bwrap")
@pytest.mark.parametrize("name", SPOILT)
async def test_a_tree_is_put_right(name: str, backend: Bubblewrap) -> None:
    box = await backend.start(FILES)
    result = await box.exec(["sh", "-c", f"echo 'a = 2' > src/a.py; echo > src/c.py; echo > conftest.py; {SPOILT[name]}"])
    assert result.exit_code == 0, result.text
    async with opened(box, ALL) as (fork, run):
        told = await put_right(run, FILES, ALL, allowed=lambda path: path.startswith("src/"), tests=HIDDEN, gold=None, seconds=30)
        assert told is not None
        assert "conftest.py" in told
        left = (await fork.exec(["find", ".", "!", "-type", "d"])).text.split()
        assert sorted(left) == ["./src/a.py", "./src/b.py", "./src/c.py", "./tests/deep/test_b.py", "./tests/test_a.py"]
        assert await fork.get("src/a.py") == b"a = 2\n"
        assert await fork.get("tests/test_a.py") == b"new\n"
        assert (await fork.exec(["ls", "-A", "/tmp"])).text == ""
        gold = {"src/a.py": b"a = 3\n", "src/b.py": None}
        assert await put_right(run, FILES, ALL, allowed=lambda path: True, tests=HIDDEN, gold=gold, seconds=30) == ()
        left = (await fork.exec(["find", ".", "!", "-type", "d"])).text.split()
        assert sorted(left) == ["./src/a.py", "./tests/deep/test_b.py", "./tests/test_a.py"]
        assert await fork.get("src/a.py") == b"a = 3\n"
