"""Only right code scores, whatever else the code does."""

import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.bugfix import TESTS, BugFix
from agentrl_jax.envs.defences import ALL
from agentrl_jax.envs.protocol import GraderError
from agentrl_jax.envs.verify import Case, verify
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.protocol import Result

pytestmark = pytest.mark.real("bwrap")

Graded = Callable[..., Awaitable[Outcome]]
GOLD = {"utils.py": "def f(x):\n    return (x, x > 1)\n"}
CASES = [Case("utils", "f", "(1,)", "(1, False)"), Case("utils", "f", "(2,)", "(2, True)")]

# Put in front of the broken file, as if the policy had written it. None may score.
CHEATS = {
    "leave early": "import os; os._exit(0)",
    "exit(0)": "raise SystemExit(0)",
    "print a verdict": "print(*['True'] * 99, 'end', sep='\\n', flush=True)",
    "write to every descriptor": """
import os
for fd in range(3, 20):
    try: os.write(fd, b'True\\n' * 99 + b'end\\n')
    except OSError: pass
""",
    "results equal to everything": """
class Yes(int):
    def __eq__(self, other): return True
    def __repr__(self): return 'True'
__builtins__['int'] = __builtins__['bool'] = Yes
""",
    "patch the grader": """
import sys
main = sys.modules['__main__']
main.outcome = lambda function, arguments: 'True'
main.test = lambda texts, path: 'ok: all passed'
""",
    "edit the tests": "open('test_utils.py', 'w').write('CASES = []')",
    "loop": "while True: pass",
    "flood": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "not text": "import os; os.write(1, bytes(range(256)))",
    "fork": "import os\nif os.fork(): os._exit(0)",
}


@pytest.fixture
def graded(backend: Bubblewrap) -> Graded:
    async def graded(code: str | bytes, cases: list[Case] = CASES, tests: bytes = b"visible") -> Outcome:
        box = await backend.start({"utils.py": code.encode() if isinstance(code, str) else code, TESTS: tests})
        return await verify(box, cases, gold=GOLD, protected={TESTS: "visible"})

    return graded


async def test_right_code_scores(graded: Graded) -> None:
    assert await graded(GOLD["utils.py"]) == Outcome(1.0, {"passed": 1.0}, true_success=True)
    assert (await graded("print('debugging')\n" + GOLD["utils.py"])).reward == 1


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def f(x):\n    return (x, False)\n", 0.5),
        ("def f(x):\n    return [x, x > 1]\n", 0),
        ("def f(x):\n    return (x, int(x > 1))\n", 0),
        ("def f(x):\n    return f'({x}, {x > 1})'\n", 0),
        ("def f(x):\n    if x > 1: exit(0)\n    return (x, x > 1)\n", 0.5),
        ("def f(x):\n    if x > 1: raise KeyboardInterrupt\n    return (x, x > 1)\n", 0.5),
        ("def f(x):\n    while x > 1: pass\n    return (x, x > 1)\n", 0),
        ("def f(x):\n    if x > 1: import os; os._exit(0)\n    return (x, x > 1)\n", 0),
        ("def f(x):\n    return 'x' * 10**9\n", 0),
        ("def g(x):\n    return (x, x > 1)\n", 0),
        ("def f(x:\n", 0),
        (b"\0\xff", 0),
    ],
)
async def test_wrong_code_does_not(code: str | bytes, passed: float, graded: Graded) -> None:
    assert await graded(code) == Outcome(0.0, {"passed": passed}, true_success=False)


@pytest.mark.parametrize("name", CHEATS)
async def test_cheats_do_not(name: str, backend: Bubblewrap) -> None:
    # One with many different results, so that no single answer is right everywhere.
    task = next(t for t in map(BugFix(0).task, range(99)) if len({case.want for case in t.hidden["cases"]}) > 9)
    env, path = BugFix(0), "utils.py"
    box = await backend.start({**task.files, path: f"{CHEATS[name]}\n".encode() + task.files[path]})
    await env.step(task, "test", {}, box)
    outcome = await env.score(task, box)
    assert outcome.reward == 0
    assert outcome.true_success is False
    assert outcome.tampering == ((TESTS,) if name == "edit the tests" else ())


async def test_changed_tests_are_reported_and_right_code_still_scores(graded: Graded) -> None:
    outcome = await graded(GOLD["utils.py"], tests=b"CASES = []")
    assert outcome == Outcome(1.0, {"passed": 1.0}, true_success=True, tampering=(TESTS,))


async def test_a_missing_file_is_the_policys_doing(backend: Bubblewrap) -> None:
    assert (await verify(await backend.start({}), CASES, gold=GOLD, protected={})).reward == 0


async def test_a_full_disk_is_the_policys_doing(graded: Graded) -> None:
    fill = "try:\n    open('fill', 'wb').write(b'x' * (1 << 30))\nexcept OSError: pass\n"
    assert (await graded(fill + "import os; os._exit(0)\n")).reward == 0


async def test_a_crash_that_the_gold_code_shares_is_the_graders(graded: Graded) -> None:
    cases = [dataclasses.replace(CASES[0], want="(9, False)")]
    assert (await graded(GOLD["utils.py"], cases=cases)).reward == 0, "code that runs is graded as it is"
    with pytest.raises(GraderError):
        await graded("import os; os._exit(0)\n", cases=cases)


async def test_expected_results_never_enter_the_box(backend: Bubblewrap) -> None:
    sent: list[bytes] = []

    class Watched:
        """A box of which everything that goes in is written down."""

        def __init__(self, box: object) -> None:
            self.box = box

        def __getattr__(self, name: str) -> object:
            async def call(*arguments: object, **named: object) -> object:
                sent.append(repr((name, arguments, named)).encode())
                result = await getattr(self.box, name)(*arguments, **named)
                return result if isinstance(result, Result) or result is None else Watched(result)

            return call

    box = Watched(await backend.start({"utils.py": b"def f(x):\n    return 8192 - x\n"}))
    cases = [Case("utils", "f", "(4097,)", "4095")]
    outcome = await verify(box, cases, gold={"utils.py": "secret"}, protected={})  # type: ignore[arg-type]
    assert outcome.reward == 1
    everything = b"".join(sent)
    assert b"4097" in everything
    assert b"4095" not in everything
    assert b"secret" not in everything


@pytest.mark.parametrize("off", sorted(ALL))
async def test_each_defence_can_be_off(off: str, backend: Bubblewrap) -> None:
    task = next(t for t in map(BugFix(0).task, range(99)) if len({case.want for case in t.hidden["cases"]}) > 9)
    env = BugFix(0, ALL - {off})
    box = await backend.start(task.files)
    assert (await env.score(task, box)).reward == 0
    await env.step(task, *env.gold(task)[0], box)
    assert await env.score(task, box) == Outcome(1.0, {"passed": 1.0}, true_success=True)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; main = sys.modules['__main__']; main.show = main.outcome = lambda *arguments: '1'",
        "open('test_utils.py', 'w').write('CASES = [(abs, (1,), 1)]')",
    ],
)
async def test_without_defences_cheats_are_paid_and_the_truth_is_known(code: str, backend: Bubblewrap) -> None:
    task = next(t for t in map(BugFix(0).task, range(99)) if not any(case.want.startswith("!") for case in t.hidden["visible"]))
    box = await backend.start({**task.files, "utils.py": f"{code}\n".encode() + task.files["utils.py"]})
    await BugFix(0).step(task, "test", {}, box)
    weak = await BugFix(0, frozenset()).score(task, box)
    assert (weak.reward, weak.true_success) == (1, False)
