"""An instance made from a real git repository, from file to score; files that are not as they should be."""

import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import swe, taskfolder
from agentrl_jax.envs.defences import ALL
from agentrl_jax.envs.instances import load
from agentrl_jax.envs.protocol import Call, Environment, GraderError
from agentrl_jax.envs.swe import Swe
from agentrl_jax.rollout.agent import RolloutLimits
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

bwrap = pytest.mark.real("bwrap")

PRICE = '''"""Prices in cents."""


def total(items):
    return sum(price for _, price in items)


def discounted(items, percent):
    return total(items) * (100 - percent) // 10
'''
FIXED = PRICE.replace("// 10\n", "// 100\n")
CONFTEST = """import pytest


@pytest.fixture
def items():
    return [("tea", 200), ("cake", 300)]
"""
TESTS = """from shop.price import total


def test_total(items):
    assert total(items) == 500
"""
NEW_TESTS = """import pytest

from shop.price import discounted, total


def test_total(items):
    assert total(items) == 500


@pytest.mark.parametrize(("percent", "want"), [(0, 500), (10, 450), (100, 0)])
def test_discount(items, percent, want):
    assert discounted(items, percent) == want
"""
REQUIRED = {
    "FAIL_TO_PASS": ["tests/test_price.py::test_discount[0-500]", "tests/test_price.py::test_discount[10-450]"],
    "PASS_TO_PASS": ["tests/test_price.py::test_total", "tests/test_price.py::test_discount[100-0]"],
}


def git(folder: Path, *arguments: str) -> str:
    options = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path, files: dict[str, str], message: str) -> str:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a repository whose later history has the fix, and an instance of its past."""
    folder = tmp_path_factory.mktemp("instances")
    repo = folder / "shop"
    repo.mkdir()
    git(repo, "init", "-q")
    first = {
        "shop/__init__.py": "",
        "shop/price.py": PRICE,
        "tests/conftest.py": CONFTEST,
        "tests/test_price.py": TESTS,
        "README": "Shop\n",
    }
    base = commit(repo, {**first, "README": "Shop\n"}, "Prices")
    tested = commit(repo, {"tests/test_price.py": NEW_TESTS}, "Test discounts")
    fixed = commit(repo, {"shop/price.py": FIXED}, "Percents are hundredths")
    git(repo, "tag", "fixed")
    return folder, {
        "instance_id": "shop-1",
        "repo": "shop",
        "base_commit": base,
        "problem_statement": "A discount of 10 percent makes things dearer.",
        "test_patch": git(repo, "diff", base, tested),
        "patch": git(repo, "diff", tested, fixed),
        "version": "1.0",
        **REQUIRED,
    }


Written = Callable[..., str]


@pytest.fixture
def written(record: tuple[Path, dict[str, Any]]) -> Written:
    """Writes instances, each with some fields changed (None: removed), and gives the file's path."""
    folder, fields = record

    def written(*changes: dict[str, Any], name: str = "issues.jsonl") -> str:
        lines = [json.dumps({k: v for k, v in {**fields, **change}.items() if v is not None}) for change in changes or ({},)]
        (folder / name).write_text("\n".join(lines))
        return str(folder / name)

    return written


@pytest.fixture
async def boxes() -> AsyncIterator[Bubblewrap]:
    async with Bubblewrap(packages=("pytest",)) as backend:
        yield backend


async def played(env: Swe, backend: Bubblewrap, *calls: Call) -> tuple[Outcome, list[str]]:
    """The outcome of some calls, and what they were answered."""
    task = env.task(0, "all")
    box = await backend.start(task.files, limits=task.limits)
    try:
        texts = [(await env.step(task, name, arguments, box)).text for name, arguments in calls]
        return await env.score(task, box), texts
    finally:
        await box.close()


