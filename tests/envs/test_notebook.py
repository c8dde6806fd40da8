"""An interpreter that keeps its variables, whatever cells do to it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentrl_jax.envs import notebook
from agentrl_jax.envs.protocol import Observation
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.protocol import Backend, Sandbox

pytestmark = pytest.mark.real("bwrap")
SHOWN = 300
NEW = "(the interpreter is a new one, without earlier variables)\n"
GONE = "line 1: NameError: name 'x' is not defined"


@pytest.fixture
async def box(backend: Backend) -> Sandbox:
    return await backend.start({"a.csv": b"x\n1\n"})


@pytest.fixture(params=[Bubblewrap, pytest.param(Docker, marks=pytest.mark.real("docker"))])
async def any_box(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with request.param() as backend:
        yield await backend.start({"a.csv": b"x\n1\n"})


async def run(box: Sandbox, code: str, seconds: float = 20.0) -> Observation:
    return await notebook.run_cell(box, code, seconds=seconds, longest=SHOWN)


async def test_variables_stay_from_cell_to_cell(any_box: Sandbox):
    first = await run(any_box, "import csv\nx = list(csv.DictReader(open('a.csv')))\nprint('read')\nx")
    assert (first.text, first.count) == ("read\n[{'x': '1'}]", None)
    assert (await run(any_box, "def f():\n    return len(x) + 1")).text == "ok"
    assert (await run(any_box, "f()")).text == "2"


async def test_a_loop_is_cut_off_and_the_next_cell_is_told_what_is_lost(any_box: Sandbox):
    await run(any_box, "x = 1")
    cut = await run(any_box, "print('on my way')\nwhile True: pass", seconds=2)
    assert (cut.text, cut.count) == (
        "on my way\ntimeout: more than 2 s; the interpreter ends, a new one starts, without variables",
        "tool_timeouts",
    )
    after = await run(any_box, "x")
    assert (after.text, after.count) == (NEW + GONE, "tool_errors")
    assert (await run(any_box, "x")).text == GONE  # once told is enough


async def test_what_a_cell_does_to_its_interpreter_is_an_observation(any_box: Sandbox):
    await run(any_box, "x = 1")
    left = await run(any_box, "print('bye'); import os; os._exit(0)")
    assert (left.text, left.count) == ("bye\nerror: the interpreter ended; a new one starts, without variables", "tool_errors")
    assert (await run(any_box, "x")).text == GONE
    flood = await run(any_box, "import os\nwhile True: os.write(1, b'x' * 65536)")
    assert flood.text.endswith("x\nerror: too much output; variables may be lost")
    assert (await run(any_box, "x")).text == NEW + GONE


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("a = 1\na / 0", "line 2: ZeroDivisionError: division by zero"),
        ("a = (", "line 1: SyntaxError: '(' was never closed"),
        ("exit(3)", "line 1: SystemExit: 3"),
        ("raise KeyboardInterrupt", "line 1: KeyboardInterrupt"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "line 3: E"),
        ("class R:\n    def __repr__(self): return 1 / 0\nR()", "line 2: ZeroDivisionError: division by zero"),
        ("input()", "line 1: EOFError: EOF when reading a line"),
        ("import sys; sys.stdin.read()", "''"),
        ("import sys; sys.stdout.close()", "ok"),
        ("import sys; sys.stdout = None; print('nowhere')", "ok"),
        ("import os; os.close(1); os.close(2); x", "ok"),
        ("print('\\ud800')", "\\ud800"),
        ("import os; os.write(1, bytes([255, 0, 65]))", "\ufffd\\0A3"),
        ("print('\\0ok 1 0123456789abcdef')", "\\0ok 1 0123456789abcdef"),
        ("len('a' * 200000)" + " " * 200000, "200000"),
        ("print('a', end='')\n1 + 1", "a2"),
        ("", "ok"),
    ],
)
async def test_after_these_the_interpreter_still_has_its_variables(box: Sandbox, code: str, text: str):
    await run(box, "x = 7")
    assert (await run(box, code)).text == text
    assert (await run(box, "x")).text == "7"


async def test_code_too_deep_to_compile_is_an_observation(box: Sandbox):
    await run(box, "x = 7")
    assert (await run(box, "-" * 100000 + "1")).count == "tool_errors"
    assert (await run(box, "x")).text in ("7", GONE)  # some versions of Python do not survive it


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 11)",
        "import os; os.closerange(3, 100)",
        "import os, signal; signal.alarm(1); signal.pause()",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); open('a.csv')",
        "import ctypes; ctypes.string_at(0)",
        "import os\nif os.fork(): os._exit(0)",
    ],
)
async def test_after_these_it_is_a_new_one(box: Sandbox, code: str):
    await run(box, "x = 7")
    ended = await run(box, code)
    assert ended.count == "tool_errors"
    assert GONE in (await run(box, "x")).text
    assert (await run(box, "x = 8\nx")).text == "8"


async def test_a_fork_of_the_interpreter_is_not_asked(box: Sandbox):
    await run(box, "x = 7\nimport os\nif os.fork() == 0: x = 8")
    assert {(await run(box, "x")).text for _ in range(5)} == {"7"}


async def test_what_runs_on_in_the_background_is_not_heard(box: Sandbox):
    code = """
