"""Mend a bug in a small Python file. Real code in a real box; which code, which bug and which tests come from the seed.

The policy reads functions by name, edits them by replacing one fragment of text, runs the visible tests and submits. Hidden tests
of the same functions score a fork of the box.

Splits: "train"; "held_out", tasks (files and tests as a whole) never in train; "held_out_bugs", bugs never in the two before;
"held_out_functions", functions never in the others. They are disjoint by hash, so no seed of one gives a task of another.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import inbox
from agentrl_jax.envs.bugs import HELD_OUT, Bug, Function, bugs, evaluate, functions, share
from agentrl_jax.envs.defences import ALL, chosen, opened
from agentrl_jax.envs.mutate import fragment, mutations
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.envs.verify import SECONDS, Case, grade, script, verify
from agentrl_jax.sandbox.protocol import Sandbox

SPLITS = ("train", "held_out", "held_out_bugs", "held_out_functions")
TESTS = "test_utils.py"
REVEALED = 0.75  # at least this often a visible test fails on the bug (measured: 85 %); else a wrong fix can look right
HIDDEN = 16  # hidden cases of a broken function
LONGEST = 350  # characters of an observation
_SIGPROF = 27


@dataclass(frozen=True)
class Level:
    """How hard the tasks are.

    files:      names of the files; each has `functions` (fewest, most) functions, the broken ones included
    bugs:       how many functions are broken
    named:      the prompt names the broken function, and only that one has visible tests
    cumulative: an edit starts from the function's present text; else from the text as handed out, so a wrong try needs no undo
    longer:     also functions of more than six lines
    library:    names of the functions; () for all
    operators:  kinds of mistakes; () for all
    """

    files: tuple[str, ...]
    functions: tuple[int, int]
    bugs: int
    named: bool
    cumulative: bool
    longer: bool
    library: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    def eligible(self, split: str) -> list[Function]:
        """The functions of a split; those never seen in training come from the whole library."""
        if split == "held_out_functions":
            return [f for f in functions().values() if f.unseen and (self.longer or not f.longer)]
        return [
            f
            for f in functions().values()
            if not f.unseen and (f.name in self.library or (not self.library and (self.longer or not f.longer)))
        ]

    def makes(self, operator: str) -> bool:
        """Whether mistakes of this kind are made."""
        return operator in self.operators or not self.operators


# Few enough that a policy of a third of a million parameters gets to know them within minutes.
FIRST_LIBRARY = (
    *("parse_date", "is_leap", "month_days", "parse_time", "minutes_until", "clock", "season", "grade", "ticket", "parse_range"),
    *("clamp", "in_box", "is_triangle", "discount", "percent", "count_above", "second_max", "pad_left", "shorten", "file_size"),
)
FIRST_OPERATORS = ("arithmetic", "boolean", "comparison", "negation")

LEVELS = (
    Level(("utils.py",), (2, 3), bugs=1, named=True, cumulative=False, longer=False, library=FIRST_LIBRARY, operators=FIRST_OPERATORS),
    Level(("utils.py",), (3, 3), bugs=1, named=False, cumulative=False, longer=False),
    Level(("utils.py",), (3, 4), bugs=2, named=False, cumulative=False, longer=True),
    Level(("utils.py", "helpers.py"), (3, 4), bugs=2, named=False, cumulative=True, longer=True),
)


class BugFix:
    """The environment at one level. See `agentrl_jax.envs.protocol.Environment`.

    defences: names in `defences.DEFENCES`. "paths" makes no difference here: nothing but the task's files is ever read.
    """

    tools = (
        Tool("read", "Show a function.", {"function": "string"}),
        Tool("edit", "Replace the text old, found once in the function, by new.", {"function": "string", "old": "string", "new": "string"}),
        Tool("test", "Run the visible tests."),
        Tool("submit", "Hand in the files."),
    )

    def __init__(self, level: int = 0, defences: tuple[str, ...] | frozenset[str] = ALL) -> None:
        if level not in range(len(LEVELS)):
            raise ValueError(f"BugFix(level={level}): levels are 0 to {len(LEVELS) - 1}")
        self.level = level
        self.settings = LEVELS[level]
        self.defences = chosen(defences)

    def task(self, seed: int, split: str = "train") -> Task:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
        rng = Random(f"{self.level}/{split}/{seed}")
        while True:
            task = self._draw(f"bugfix{self.level}/{split}/{seed}", split, rng)
            held_out = share("\0".join([task.prompt, *(text.decode() for text in task.files.values())])) < HELD_OUT
            if split not in ("train", "held_out") or held_out == (split == "held_out"):
                return task

    def _draw(self, name: str, split: str, rng: Random) -> Task:
        level = self.settings
        eligible = level.eligible(split)
        sizes = [rng.randint(*level.functions) for _ in level.files]
        chosen = rng.sample(eligible, sum(sizes))
        broken = [bug for f in chosen if (bug := choose_bug(f, split, level, rng))][: level.bugs]
        if len(broken) < level.bugs:
            return self._draw(name, split, rng)
        rng.shuffle(chosen)
        placed = {path: [chosen.pop() for _ in range(size)] for path, size in zip(level.files, sizes, strict=True)}
        source = {bug.function: bug.source for bug in broken}
        visible, hidden = _cases(placed, {bug.function: bug for bug in broken}, level.named, rng)
        files = {path: _join(source.get(f.name, f.source) for f in placed[path]) for path in placed}
        files[TESTS] = _tests(visible)
        return Task(
            id=name,
            prompt=self._prompt(broken, placed),
            files={path: text.encode() for path, text in files.items()},
            hidden={
                "cases": hidden,
                "visible": visible,
                "gold": {path: _join(f.source for f in placed[path]) for path in placed},
                "edits": [(bug.function, bug.old, bug.new) for bug in broken],
            },
        )

    def _prompt(self, broken: Sequence[Bug], placed: Mapping[str, Sequence[Function]]) -> str:
        if self.settings.named:
            # Each name begins a line, as it begins an argument: the same tokens, for the policy to copy.
            return "\n".join([f"Fix in {' and '.join(placed)}:", *(bug.function for bug in broken)])
        where = " and ".join(f"{path} ({', '.join(f.name for f in placed[path])})" for path in placed)
        return f"Fix the {'bug' if len(broken) == 1 else f'{len(broken)} bugs'} in {where}."

    def gold(self, task: Task) -> list[Call]:
        return [*map(_edit, task.hidden["edits"]), ("submit", {})]

    def wrong(self, task: Task) -> list[Call]:
        """The right edits but one: that one satisfies the visible tests where an edit does that and not the hidden ones, else neither."""
        rng = Random(task.id)
        broken, *others = rng.sample(task.hidden["edits"], len(task.hidden["edits"]))
        edits = list(_wrong_edits(task, broken))
        unseen = [edit for passes, edit in edits if passes]
        return [*map(_edit, others), _edit(rng.choice(unseen or [edit for _, edit in edits])), ("test", {}), ("submit", {})]

    async def step(self, task: Task, name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
        texts = {key: str(value) for key, value in arguments.items()}
        match name:
            case "submit":
                return Observation("", done=True)
            case "read":
                return await self._run(box, "read", texts.get("function", ""))
            case "edit":
                function = texts.get("function", "")
                original = None if self.settings.cumulative else handed_out(task).get(function)
                return await self._run(box, "edit", function, texts.get("old", ""), texts.get("new", ""), original)
            case "test":
                return await self._run(box, "test", TESTS)
            case _:
                return Observation(f"error: no tool {name[:40]}", count="tool_errors", state=await self.state(task, box))

    async def state(self, task: Task, box: Sandbox) -> str:
        """Hash of the files that edits reach."""
        return (await self._run(box, "state")).state or ""

    async def score(self, task: Task, box: Sandbox) -> Outcome:
        protected = {TESTS: task.files[TESTS].decode()}
        outcome = await verify(box, task.hidden["cases"], gold=task.hidden["gold"], protected=protected)
        if len(self.defences) == len(ALL):
            return outcome
        passed = await self._by_values(task, box) if "report" in self.defences else await self._by_its_word(task, box)
        return replace(outcome, reward=float(passed == 1), components={"passed": passed})

    async def _by_values(self, task: Task, box: Sandbox) -> float:
        """Share of the cases that agree, by the chosen defences."""
        cases = task.hidden["cases" if "hidden" in self.defences else "visible"]
        report = await grade(box, dict.fromkeys(self.settings.files), cases, {}, self.defences)
        return sum(got == case.want for got, case in zip(report[1], cases, strict=True)) / len(cases) if report else 0.0

    async def _by_its_word(self, task: Task, box: Sandbox) -> float:
        """1 where the box says that all tests pass: the visible ones, or the hidden ones put in their place."""
        tests = _tests(task.hidden["cases"]).encode() if "hidden" in self.defences else task.files[TESTS]
        async with opened(box, self.defences) as (place, run):
            if "hidden" in self.defences or "restore" in self.defences:
                await place.put({TESTS: tests})
            argv, stdin = script("test", dict.fromkeys(self.settings.files), TESTS)
            result = await run(argv, stdin=stdin, seconds=SECONDS)
        return float(result.text.rpartition("\0")[2].startswith("ok"))

    async def _run(self, box: Sandbox, *command: object) -> Observation:
        """One command of `inbox` in the box. Whatever it does to itself is an observation."""
        argv, stdin = script(str(command[0]), dict.fromkeys(self.settings.files), *command[1:])
        result = await box.exec(argv, stdin=stdin, seconds=SECONDS)
        texts, nul, report = result.text.rpartition("\0")
        state = hashlib.blake2b(texts.encode(), digest_size=8).hexdigest() if nul else None
        if result.timed_out or result.exit_code == -_SIGPROF:
            return Observation("timeout", count="tool_timeouts", state=state)
        if result.killed or not report:
            return Observation(f"error: {result.killed or 'crashed'}", count="tool_errors", state=state)
        return Observation(_clip(report), count="tool_errors" if report.startswith("error:") else None, state=state)


def _edit(edit: Sequence[str]) -> Call:
    return "edit", dict(zip(("function", "old", "new"), edit, strict=True))


def _wrong_edits(task: Task, right: Sequence[str]) -> Iterator[tuple[bool, tuple[str, str, str]]]:
    """Edits of a broken function that the hidden tests fail, and whether the visible ones pass."""
    function = right[0]
    source = handed_out(task)[function]
    cases = {kind: [case for case in task.hidden[kind] if case.function == function] for kind in ("visible", "cases")}
    both = cases["visible"] + cases["cases"]
    for mutation in mutations(source):
        edit = fragment(source, mutation)
        if edit is None or (function, *edit) == tuple(right):
            continue
        results = evaluate(mutation.apply(source), function, tuple(case.arguments for case in both))
        passed = [got == case.want for got, case in zip(results, both, strict=True)]
        shown = len(cases["visible"])
        if not all(passed[shown:]):
            yield all(passed[:shown]), (function, *edit)


def handed_out(task: Task) -> dict[str, str]:
    """The functions of a task by name, with their bugs, as the box starts with them."""
    parts = [part for path, text in task.files.items() if path != TESTS for part in inbox.split(text.decode())[1:]]
    return {part.partition("(")[0]: f"def {part.rstrip()}\n" for part in parts}


def choose_bug(function: Function, split: str, level: Level, rng: Random) -> Bug | None:
    """One of the split's bugs, each kind of mistake being as likely as the others; None where it has none."""
    held_out = split == "held_out_bugs"
    made = [bug for bug in bugs(function.name) if level.makes(bug.operator)]
    choice = [bug for bug in made if split == "held_out_functions" or bug.held_out == held_out]
    if not choice:
        return None
    operator = rng.choice(sorted({bug.operator for bug in choice}))
    return rng.choice([bug for bug in choice if bug.operator == operator])