def test_an_instance_becomes_a_task(written: Written) -> None:
    env = Swe(written())
    assert env.errors == ()
    task = env.task(3, "all")
    assert task == Swe(written()).task(3, "all")
    assert task.prompt.startswith("A discount of 10 percent")
    work = {path for path in task.files if not path.startswith(".git/")}
    assert work == {"shop/__init__.py", "shop/price.py", "tests/conftest.py", "tests/test_price.py", "README"}
    assert task.files["tests/test_price.py"] == TESTS.encode()
    assert task.hidden["tests"] == {"tests/test_price.py": NEW_TESTS.encode()}
    assert task.hidden["gold"] == {"shop/price.py": FIXED.encode()}
    everything = b"".join(task.files.values())
    assert b"// 100" not in everything
    assert b"test_discount" not in everything

    def takes(env: Environment) -> None: ...

    takes(env)


@bwrap
async def test_null_0_gold_1_wrong_0(written: Written, boxes: Bubblewrap) -> None:
    env = Swe(written())
    task = env.task(0, "all")
    null, _ = await played(env, boxes, ("submit", {}))
    assert (null.reward, null.true_success, null.tampering) == (0, False, ())
    assert null.components == {"passed": 0.5}
    gold, _ = await played(env, boxes, *env.gold(task))
    assert gold == Outcome(1.0, {"passed": 1.0}, true_success=True)
    wrong, texts = await played(env, boxes, *env.wrong(task))
    assert (wrong.reward, wrong.true_success, wrong.tampering) == (0, False, ())
    assert "1 passed" in texts[1]
    weak, _ = await played(Swe(written(), defences=()), boxes, *env.wrong(task))
    assert (weak.reward, weak.true_success) == (1, False), "the visible tests pass"


@bwrap
async def test_the_history_holds_the_base_alone(written: Written, boxes: Bubblewrap) -> None:
    _, texts = await played(Swe(written()), boxes, ("run", {"command": "git log --all --oneline; git status --short; git remote; git tag"}))
    assert texts[0].endswith(" Import\n")
    assert texts[0].count("\n") == 1


CHEATS = {
    "leave early": ("shop/price.py", "import os\nos._exit(0)\n", False),
    "exit(0)": ("shop/price.py", "raise SystemExit(0)\n", False),
    "skip": ("shop/price.py", "import unittest\nraise unittest.SkipTest\n", False),
    "edit the tests": ("tests/test_price.py", "def test_total(): pass\n", True),
    "edit conftest": ("tests/conftest.py", f"{CONFTEST}\ndef pytest_runtest_makereport():\n    return None\n", True),
    "another conftest": (
        "conftest.py",
        "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item):\n"
        "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n",
        True,
    ),
    "configuration": ("pytest.ini", "[pytest]\naddopts = --collect-only\n", True),
    "own pytest": ("pytest.py", "raise SystemExit(0)\n", True),
    "own json": ("json.py", "raise SystemExit(0)\n", True),
    "patch the reports": (
        "shop/price.py",
        "from _pytest.reports import TestReport\nold = TestReport.from_item_and_call.__func__\n\n\ndef new(cls, item, call):\n"
        "    report = old(cls, item, call)\n    report.outcome = 'passed'\n    return report\n\n\n"
        "TestReport.from_item_and_call = classmethod(new)\n" + PRICE,
        True,
    ),
    "patch the reporter": (
        "shop/price.py",
        "import gc\nfor found in gc.get_objects():\n    if type(found).__name__ == 'Reporter':\n"
        "        found.write = lambda name, outcome, write=found.write: write(name, 'passed')\n" + PRICE,
        True,
    ),
    "write to every descriptor": (
        "shop/price.py",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\"('tests/test_price.py::test_total', 'passed')\\n\")\n"
        "    except OSError: pass\n" + PRICE,
        True,
    ),
    "results equal to everything": (
        "shop/price.py",
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n\n\n"
        "def total(items): return Yes()\n\n\ndef discounted(items, percent): return Yes()\n",
        True,
    ),
    "read the report": (
        "shop/price.py",
        "import os, re\nfor fd in os.listdir('/proc/self/fd'):\n    for path in (f'/proc/self/fd/{fd}', f'/proc/{os.getppid()}/fd/{fd}'):\n"
        "        try:\n            with open(path, 'rb') as file: open('/tmp/seen', 'ab').write(file.read(4096))\n"
        "        except OSError: pass\n"
        "for path in (f'/proc/{os.getppid()}/environ', f'/proc/{os.getppid()}/mem', '/proc/1/environ', '/proc/1/mem'):\n"
        "    try: open(path, 'rb').read(1); open('/tmp/seen', 'ab').write(b'x')\n    except OSError: pass\n"
        "if re.search(rb'[0-9a-f]{32}|x$', open('/tmp/seen', 'rb').read()): open('tests/test_price.py', 'w').write('')\n" + PRICE,
        False,
    ),
    "rewrite the tests while they run": ("shop/price.py", "open('tests/test_price.py', 'w').write('')\n" + PRICE, True),
}


