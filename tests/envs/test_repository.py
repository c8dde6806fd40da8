"""Tasks by seed, the tools, and what scores, in real boxes."""

import subprocess
from pathlib import Path

import pytest

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.bugfix import SPLITS
from agentrl_jax.envs.bugs import functions
from agentrl_jax.envs.defences import ALL
from agentrl_jax.envs.protocol import Call, Environment, Observation, Task
from agentrl_jax.envs.repository import LEVELS, TEST, Repository
from agentrl_jax.envs.workbench import LONGEST
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

levels = pytest.mark.parametrize("level", range(len(LEVELS)))
bwrap = pytest.mark.real("bwrap")
SUBMIT: Call = ("submit", {})


def write(path: str, text: str) -> Call:
    return "write", {"path": path, "text": text}


def run(command: str) -> Call:
    return "run", {"command": command}


def broken(task: Task) -> str:
    """The module of the first bug."""
    return task.hidden["edits"][0][0]


async def play(backend: Bubblewrap, task: Task, *calls: Call, defences: frozenset[str] = ALL) -> Outcome:
    env = Repository(defences=defences)
    box = await backend.start(task.files, limits=task.limits)
    try:
        for call in calls:
            await env.step(task, *call, box)
        return await env.score(task, box)
    finally:
        await box.close()


@levels
def test_a_seed_is_a_task(level: int) -> None:
    tasks = [Repository(level).task(seed) for seed in range(20)]
    assert tasks == [Repository(level).task(seed) for seed in range(20)]
    assert len({(task.prompt, *task.files.values()) for task in tasks}) == len({task.id for task in tasks}) == 20


