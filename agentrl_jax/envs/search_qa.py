"""Answer questions by searching. A real search engine over real text; which question, from the seed.

The policy searches, reads passages, and hands in a short answer. Questions are about the standard library (`questions`), some of
which take several passages, one leading to the next; or they are those of a file (`qa_files`).

The search runs on the host: the policy runs no code, so there is nothing to keep it from. The box holds what the state of an episode
is: which passages were seen, and the answer. Answers are compared on the host; the key never enters prompt or box. The reward is exact
match, never F1 or "contains": those pay for long answers that name everything.

Splits: "train"; "held_out": facts that no question in train asks for. The ids of tasks hold a digest of text and questions, since both
are those of the Python that runs.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import qa_files
from agentrl_jax.envs.answers import contains, exact, f1, normalised
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.envs.questions import Exam, Question, by_kind, standard_exam
from agentrl_jax.envs.retrieval import Index, load_engine
from agentrl_jax.sandbox.protocol import Sandbox, SandboxError

SPLITS = ("train", "held_out")
DEFENCES: Mapping[str, str] = {
    "exact": "only the answer itself is right; else any text that contains it",
    "short": "an answer of more than `ANSWER` characters is refused; else it counts, and is named in `tampering`",
}
ALL = frozenset(DEFENCES)
TOP = 5  # passages that a search shows
SNIPPET = 160  # characters of each
LONGEST = 1000  # characters of an observation, search results aside: these are `TOP` lines of a title and a snippet
TITLE = 80  # characters of a title that a search shows
ANSWER = 200  # characters of an answer
_SEEN, _ANSWER = "seen", "answer"  # files in the box

logger = logging.getLogger(__name__)


class SearchQA:
    """The environment. See `agentrl_jax.envs.protocol.Environment`.

    questions, corpus: paths of JSONL files, see `qa_files`; "" for questions about the standard library
    defences:          names out of `DEFENCES`; one is left out to study what a policy makes of it. `true_success` goes by all.
    """

    tools = (
        Tool("search", "Find passages by words.", {"query": "string"}),
        Tool("read", "Show a passage, by its title in [].", {"title": "string"}),
        Tool("answer", "Hand in the answer: a name or value, no sentence.", {"text": "string"}),
    )

    def __init__(self, questions: str = "", corpus: str = "", defences: tuple[str, ...] | frozenset[str] = ALL) -> None:
        """Raises ValueError for files that cannot be used and unknown defences, ImportError where the search engine is not installed."""
        if unknown := sorted(set(defences) - DEFENCES.keys()):
            raise ValueError(f"no defence {', '.join(unknown)}: there are {', '.join(DEFENCES)}")
        if corpus and not questions:
            raise ValueError(f"corpus {corpus}: needs questions; those about the standard library have their own text")
        self.questions = questions
        self.corpus = corpus
        self.defences = tuple(name for name in DEFENCES if name in defences)
        load_engine()
        if questions:
            self._exam  # noqa: B018 - bad files should be known at once

    @cached_property
    def _exam(self) -> Exam:
        if not self.questions:
            return standard_exam()
        loaded = qa_files.load(Path(self.questions), Path(self.corpus) if self.corpus else None)
        for error in loaded.errors:
            logger.warning("left out: %s", error)
        return loaded.exam

    @cached_property
    def _index(self) -> Index:
        return Index(self._exam.corpus)

    @cached_property
    def _splits(self) -> dict[str, dict[str, list[Question]]]:
        """Split -> kind -> questions."""
        return {name: by_kind([q for q in self._exam.questions if q.held_out == (name == "held_out")]) for name in SPLITS}

    def task(self, seed: int, split: str = "train") -> Task:
        """A question of the split; kinds of which there are many come up more often, but less than in proportion."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
        kinds = self._splits[split]
        if not kinds:
            raise ValueError(f"{self.questions}: none of its {len(self._exam.questions)} questions falls to {split}; bring more")
        rng = Random(f"{split}/{seed}")
        while True:
            kind = rng.choices(list(kinds), [len(questions) ** 0.5 for questions in kinds.values()])[0]
            question = rng.choice(kinds[kind])
            if not self._exam.selective or self._can_be_found(question):
                return self._task(f"search_qa/{self._exam.id}/{split}/{seed}", question)

    def _can_be_found(self, question: Question) -> bool:
        return all(any(p.id == step.passage for p in self._index.search(step.query, TOP)) for step in question.steps)

    def _task(self, name: str, question: Question) -> Task:
        passages = "".join(f"{step.passage}\n" for step in question.steps)
        return Task(
            id=name,
            prompt=question.text,
            files={},
            hidden={"question": question},
            privileged=f"{passages}Answer: {question.answers[0]}",
        )

    def gold(self, task: Task) -> list[Call]:
        """The searches that find the passages, one after the other, and the answer."""
        question: Question = task.hidden["question"]
        return [*_searches(question), ("answer", {"text": question.answers[0]})]

    def wrong(self, task: Task) -> list[Call]:
        """The same searches, and the answer of another question of the kind; a number
        for a number, and one that a passage found also names, where there is one."""
        question: Question = task.hidden["question"]
        right = set(map(normalised, question.answers))
        number = question.answers[0].isdecimal()
        others = {a: key for a, key in self._answers[question.kind].items() if key not in right and a.isdecimal() == number}
        found = normalised(" ".join(f"{p.id} {p.text}" for step in question.steps for p in self._index.search(step.query, TOP)))
        near = [answer for answer, key in others.items() if f" {key} " in f" {found} "]
        return [*_searches(question), ("answer", {"text": Random(task.id).choice(near or list(others) or ["unknown"])})]

    @cached_property
    def _answers(self) -> dict[str, dict[str, str]]:
        """Kind -> its answers -> each normalised."""
        return {kind: {q.answers[0]: normalised(q.answers[0]) for q in asked} for kind, asked in by_kind(self._exam.questions).items()}

    async def step(self, task: Task, name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
        texts = {key: str(value) for key, value in arguments.items()}
        match name:
            case "search":
                found = await asyncio.to_thread(self._index.search, texts.get("query", ""), TOP)
                lines = [f"[{p.id[:TITLE]}] {' '.join(p.text.split())[:SNIPPET]}" for p in found]
                state = await self._saw(task, box, [f"found {p.id}" for p in found])
                return Observation("\n".join(lines) or "nothing found", state=state)
            case "read":
                title = texts.get("title", "").strip()
                passage = self._titles.get(title) or self._titles.get(title.removeprefix("[").removesuffix("]"))
                if passage is None:
                    return await self._error(task, box, "no passage of this title")
                return Observation(self._exam.corpus.by_id[passage].text[:LONGEST], state=await self._saw(task, box, [f"read {passage}"]))
            case "answer":
                text = texts.get("text", "")
                if "short" in self.defences and len(text) > ANSWER:
                    return await self._error(task, box, f"an answer has at most {ANSWER} characters")
                await _put(box, _ANSWER, text.encode("utf-8", "replace"))
                return Observation("", done=True)
            case _:
                return await self._error(task, box, "no such tool")

    @cached_property
    def _titles(self) -> dict[str, str]:
        """Titles, as a search shows them and in full -> ids. Of those that begin alike, the cut title means the first."""
        titles = [p.id for p in self._exam.corpus.passages]
        return {title[:TITLE]: title for title in reversed(titles)} | {title: title for title in titles}

    async def state(self, task: Task, box: Sandbox) -> str:
        """Hash of the question and of what was seen, in whatever order."""
        return _key(task, await _seen(box))

    async def score(self, task: Task, box: Sandbox) -> Outcome:
        """Reward 1 for the right answer, else 0. Components: "exact", "f1", and "found", the share of the passages that lead to the
        answer that a search showed. Nothing in the box is run. Raises SandboxError only."""
        question: Question = task.hidden["question"]
        given = await box.get(_ANSWER)
        answer = (given or b"").decode("utf-8", "replace")
        seen = {line.partition(" ")[2] for line in await _seen(box)}
        right = exact(answer, question.answers)
        rewarded = right if "exact" in self.defences else contains(answer, question.answers)
        components = {"exact": float(right), "f1": f1(answer, question.answers)}
        if question.steps:
            components["found"] = sum(step.passage in seen for step in question.steps) / len(question.steps)
        return Outcome(float(rewarded), components, true_success=right, tampering=("long answer",) if len(answer) > ANSWER else ())

    async def _error(self, task: Task, box: Sandbox, message: str) -> Observation:
        return Observation(f"error: {message}", count="tool_errors", state=await self.state(task, box))

    async def _saw(self, task: Task, box: Sandbox, new: Iterable[str]) -> str:
        """Note what was seen; the key of the state after it."""
        before = await _seen(box)
        seen = before | set(new)
        if seen != before:
            await _put(box, _SEEN, "\n".join(sorted(seen)).encode())
        return _key(task, seen)


def _searches(question: Question) -> list[Call]:
    return [("search", {"query": step.query}) for step in question.steps]


def _key(task: Task, seen: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join([task.prompt, *sorted(seen)]).encode(), digest_size=8).hexdigest()


async def _seen(box: Sandbox) -> set[str]:
    text = await box.get(_SEEN)
    return set(text.decode("utf-8", "replace").split("\n")) if text else set()


async def _put(box: Sandbox, path: str, content: bytes) -> None:
    """Write a file that nothing in the box can be in the way of."""
    result = await box.put({path: content})
    if result.exit_code != 0:
        raise SandboxError(f"{path} cannot be written to the box: {result.text[:200]}")
