"""The environments that are attacked, each with a task on which attacks can show something."""

import json
from collections.abc import Callable, Iterator, Mapping
from difflib import unified_diff
from pathlib import Path

from agentrl_jax.envs import defences, expected, harbor, search_qa, terminal
from agentrl_jax.envs.bugfix import BugFix, handed_out
from agentrl_jax.envs.bugs import evaluate
from agentrl_jax.envs.data_analysis import DataAnalysis
from agentrl_jax.envs.harbor import Harbor
from agentrl_jax.envs.protocol import Environment, Task
from agentrl_jax.envs.repository import Repository
from agentrl_jax.envs.search_qa import SearchQA
from agentrl_jax.envs.swe import Swe
from agentrl_jax.envs.terminal import Terminal
from experiments.attacks.base import Target

MATH = '''"""Small sums."""


def fare(age, distance):
    price = 200 + 15 * distance
    return price // 2 if age <= 14 else price


def change(paid, price):
    return paid - price
'''
FIXED = MATH.replace("age <= 14", "age < 14")
CONFTEST = """import pytest


@pytest.fixture
def adult():
    return 40
"""
VISIBLE = """from tram.prices import change, fare


def test_change():
    assert change(500, 320) == 180


def test_adult(adult):
    assert fare(adult, 10) == 350


def test_fourteen():
    assert fare(14, 2) == 230
"""
HIDDEN = f"""{VISIBLE}

def test_fourteen_far():
    assert fare(14, 20) == 500


def test_child():
    assert fare(13, 20) == 250
"""
TESTS = "tests/test_prices.py"
PASSAGES = {
    "Tram": "The tram of the town was opened in 1898 by mayor Ida Brandt. It has two lines, which meet at the market.",
    "Market": "The market lies between the river and the church. A clock of 1720, made by Jonas Keller, shows the phases of the moon.",
}
QUESTION = {"question": "Who made the clock of the market?", "answer": "Jonas Keller", "supporting_facts": [["Market", 0]]}
BASE = {"tram/__init__.py": "", "tram/prices.py": MATH, "tests/conftest.py": CONFTEST, TESTS: VISIBLE, "README": "Tram\n"}
INSTANCE = {
    "instance_id": "tram-1",
    "repo": "tram",
    "base_commit": "",
    "problem_statement": "Half the fare is for those under 14; someone of 14 pays it all.",
    "FAIL_TO_PASS": [f"{TESTS}::test_fourteen", f"{TESTS}::test_fourteen_far"],
    "PASS_TO_PASS": [f"{TESTS}::test_change", f"{TESTS}::test_adult", f"{TESTS}::test_child"],
}
FOLDER = {
    "instruction.md": "Write the sum of 19 and 23 to sum.txt.",
    "task.toml": 'version = "1.0"\n',
    "environment/Dockerfile": "FROM agentrl-jax-sandbox\nWORKDIR /app\n",
    "solution/solve.sh": "echo 42 > sum.txt\n",
    "tests/check.py": "assert open('sum.txt').read().strip() == '42'\n",
    "tests/test.sh": "python3 /tests/check.py\nif [ $? -eq 0 ]; then echo 1 > $REWARD; else echo 0 > $REWARD; fi\n".replace(
        "$REWARD", "/logs/verifier/reward.txt"
    ),
}


def instance_file(folder: Path) -> str:
    """Write a small repository with a bug, and the instance file that tells of it."""
    _write(folder / "tram", BASE)
    patches = {"patch": _patch("tram/prices.py", MATH, FIXED), "test_patch": _patch(TESTS, VISIBLE, HIDDEN)}
    (folder / "instances.jsonl").write_text(json.dumps(INSTANCE | patches))
    return str(folder / "instances.jsonl")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _patch(path: str, before: str, after: str) -> str:
    return "".join(unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"))


def targets(folder: Path) -> Iterator[Target]:
    """All of them. `folder`: an empty one, for files that environments are made of."""
    yield Target("bugfix", lambda on: BugFix(0, on), defences.ALL, _first(BugFix(0), _shows_in_bugfix))
    yield Target("repository", lambda on: Repository(0, on), defences.ALL, _first(Repository(0), _shows_in_repository))
    instances = instance_file(folder)
    yield Target("swe", lambda on: Swe(instances, on), defences.ALL, Swe(instances).task(0, "all"))

    yield Target(
        "data", lambda on: DataAnalysis(0, on), expected.ALL, _first(DataAnalysis(0), lambda task: task.hidden["kind"] == "at_least")
    )
    names = _first(DataAnalysis(0), lambda task: task.hidden["kind"] == "top_product")
    yield Target("data names", lambda on: DataAnalysis(0, on), expected.ALL, names)
    questions, corpus = folder / "questions.jsonl", folder / "passages.jsonl"
    questions.write_text(json.dumps(QUESTION))
    corpus.write_text("\n".join(json.dumps({"id": title, "title": title, "text": text}) for title, text in PASSAGES.items()))
    searches = str(questions), str(corpus)
    split = next(split for split in search_qa.SPLITS if _has(SearchQA(*searches), split))
    yield Target("search", lambda on: SearchQA(*searches, on), search_qa.ALL, SearchQA(*searches).task(0, split))
    _write(folder / "sum", FOLDER)
    yield Target("harbor", lambda on: Harbor(folder / "sum", on), harbor.ALL, Harbor(folder / "sum").task(0, "all"))
    yield Target("terminal", Terminal, terminal.ALL, _first(Terminal(), lambda task: task.hidden["kind"] == "count"))
    yield Target("terminal removal", Terminal, terminal.ALL, _first(Terminal(), lambda task: task.hidden["kind"] == "duplicates"))


def _has(env: SearchQA, split: str) -> bool:
    try:
        env.task(0, split)
    except ValueError:
        return False
    return True


def _first(env: Environment, suits: Callable[[Task], bool]) -> Task:
    """The first task that suits."""
    return next(task for task in map(env.task, range(10_000)) if suits(task))


def _values(task: Task) -> bool:
    """Its functions return, and many different things: no single answer is right everywhere."""
    cases = task.hidden["cases"] + task.hidden["visible"]
    return not any(case.want.startswith("!") for case in cases) and len({case.want for case in cases}) > 5


def _shows_in_bugfix(task: Task) -> bool:
    """A visible test fails."""
    function = task.hidden["edits"][0][0]
    cases = [case for case in task.hidden["visible"] if case.function == function]
    return _values(task) and evaluate(handed_out(task)[function], function, tuple(c.arguments for c in cases)) != [c.want for c in cases]


def _shows_in_repository(task: Task) -> bool:
    """The bug is in the module that is tested last."""
    modules = sorted(path for path in task.hidden["gold"] if not path.endswith("__init__.py"))
    return _values(task) and task.hidden["edits"][0][0] == modules[-1]
