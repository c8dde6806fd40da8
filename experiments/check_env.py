"""Does the environment reward what it should? Every level and split of `BugFix`, in real boxes.

    python -m experiments.check_env [tasks per row: 12]

Of each task the right fix must score 1, and handing in at once, a wrong fix and each of some cheats 0. The table shows what they
scored on average, how many of the wrong fixes the visible tests let pass, and how often the scripted expert succeeds. Exit code 1 if
anything is not as it must be. About two minutes on two cores.
"""

import asyncio
import sys
import time
from collections.abc import Generator, Iterable
from random import Random

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.bugfix import LEVELS, SPLITS, BugFix
from agentrl_jax.envs.bugs import bugs, functions
from agentrl_jax.envs.expert import expert
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.protocol import Backend

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
AT_ONCE = 8  # boxes
SEEDS = 2000  # in which different tasks are counted


def scripted(calls: Iterable[Call]) -> Generator[Call, Observation, None]:
    """Calls that wait for no answer."""
    for call in calls:  # noqa: UP028 - `yield from` a list cannot be sent to
        yield call


async def play(backend: Backend, env: BugFix, task: Task, script: Generator[Call, Observation, None]) -> tuple[Outcome, list[str]]:
    """The outcome of a script that ends in submit, and what it read."""
    box = await backend.start(task.files)
    try:
        texts = []
        call = next(script)
        while not (observation := await env.step(task, *call, box)).done:
            texts.append(observation.text)
            call = script.send(observation)
        return await env.score(task, box), texts
    finally:
        await box.close()


async def cheat(backend: Backend, env: BugFix, task: Task, code: str) -> Outcome:
    """The outcome of the task's files with `code` in front of the first."""
    path = env.settings.files[0]
    box = await backend.start({**task.files, path: f"{code}\n".encode() + task.files[path]})
    try:
        await env.step(task, "test", {}, box)
        return await env.score(task, box)
    finally:
        await box.close()


async def row(backend: Backend, level: int, split: str, tasks: int) -> list[float]:
    """Shares over tasks: right fix, nothing, a cheat and wrong fix rewarded; wrong fix passed by the visible tests; expert rewarded."""
    env = BugFix(level)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> tuple[float, float, float, float, bool, float]:
        task, rng = env.task(seed, split), Random(seed)
        scripts = [scripted(env.gold(task)), scripted([("submit", {})]), scripted(env.wrong(task)), expert(env, task, rng)]
        async with gate:
            (gold, _), (null, _), (wrong, read), (tried, _) = [await play(backend, env, task, script) for script in scripts]
            cheated = await cheat(backend, env, task, list(CHEATS.values())[seed % len(CHEATS)])
        return gold.reward, null.reward, cheated.reward, wrong.reward, read[-1].startswith("ok"), tried.reward

    results = await asyncio.gather(*(one(seed) for seed in range(tasks)))
    return [sum(column) / tasks for column in zip(*results, strict=True)]


async def main(tasks: int) -> int:
    began = time.perf_counter()
    count = sum(len(bugs(name)) for name in functions())
    print(f"{len(functions())} functions, {count} bugs, found in {time.perf_counter() - began:.1f} s")
    for level in range(len(LEVELS)):
        began = time.perf_counter()
        drawn = (BugFix(level).task(seed) for seed in range(SEEDS))
        different = len({(task.prompt, *task.files.values()) for task in drawn})
        print(f"level {level}: {different} different tasks in {SEEDS} seeds, {(time.perf_counter() - began) / SEEDS * 1e3:.2f} ms a task")
    print(f"\n{'level':>5} {'split':<18} {'tasks':>5} {'right':>7} {'nothing':>7} {'cheat':>7} {'wrong':>7} {'passed':>7} {'expert':>7}")
    bad = 0
    async with Bubblewrap() as backend:
        for level in range(len(LEVELS)):
            for split in SPLITS:
                shares = await row(backend, level, split, tasks)
                wrong = shares[:4] != [1, 0, 0, 0]
                bad += wrong
                print(
                    f"{level:>5} {split:<18} {tasks:>5} " + " ".join(f"{share:>7.2f}" for share in shares) + "  WRONG" * wrong, flush=True
                )
    print(f"\n{bad} rows are not as they must be: right 1, nothing, cheat and wrong 0" if bad else "\nall rows are as they must be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)))