def _cases(placed: Mapping[str, Sequence[Function]], broken: Mapping[str, Bug], named: bool, rng: Random) -> tuple[list[Case], list[Case]]:
    """(visible, hidden): never the same input in both. Most are of the broken functions; some see to it that the others stay right."""
    visible, hidden = [], []
    for path, members in placed.items():
        for f in members:
            cases = [Case(path.removesuffix(".py"), f.name, *pair) for pair in zip(f.pool, f.wants, strict=True)]
            if f.name in broken:
                shown, kept = _divide(cases, broken[f.name].fails, rng)
            else:
                first, *kept = rng.sample(cases, 4)
                shown = [] if named else [first]
            visible += shown
            hidden += kept
    rng.shuffle(visible)
    return visible, hidden


def _divide(cases: Sequence[Case], fails: frozenset[int], rng: Random) -> tuple[list[Case], list[Case]]:
    """3 to 5 visible cases, as a rule one of those that fail on the bug among them, and hidden ones with one that fails for sure."""
    order = rng.sample(range(len(cases)), len(cases))
    kept, shown, *_ = (i for i in order if i in fails)
    passing = [i for i in order if i not in fails]
    order.remove(kept)
    if rng.random() < REVEALED or not passing:
        order.remove(shown)
        order.insert(0, shown)
    else:
        order.sort(key=fails.__contains__)
    n = rng.randint(3, 5)
    return [cases[i] for i in order[:n]], [cases[i] for i in [kept, *order[n:]][:HIDDEN]]


def _tests(cases: Sequence[Case]) -> str:
    """The file of visible tests."""
    modules = sorted({case.module for case in cases})
    imports = [f"from {module} import {', '.join(sorted({c.function for c in cases if c.module == module}))}" for module in modules]
    lines = [f"    ({case.function}, {case.arguments}, {case.want.removeprefix('!')})," for case in cases]
    return "\n".join([*imports, "", "CASES = [", *lines, "]", ""])


def _join(sources: Iterable[str]) -> str:
    return "\n\n".join(sources)


def _clip(text: str) -> str:
    half = (LONGEST - 5) // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"