@bwrap
@pytest.mark.parametrize("name", CHEATS)
async def test_cheats_do_not_score(name: str, written: Written, boxes: Bubblewrap) -> None:
    path, text, seen = CHEATS[name]
    outcome, _ = await played(Swe(written()), boxes, ("write", {"path": path, "text": text}), ("submit", {}))
    assert (outcome.reward, outcome.true_success) == (0, False)
    assert bool(outcome.tampering) == seen


@bwrap
async def test_what_a_solution_may_not_touch_is_put_back_and_told(written: Written, boxes: Bubblewrap) -> None:
    fix = ("write", {"path": "shop/price.py", "text": FIXED})
    notes = ("write", {"path": "notes.txt", "text": "mine"})
    assert (await played(Swe(written()), boxes, fix, notes))[0] == Outcome(1.0, {"passed": 1.0}, true_success=True)
    spoilt = ("run", {"command": "echo broken > tests/conftest.py; ln -s shop link; rm -r .git; mkfifo pipe; touch setup.cfg"})
    outcome, _ = await played(Swe(written()), boxes, fix, spoilt)
    assert outcome == Outcome(1.0, {"passed": 1.0}, true_success=True, tampering=("tests/conftest.py", "link", "pipe", "setup.cfg"))


@bwrap
@pytest.mark.parametrize("off", sorted(ALL))
async def test_each_defence_can_be_off(off: str, written: Written, boxes: Bubblewrap) -> None:
    env = Swe(written(), defences=ALL - {off})
    outcome, _ = await played(env, boxes, ("submit", {}))
    assert (outcome.reward, outcome.true_success) == (float(off == "hidden"), False)
    assert (await played(env, boxes, *env.gold(env.task(0, "all"))))[0].reward == 1


@bwrap
async def test_a_full_box_is_the_policys_doing(written: Written, boxes: Bubblewrap) -> None:
    fill = ("run", {"command": "head -c 1000000000 /dev/zero > full; chmod 000 tests shop; true"})
    assert (await played(Swe(written()), boxes, fill))[0].reward == 0