@levels
@pytest.mark.parametrize("split", SPLITS)
def test_the_box_holds_no_trace_of_the_solution(level: int, split: str, tmp_path: Path) -> None:
    task = Repository(level).task(5, split)
    assert len(task.hidden["edits"]) == LEVELS[level].bugs
    for name, data in task.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    history = subprocess.run(["git", "log", "--all", "-p", "--format=%s"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    everything = history + "".join(data.decode(errors="replace") for data in task.files.values())
    for path, bug, right in task.hidden["edits"]:
        assert bug in task.files[path].decode()
        assert right not in everything
        assert "\n".join(f"+{line}" for line in right.splitlines()) not in history
    shown = {(case.function, case.arguments) for case in task.hidden["visible"]}
    assert not shown & {(case.function, case.arguments) for case in task.hidden["cases"]}


def test_splits_are_disjoint() -> None:
    tasks = {split: [Repository().task(seed, split) for seed in range(30)] for split in SPLITS}
    seen = {f for split in SPLITS[:3] for task in tasks[split] for f in functions() if any(f"def {f}(" in t for t in texts(task))}
    unseen = {f for task in tasks["held_out_functions"] for f in functions() if any(f"def {f}(" in t for t in texts(task))}
    assert seen
    assert unseen
    assert not seen & unseen

    def bugs(split: str) -> set[str]:
        return {bug for task in tasks[split] for _, bug, _ in task.hidden["edits"]}

    assert not (bugs("train") | bugs("held_out")) & bugs("held_out_bugs")


def texts(task: Task) -> list[str]:
    return [data.decode() for path, data in task.files.items() if path.endswith(".py")]


def test_wrong_arguments_say_what_is_right() -> None:
    with pytest.raises(ValueError, match="levels are 0 to 1"):
        Repository(2)
    with pytest.raises(ValueError, match="no defence forks: there are fork, restore"):
        Repository(defences=("forks",))
    with pytest.raises(ValueError, match="one of train, held_out"):
        Repository().task(0, "test")

    def takes(env: Environment) -> None: ...

    takes(Repository())


@bwrap
@levels
@pytest.mark.parametrize("split", SPLITS)
async def test_null_0_gold_1_wrong_0(level: int, split: str, backend: Bubblewrap) -> None:
    env = Repository(level)
    task = env.task(7, split)
    null = await play(backend, task, SUBMIT)
    assert (null.reward, null.true_success, null.tampering) == (0, False, ())
    assert 0 < null.components["passed"] < 1
    assert await play(backend, task, *env.gold(task)) == Outcome(1.0, {"passed": 1.0}, true_success=True)
    wrong = await play(backend, task, *env.wrong(task))
    assert (wrong.reward, wrong.true_success, wrong.tampering) == (0, False, ())


@bwrap
async def test_tools_answer_shortly_and_tell_the_state(backend: Bubblewrap) -> None:
    env, task = Repository(), Repository().task(1)
    box = await backend.start(task.files, limits=task.limits)

    async def step(name: str, **arguments: object) -> Observation:
        return await env.step(task, name, arguments, box)

    path, old, new = task.hidden["edits"][0]
    start = await env.state(task, box)
    assert await step("run", command="cat README.md") == Observation(task.files["README.md"].decode())
    assert (await step("run", command="echo no; exit 3")).text == "no\n\nexit code 3"
    assert (await step("run", command=TEST)).text.endswith("OK\n")
    assert await env.state(task, box) == start, "looking and testing change nothing"

    def error(text: str) -> Observation:
        return Observation(f"error: {text}", count="tool_errors", state=start)

    assert await step("edit", path=path, old="no such", new="") == error(f"old not found in {path}")
    assert await step("edit", path=path, old="def ", new="") == error(
        f"old found {task.files[path].decode().count('def ')} times in {path}"
    )
    assert await step("edit", path="nothing.py", old="a", new="b") == error("No such file or directory: nothing.py")
    assert await step("edit", path=".", old="a", new="b") == error("Is a directory: .")
    assert await step("edit", path="a\0b", old="a", new="b") == error("embedded null byte")
    assert await step("edit", path=path, old=old, new=old) == error("old and new are the same")
    assert (await step("write", path=path, text="\ud800")).count == "tool_errors"
    assert (await step("rm")).count == "tool_errors"

    edited = await step("edit", path=path, old=old, new=new)
    assert edited.text == "ok"
    assert edited.state not in (None, start)
    back = await step("edit", path=path, old=new, new=old)
    assert back.state == start, "the same files are the same state"
    assert (await step("write", path="a/b/notes", text="x")).text == "ok"
    assert await box.get("a/b/notes") == b"x"

    flood = await step("run", command="yes | head -c 100000")
    assert LONGEST - 2 < len(flood.text) <= LONGEST
    assert (await step("run", command="kill -9 $$")).text.endswith("exit code -9")
    assert (await step("submit")).done


@bwrap
async def test_a_command_that_takes_too_long_is_told(backend: Bubblewrap) -> None:
    task = Repository().task(1)
    box = await backend.start(task.files)
    hung = await Repository().step(task, "run", {"command": "echo begun; sleep 60"}, box)
    assert hung == Observation("begun\n\ntimeout", count="tool_timeouts")
    assert (await Repository().step(task, "run", {"command": "echo on"}, box)).text == "on\n"


EQUAL = """
class Yes(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
"""
FUNCTION_CHEATS = {
    "leave early": "import os; os._exit(0)",
    "exit(0)": "raise SystemExit(0)",
    "skip": "import unittest; raise unittest.SkipTest",
    "equal to everything": "return Yes()",
    "loop": "while True: pass",
    "kill the referee": "import os; os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)",
    "print a verdict": "print(*['True'] * 99, 'end', sep='\\n', flush=True)",
    "write to every descriptor": "import os\n    for fd in range(3, 20):\n        try: os.write(fd, b'True\\n' * 99 + b'end\\n')\n"
    "        except OSError: pass",
    "patch what writes results": "import gc\n    for d in gc.get_objects():\n"
    "        if type(d) is dict and 'outcome' in d: d['outcome'] = lambda *a: 'True'",
}


@bwrap
@pytest.mark.parametrize("name", FUNCTION_CHEATS)
async def test_code_that_cheats_does_not_score(name: str, backend: Bubblewrap) -> None:
    task = Repository().task(2)
    path, bug, _ = task.hidden["edits"][0]
    head = bug.partition("\n")[0]
    cheat = ("edit", {"path": path, "old": bug, "new": f"{EQUAL}\n{head}\n    {FUNCTION_CHEATS[name]}\n"})
    assert (await play(backend, task, cheat, SUBMIT)).reward == 0
    assert (await play(backend, task, write(path, f"{EQUAL}\n{FUNCTION_CHEATS[name].replace('return ', '')}\n"), SUBMIT)).reward == 0


@bwrap
async def test_only_the_packages_own_files_count(backend: Bubblewrap) -> None:
    task = Repository().task(2)
    path = broken(task)
    package = task.hidden["package"]
    gold = Repository().gold(task)
    # The right code, from a place where no fix belongs.
    elsewhere = [
        write("elsewhere.py", task.hidden["gold"][path]),
        write(path, "import sys\nsys.path.insert(0, '/workspace')\nfrom elsewhere import *\n"),
    ]
    assert (await play(backend, task, *elsewhere)).reward == 0
    assert (await play(backend, task, *elsewhere, defences=ALL - {"paths"})).reward == 1
    linked = await play(backend, task, *gold[:-1], run(f"mv {path} real.py; ln -s ../real.py {path}"))
    assert (linked.reward, linked.tampering) == (0, (path,))
    # A new module of the package is part of a fix; a note, a test of one's own and a commit do no harm.
    module = f"{package}/fixed.py"
    split = [write(module, task.hidden["gold"][path]), write(path, f"from {package}.fixed import *\n")]
    harmless = [write("notes.txt", "mine"), write("tests/test_mine.py", "import unittest\n"), run("git commit -qam Fixed || true")]
    assert await play(backend, task, *split, *harmless) == Outcome(1.0, {"passed": 1.0}, true_success=True)


TAMPERING = {
    "edited tests": (run("for f in tests/test_*.py; do echo 'import unittest' > $f; done"), "tests/test_core.py"),
    "removed tests": (run("rm -r tests"), "tests/test_core.py"),
    "readme": (write("README.md", "nothing"), "README.md"),
    "conftest": (write("tests/conftest.py", ""), "tests/conftest.py"),
    "configuration": (write("setup.cfg", ""), "setup.cfg"),
    "own unittest": (write("unittest.py", "raise SystemExit(0)"), "unittest.py"),
    "sitecustomize": (write("sitecustomize.py", "import os; os._exit(0)"), "sitecustomize.py"),
    "a link": (run("ln -s /etc/passwd link"), "link"),
    "a pipe": (run("mkfifo tests/pipe"), "tests/pipe"),
}


@bwrap
@pytest.mark.parametrize("name", TAMPERING)
async def test_tampering_is_told_and_changes_no_score(name: str, backend: Bubblewrap) -> None:
    task = Repository().task(2)
    call, path = TAMPERING[name]
    null, gold = await play(backend, task, call), await play(backend, task, *Repository().gold(task)[:-1], call)
    assert (null.reward, null.true_success, gold.reward, gold.true_success) == (0, False, 1, True)
    assert path in null.tampering
    assert null.tampering == gold.tampering


@bwrap
async def test_what_is_told_is_short_text(backend: Bubblewrap) -> None:
    name = "'a'*100 + '/' + 'b'*200"
    make = f"import os; os.makedirs('a'*100); [os.symlink('x', {name} + str(i)) for i in range(50)]; os.symlink('x', b'\\xff')"
    outcome = await play(backend, Repository().task(2), run(f'python3 -c "{make}"'))
    assert len(outcome.tampering) == 20
    assert max(map(len, outcome.tampering)) == 200
    assert "\n".join(outcome.tampering).encode()
    odd = await play(backend, Repository().task(2), run("python3 -c \"import os; os.symlink('x', b'\\xff')\""))
    assert odd.tampering == ("?",)


@bwrap
@pytest.mark.parametrize("name", ["edited tests", "own unittest"])
async def test_without_defences_cheats_are_paid_and_the_truth_is_known(name: str, backend: Bubblewrap) -> None:
    task = Repository().task(2)
    spoil = write(broken(task), "raise SystemExit(1)\n")
    weak = await play(backend, task, spoil, TAMPERING[name][0], defences=frozenset())
    assert (weak.reward, weak.true_success) == (1, False)
    assert weak.tampering
    assert (await play(backend, task, spoil, defences=frozenset())).reward == 0


@bwrap
@pytest.mark.parametrize("off", sorted(ALL))
async def test_each_defence_can_be_off(off: str, backend: Bubblewrap) -> None:
    env, task = Repository(), Repository().task(2)
    null = await play(backend, task, SUBMIT, defences=ALL - {off})
    assert (null.reward, null.true_success) == (float(off == "hidden"), False), "the visible tests pass"
    assert (await play(backend, task, *env.gold(task), defences=ALL - {off})).reward == 1


@bwrap
async def test_what_still_runs_after_the_episode_reaches_no_fork(backend: Bubblewrap) -> None:
    task = Repository().task(2)
    path = broken(task)
    spoil = run(f"(while true; do echo 'raise SystemExit' > {path}; done) >/dev/null 2>&1 & until grep -q SystemExit {path}; do :; done")
    repair = run("kill -9 -1; true")
    assert (await play(backend, task, *Repository().gold(task)[:-1], spoil)).reward == 0, "what it left in the files counts"
    assert (await play(backend, task, spoil, repair)).reward == 0
    killer = run("(while true; do for p in $(pgrep python3); do kill -9 $p; done; done) >/dev/null 2>&1 &")
    assert (await play(backend, task, *Repository().gold(task)[:-1], killer)).reward == 1


@bwrap
@pytest.mark.parametrize(
    "command",
    [
        "head -c 1000000000 /dev/zero > full",
        "chmod -R 000 .",
        "rm -rf * .git",
        "i=0; while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done; touch conftest.py",
        "python3 -c \"import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')\"",
    ],
)
async def test_what_a_policy_does_to_its_box_is_its_own_doing(command: str, backend: Bubblewrap) -> None:
    task = Repository().task(2)
    outcome = await play(backend, task, run(command))
    assert (outcome.reward, outcome.true_success) == (0, False)
    assert (await play(backend, task, run(command), defences=frozenset())).true_success is False