import sys, threading, time
x = 0
def spam():
    global x
    while True:
        x += 1; print('spam')
        time.sleep(0.001)
threading.Thread(target=spam, daemon=True).start()"""
    await run(box, code)

    async def spammed() -> int:
        return int((await run(box, "sys.stdout = None\nx")).text.rpartition("\n")[2])

    async with asyncio.timeout(20):
        while (first := await spammed()) <= 5:
            pass
        while await spammed() <= first:
            pass


async def test_pausing_keeps_variables_and_forks_and_snapshots_do_not(backend: Backend, box: Sandbox):
    await run(box, "x = 7\nopen('b', 'w').write('b')")
    await box.pause()
    await box.resume()
    assert (await run(box, "x")).text == "7"
    for other in (await box.fork(), await backend.start(snapshot=await box.snapshot())):
        assert (await run(other, "x")).text == NEW + GONE
        assert (await run(other, "open('b').read()")).text == "'b'"
    assert (await run(box, "x")).text == "7"


async def test_an_observation_is_never_longer_than_asked(box: Sandbox):
    for code in ("print('a' * 10**6)", "'a' * 10**6", "raise Exception('a' * 10**6)", "print('a' * 10**6)\nimport os; os._exit(0)"):
        observation = await run(box, code)
        assert SHOWN - 5 <= len(observation.text) <= SHOWN
        assert "\n...\n" in observation.text


async def test_equal_cells_give_equal_states_and_cells_that_only_look_change_none(backend: Backend):
    async def states(*cells: str) -> list[str | None]:
        box = await backend.start({"a.csv": b"x\n1\n"})
        keys = [await notebook.state(box, seconds=20), *[(await run(box, cell)).state for cell in cells]]
        assert await notebook.state(box, seconds=20) == keys[-1]
        await box.close()
        return keys

    empty, one, two = await states("x = [1]", "x.append(2)")
    assert len({empty, one, two}) == 3
    assert await states("x = [1]  # the same", "print(x[0], len(x)); x", "y y", "f'{x}'", "\nx.append( 2 )") == [empty, *[one] * 4, two]
    changing = (
        "del x",
        "x.pop()",
        "print(x.pop())",
        "list(iter(x))",
        "(y := 3)",
        "print(x, file=None)",
        "[z for z in x]",
        "print(1, file=open('b', 'w'))",
        "1 / len([])",
    )
    assert len({(await states("x = [1]", cell))[-1] for cell in changing} - {one}) == len(changing)
    assert (await states("x = [1]", "import os; os._exit(0)"))[-1] == empty


async def test_files_are_part_of_the_state(box: Sandbox):
    async def key(files: dict[str, bytes]) -> str:
        await box.put(files)
        return await notebook.state(box, seconds=20)

    keys = [await key(files) for files in ({}, {"b": b"1"}, {"b": b"2"}, {"d/b": b"2"}, {"b": b"1"})]
    assert len(set(keys)) == 5
    await box.exec(["rm", "-r", "b", "d"])
    assert await key({}) == keys[0]
    await box.exec(["ln", "-s", "a.csv", "link"])
    linked = await key({})
    await box.exec(["ln", "-sf", "b", "link"])
    assert len({keys[0], linked, await key({})}) == 3


async def test_the_state_survives_hostile_files(box: Sandbox):
    await run(
        box,
        "import os\nos.mkfifo('pipe'); os.symlink('/', 'root'); os.symlink('/dev/zero', 'zero')\n"
        "with open('sparse', 'w') as f: f.truncate(1 << 40)\nos.mkdir('locked', 0)\nos.remove('/tmp/.cells'); os.mkfifo('/tmp/.cells')\n"
        "for i in range(2000):\n    os.mkdir('d'); os.chdir('d')",
    )
    observation = await run(box, "1 + 1")
    assert (observation.text, len(observation.state or "")) == ("2", 16)