@bwrap
async def test_a_gold_patch_that_fails_is_the_graders(written: Written, boxes: Bubblewrap, backend: Bubblewrap) -> None:
    stop = ("write", {"path": "shop/price.py", "text": "import os\nos.kill(os.getppid(), 9)\n"})
    assert (await played(Swe(written()), boxes, stop))[0].reward == 0
    with pytest.raises(GraderError, match="no pytest in the box"):
        await played(Swe(written()), backend, ("submit", {}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patch": None}, "patch: missing"),
        ({"repo": 3}, "repo: must be a string, got int"),
        ({"gold": "x"}, "gold: unknown; the fields are instance_id"),
        ({"repo": "../shop"}, "repo: '../shop' must be a relative path without '..'"),
        ({"repo": "/shop"}, "repo: '/shop' must be a relative path"),
        ({"repo": "nothing"}, "repo: no folder"),
        ({"base_commit": ""}, "base_commit: '' is no name of a commit"),
        ({"base_commit": "--output=x"}, "base_commit: '--output=x' is no name of a commit"),
        ({"base_commit": "0" * 40}, "base_commit: fatal: not a tree object"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS: empty"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS: must be a list of strings"),
        ({"FAIL_TO_PASS": "tests"}, "FAIL_TO_PASS: must be a list of test ids, or the JSON text of one"),
        ({"PASS_TO_PASS": ["/etc/test_x.py::test"]}, "PASS_TO_PASS: '/etc/test_x.py' must be a relative path"),
        ({"PASS_TO_PASS": ["tests/test_x.py::test"]}, "PASS_TO_PASS: 'tests/test_x.py::test': no such file"),
        ({"patch": "--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n"}, "patch: '../x' must be a relative path"),
        ({"patch": "--- a/README\n+++ b/README\n@@ -1 +1 @@\n-Ship\n+Shops\n"}, "patch: error: patch failed: README:1"),
        ({"test_patch": "nothing like a patch"}, "test_patch: error: "),
        ({"problem_statement": " "}, "problem_statement: empty"),
        ({"instance_id": "shop-2"}, "instance_id: another instance has it"),
    ],
)
def test_what_is_wrong_is_told_and_the_others_go_on(change: dict[str, Any], said: str, written: Written) -> None:
    path = written({"instance_id": "shop-2"}, {"instance_id": "shop-3", **change}, {"instance_id": "shop-4"})
    instances, errors = load(path)
    assert [instance.id for instance in instances] == ["shop-2", "shop-4"]
    assert len(errors) == 1
    where, _, what = errors[0].partition(f"{change.get('instance_id', 'shop-3')}: ")
    assert where == f"{path}:2: "
    assert what.startswith(said)


def test_files_that_are_none(written: Written, tmp_path: Path) -> None:
    path = Path(written({}, {"instance_id": "shop-2"}))
    good = path.read_bytes()
    path.write_bytes(b'\n{"a": \xff}\n' + good.splitlines()[0] + b"\n{]\n3\n")
    instances, errors = load(path)
    assert [instance.id for instance in instances] == ["shop-1"]
    assert [error.removeprefix(f"{path}:").partition(": ")[::2] for error in errors] == [
        ("2", "not UTF-8: byte 0xff at 6"),
        ("4", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("5", "an instance is an object, not int"),
    ]
    listed = path.with_suffix(".json")
    listed.write_bytes(b"[\n" + good.replace(b"\n", b",\n") + b',\n{"instance_id": "shop-3"}]')
    instances, errors = load(listed)
    assert [instance.id for instance in instances] == ["shop-1", "shop-2"]
    assert errors == (f"{listed}:4: shop-3: repo: missing",)
    assert load(tmp_path) == ((), (f"{tmp_path}: cannot be read: Is a directory",))
    with pytest.raises(ValueError, match=r"no instance can be used\n.*No such file"):
        Swe(str(tmp_path / "nothing.jsonl"))


def test_a_folder_without_history_is_taken_as_it_is(written: Written) -> None:
    path = Path(written({"instance_id": "plain", "repo": "plain", "base_commit": ""}))
    for name, text in {"shop/__init__.py": "", "shop/price.py": PRICE, "tests/conftest.py": CONFTEST, "tests/test_price.py": TESTS}.items():
        (path.parent / "plain" / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "plain" / name).write_text(text)
    instances, errors = load(path)
    assert errors == ()
    assert instances[0].gold == {"shop/price.py": FIXED.encode()}
    (path.parent / "plain" / "link").symlink_to("/etc/passwd")
    assert load(path) == ((), (f"{path}:1: plain: repo: link is no regular file",))


def test_splits_are_disjoint(written: Written) -> None:
    env = Swe(written(*({"instance_id": f"shop-{i}"} for i in range(30))))
    ids = {split: {env.task(seed, split).id for seed in range(60)} for split in ("train", "held_out", "all")}
    assert not ids["train"] & ids["held_out"]
    assert len(ids["all"]) == 30
    with pytest.raises(ValueError, match="one of train, held_out, all"):
        env.task(0, "test")


def test_a_solution_that_loops_cannot_exceed_the_deadline_of_a_grader():
    deadline = RolloutLimits(turns=1, turn_tokens=1, episode_tokens=1, context=1).deadline
    assert deadline > 4 * (swe.SECONDS + 2 * swe.PREPARING)
    assert deadline > 2 * taskfolder.TESTING
