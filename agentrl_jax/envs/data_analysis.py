"""Answer a question about tables with a Python interpreter that keeps its variables. Tables, question and answer come from the seed.

The policy runs cells in its box, over CSV files and SQLite databases, and submits an answer: as text, or as what its code wrote to
answer.txt. The answer was worked out on the host, from the records that the files were made of; it is never in the box.

Splits: "train"; "held_out", tasks (files and question) never in train. They are disjoint by hash.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import notebook, readings_questions, sales_questions
from agentrl_jax.envs.bugs import HELD_OUT, share
from agentrl_jax.envs.expected import ALL, DEFENCES, LONGEST, Expected
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.envs.tables import Question
from agentrl_jax.sandbox.protocol import Limits, Sandbox

SPLITS = ("train", "held_out")
LEVELS = tuple(sales + others for sales, others in zip(sales_questions.LEVELS, readings_questions.LEVELS, strict=True))
"""Kinds of questions: one clean file and one step; files as people leave them, or two; several steps, one of them easily missed."""
ANSWER = "answer.txt"
SECONDS = 10.0  # of one cell
SHOWN = 1000  # characters of an observation
LIMITS = Limits(memory=1 << 30, processes=32)  # numerical libraries take address space
WRITE = f"open('{ANSWER}', 'w').write(str(result))"


class DataAnalysis:
    """The environment at one level. See `agentrl_jax.envs.protocol.Environment`.

    defences: names in `expected.DEFENCES`: what the answer is checked for. The reward follows them, `true_success` all there are.
    Cells can import what the backend's root has: `Bubblewrap(packages=("numpy", "pandas"))`.
    """

    tools = (
        Tool("python", "Run a cell of Python; variables stay.", {"code": "string"}),
        Tool("submit", f"Hand in the answer; if it is empty, what {ANSWER} holds.", {"answer": "string"}),
    )

    def __init__(self, level: int = 0, defences: tuple[str, ...] | frozenset[str] = ALL) -> None:
        if level not in range(len(LEVELS)):
            raise ValueError(f"DataAnalysis(level={level}): levels are 0 to {len(LEVELS) - 1}")
        if unknown := sorted(set(defences) - ALL):
            raise ValueError(f"DataAnalysis: no defence {', '.join(unknown)}: there are {', '.join(DEFENCES)}")
        self.level = level
        self.defences = tuple(name for name in DEFENCES if name in defences)

    def task(self, seed: int, split: str = "train") -> Task:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
        rng = Random(f"analysis{self.level}/{split}/{seed}")
        kind = rng.choice(LEVELS[self.level])
        while True:
            question = kind(rng)
            right, mistaken = question.value(False), question.value(True)
            if right is None or mistaken is None:
                continue
            expected = Expected(right, question.tolerance)
            if expected.matches(Expected(mistaken).text):  # someone who makes the mistake must not be right by luck
                continue
            task = _task(f"analysis{self.level}/{split}/{seed}", kind.__name__, question, expected)
            if held_out(task) == (split == "held_out"):
                return task

    def gold(self, task: Task) -> list[Call]:
        return _calls(task.hidden["load"], task.hidden["code"])

    def wrong(self, task: Task) -> list[Call]:
        """The right way but for one thing overlooked: all runs, and a plausible answer comes of it."""
        return _calls(task.hidden["load"], task.hidden["code"].replace(*task.hidden["slip"]))

    async def step(self, task: Task, name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
        match name:
            case "python":
                return await notebook.run_cell(box, str(arguments.get("code", "")), seconds=SECONDS, longest=SHOWN)
            case "submit":
                return await self._submit(str(arguments.get("answer", "")), task, box)
            case _:
                return Observation(f"error: no tool {name[:40]}", count="tool_errors", state=await self.state(task, box))

    async def state(self, task: Task, box: Sandbox) -> str:
        """Key of the files and of the cells that the interpreter has run, but those that only look at something."""
        return await notebook.state(box, seconds=SECONDS)

    async def score(self, task: Task, box: Sandbox) -> Outcome:
        """1 for the right answer in answer.txt. Nothing runs in the box for it."""
        data = await box.get(ANSWER, limit=4 * LONGEST + 100)
        text = (data or b"").decode(errors="replace")
        expected: Expected = task.hidden["expected"]
        paid, right = expected.matches(text, self.defences), expected.matches(text)
        return Outcome(float(paid), {"answered": float(bool(text.strip()))}, true_success=right)

    async def _submit(self, answer: str, task: Task, box: Sandbox) -> Observation:
        if not answer.strip():
            return Observation("", done=True)
        result = await box.put({ANSWER: answer[: LONGEST + 1].encode()})
        if result.exit_code != 0:
            why = notebook.clip(result.text.strip(), SHOWN)
            return Observation(f"error: {ANSWER} cannot be written: {why}", count="tool_errors", state=await self.state(task, box))
        return Observation("", done=True)


def held_out(task: Task) -> bool:
    """Which split a task belongs to; its prompt and files decide."""
    return share("\0".join([task.prompt, *(data.hex() for data in task.files.values())])) < HELD_OUT


def _task(name: str, kind: str, question: Question, expected: Expected) -> Task:
    files = " and ".join(question.files)
    return Task(
        id=name,
        prompt=f"{question.ask}\nFiles: {files}. {expected.form}",
        files=question.files,
        hidden={"kind": kind, "expected": expected, "load": question.load, "code": question.code, "slip": question.slip},
        limits=LIMITS,
        privileged=expected.text,
    )


def _calls(load: str, code: str) -> list[Call]:
    cells = load, f"{code}\nresult", WRITE
    return [*(("python", {"code": cell}) for cell in cells), ("submit", {"answer": ""})]
