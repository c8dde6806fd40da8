"""A Python program in a fork of the warm interpreter behaves as one that is started, only sooner."""

import textwrap
from collections.abc import Iterable

import pytest

from agentrl_jax.sandbox.bubblewrap import Bubblewrap

pytestmark = pytest.mark.real("bwrap")

PROGRAMS = {
    "names": """
        print(__name__, globals().get("__file__"), __doc__, __spec__, __builtins__.__name__)
        print(sorted(k for k in globals() if k[:2] != "__"))
    """,
    "arguments": "import sys; print(sys.argv, sys.path, sys.executable, sys.prefix)",
    "streams": """
        import sys
        print(sys.stdin.read(), end="")
        sys.stdout.buffer.write(b"\\xff\\n")
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            print(stream.encoding, stream.errors, stream.isatty(), stream.line_buffering, stream.write_through)
        print("not UTF-8: \\udcff")
    """,
    "two inputs": "print(input() + '|' + input())",
    "order of streams": "import sys; print('out'); print('err', file=sys.stderr); print('out')",
    "exit handlers": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "threads": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
    "finalizers": "class A:\n    def __del__(self): print('gone')\na = A()",
    "error": "def f():\n    return 1 / 0\n\nf()",
    "chained errors": "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('é')",
    "syntax error": "print('never'\n",
    "bad encoding": "# coding: latin-1\nprint('a')\n",
    "interrupt": "raise KeyboardInterrupt",
    "own hook": "import sys; sys.excepthook = lambda *error: print(error[0].__name__); 1 / 0",
    "exit number": "import sys; sys.exit(300)",
    "exit text": "exit('reason')",
    "exit none": "quit()",
    "abort": "import os; os.abort()",
    "interrupt itself": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "signals": "import signal; print(signal.getsignal(2).__name__, signal.getsignal(signal.SIGPIPE))",
    "signals of a child": "import subprocess; print(subprocess.run(['sh', '-c', 'yes | head -1'], capture_output=1))",
    "pool": "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, 2]))",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    "import of a neighbour": "import neighbour; print(neighbour.__file__, neighbour.value)",
    "unit tests": """
        import unittest
        class Test(unittest.TestCase):
            def test(self): self.assertEqual(1, 1)
        unittest.main(argv=["x"])
    """,
}
WAYS = {
    "file": ["python3", "program.py", "a", "-b"],
    "file in a folder": ["python3", "./folder/../folder/program.py"],
    "isolated": ["python3", "-I", "program.py"],
    "code": ["python3", "-c", "{}", "a"],
    "standard input": ["python3", "-", "a"],
    "unbuffered": ["python3", "-uB", "program.py"],
    "no file": ["python3", "missing.py"],
    "bare": ["python3"],
}


def comparable(output: bytes) -> bytes:
    lines = output.splitlines()
    return b"\n".join(line for line in lines if not line.startswith((b"Ran 1 test", b"Aborted")))


@pytest.mark.parametrize(("programs", "ways"), [(PROGRAMS, ["file", "standard input"]), (list(PROGRAMS)[:5], list(WAYS)[1:])])
async def test_a_fork_behaves_as_a_start(programs: Iterable[str], ways: list[str]):
    async with Bubblewrap() as backend:
        box = await backend.start()
        for name in programs:
            source = textwrap.dedent(PROGRAMS[name])
            files = {path: source.encode() for path in ("program.py", "folder/program.py")}
            await box.put({**files, "neighbour.py": b"value = 1", "folder/neighbour.py": b"value = 2"})
            for way, template in ((way, WAYS[way]) for way in ways):
                argv = [source if word == "{}" else word for word in template]
                stdin = source.encode() if way in ("standard input", "bare") else b"one\ntwo"
                forked, started = [await box.exec(start, stdin=stdin) for start in (argv, ["env", *argv])]
                assert forked.exit_code == started.exit_code, (name, way, forked, started)
                assert comparable(forked.output) == comparable(started.output), (name, way)


async def test_programs_leave_nothing_behind_in_the_interpreter():
    async with Bubblewrap() as backend:
        box = await backend.start()
        await box.exec(["python3", "-c", "import sys, os, json; sys.path.clear(); os.environ.clear(); print = None; sys.modules.clear()"])
        assert (await box.exec(["python3", "-c", "import json; print(json.dumps(1))"])).output == b"1\n"


async def test_sets_print_the_same_in_every_box():
    program = ["python3", "-c", "print({str(i) for i in range(20)})"]
    async with Bubblewrap() as backend:
        outputs = {(await (await backend.start()).exec(argv)).output for argv in (program, program, ["env", *program])}
    assert len(outputs) == 1


async def test_variables_that_configure_python_are_obeyed():
    async with Bubblewrap() as backend:
        box = await backend.start({"lib/extra.py": b"print('found')"})
        assert (await box.exec(["python3", "-c", "import extra"], env={"PYTHONPATH": "lib"})).output == b"found\n"
