"""Questions about the standard library that only its text answers, each with the passages that lead to the answer.

A question asks for a property of a thing. A thing is named, or told by its documentation, or reached from another thing ("the base
class of ...", "the exception that ... raises"); each step is a passage to be found. The relations are read from syntax trees
(`corpus`), so each question has one answer. Left out are questions that hold their answer, those of several steps where an earlier
passage tells it, and the surplus of answers that come up too often to be worth searching for.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from agentrl_jax.envs.answers import normalised
from agentrl_jax.envs.corpus import Corpus, Definition, standard_corpus, standard_library

HELD_OUT = 0.1  # share of the facts that only held-out questions ask for
MOST = 10  # questions of one kind that have the same answer
WAYS = 2  # ways in which a thing is reached through others, of each sort


@dataclass(frozen=True)
class Step:
    """A passage to be found. `query` finds it, and is known from the question or the passage before."""

    query: str
    passage: str


@dataclass(frozen=True)
class Question:
    """A question with its answer key.

    text:    what the policy reads
    answers: right ones; the first is the usual one
    steps:   what leads to the answer, in order; () where that is not known
    kind:    questions of a kind have answers of a kind: the fact asked for and the number of steps, as "base/2"
    fact:    what the answer tells; those with the same fact are in the same split
    """

    text: str
    answers: tuple[str, ...]
    steps: tuple[Step, ...]
    kind: str
    fact: str

    @cached_property
    def held_out(self) -> bool:
        return share(self.fact) < HELD_OUT


@dataclass(frozen=True)
class Exam:
    """Questions, and the text that answers them.

    selective: pass over questions whose steps the search does not find: right for generated ones, wrong for those that somebody chose
    """

    corpus: Corpus
    questions: tuple[Question, ...]
    selective: bool = True

    @cached_property
    def id(self) -> str:
        """Name and digest: another text, or other questions, have another."""
        key = "\0".join([self.corpus.digest, *(f"{q.text}\0{q.answers}" for q in self.questions)])
        return f"{self.corpus.name}-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def share(text: str) -> float:
    """A number from 0 to 1 that the text decides."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64


@cache
def standard_exam() -> Exam:
    """All questions about the standard library, over its corpus."""
    known = standard_library()
    corpus = standard_corpus()
    texts = {p.id: normalised(f"{p.id} {p.text}") for p in corpus.passages}
    return Exam(corpus, tuple(_balanced(q for q in _questions(known) if _needs_search(q, texts))))


@dataclass(frozen=True)
class _Thing:
    """A definition as a question speaks of it."""

    phrase: str
    definition: Definition
    steps: tuple[Step, ...]


def _questions(known: Mapping[str, Definition]) -> Iterator[Question]:
    summaries = Counter(normalised(d.summary) for d in known.values())
    told = {d.id: d.summary for d in known.values() if d.summary and summaries[normalised(d.summary)] == 1}
    for key, summary in told.items():
        d = known[key]
        names = dict.fromkeys((d.name, d.id, d.name.rpartition(".")[2]))
        yield Question(f'Which {d.kind} is documented as "{summary}"?', tuple(names), (Step(summary, key),), "name/1", f"name of {key}")
    for thing in _things(known, told):
        yield from _asked(thing)


def _things(known: Mapping[str, Definition], told: Mapping[str, str]) -> Iterator[_Thing]:
    """Definitions as named, as told, and as reached from those."""
    named = {d.id: list(_direct(d, told)) for d in known.values()}
    leads: defaultdict[str, list[str]] = defaultdict(list)
    methods: defaultdict[str, list[str]] = defaultdict(list)
    for d in known.values():
        leads[d.target].append(d.id)
        if d.kind == "method":
            methods[d.id.rpartition(".")[0]].append(d.id)
    for d in known.values():
        last, owner = d.name.rpartition(".")[2], d.id.rpartition(".")[0]
        if d.kind == "method" and owner in told:
            yield _Thing(f'the method {last} of the class documented as "{told[owner]}"', d, (Step(told[owner], owner), _by_name(d)))
        for method in _some(m for m in methods[d.id] if m in told):
            thing = _Thing(f'the class with the method documented as "{told[method]}"', d, (Step(told[method], method), _by_name(d)))
            named[d.id].append(thing)
    for d in known.values():
        yield from named[d.id]
        for source in map(known.__getitem__, _some(leads[d.id])):
            for thing in named[source.id]:
                phrase = f"the base class of {thing.phrase}" if source.base else f"the exception that {thing.phrase} raises"
                yield _Thing(phrase, d, (*thing.steps, Step(source.base or source.raises, d.id)))
        if d.kind == "class" and d.target:
            own = {known[m].name for m in methods[d.id]}
            inherited = [known[m] for m in methods[d.target] if f"{d.name}.{known[m].name.rpartition('.')[2]}" not in own]
            yield from _inherited(d, named[d.id], inherited)


def _direct(d: Definition, told: Mapping[str, str]) -> Iterator[_Thing]:
    yield _Thing(f"the {d.kind} {d.id}", d, (_by_name(d),))
    if d.id in told:
        yield _Thing(f'the {d.kind} documented as "{told[d.id]}"', d, (Step(told[d.id], d.id),))


def _inherited(d: Definition, things: Iterable[_Thing], methods: Iterable[Definition]) -> Iterator[_Thing]:
    """Methods of the base class that `d` does not define itself."""
    for method in methods:
        name = method.name.rpartition(".")[2]
        if method.defaults or method.raises:
            for thing in things:
                yield _Thing(f"the method {name} that {thing.phrase} inherits", method, (*thing.steps, Step(f"{d.base}.{name}", method.id)))


def _by_name(d: Definition) -> Step:
    return Step(d.id, d.id)


def _some(ids: Iterable[str]) -> list[str]:
    """A few of them, always the same."""
    return sorted(ids, key=share)[:WAYS]


def _asked(thing: _Thing) -> Iterator[Question]:
    """What can be asked of a thing. The modules of methods go without saying."""
    d = thing.definition
    if d.kind != "method":
        yield _question(f"In which module is {thing.phrase} defined?", [d.module], thing, "module")
    if d.base:
        yield _question(f"What is the base class of {thing.phrase}?", _spellings(d.base, d.target), thing, "base")
    if d.raises:
        yield _question(f"Which exception does {thing.phrase} raise?", _spellings(d.raises, d.target), thing, "raises")
    for name, default in d.defaults.items():
        answers = [default, default.rpartition(".")[2]] if default.replace(".", "").isidentifier() else [default]
        yield _question(f"What is the default of the parameter {name} of {thing.phrase}?", answers, thing, "default", name)


def _question(text: str, answers: Iterable[str], thing: _Thing, fact: str, of: str = "") -> Question:
    return Question(text, tuple(dict.fromkeys(answers)), thing.steps, f"{fact}/{len(thing.steps)}", f"{fact} {of} of {thing.definition.id}")


def _spellings(written: str, target: str) -> list[str]:
    """A class as written, without its module, and with it."""
    return [written, written.rpartition(".")[2], *([target, target.rpartition(".")[2]] if target else [])]


def _needs_search(question: Question, texts: Mapping[str, str]) -> bool:
    """The question does not hold its answer, and of several passages none but the last does."""
    read = [normalised(question.text), *(texts[step.passage] for step in question.steps[:-1])]
    keys = [normalised(answer) for answer in question.answers]
    return all(keys) and not any(key in text for key in keys for text in read)


def _balanced(questions: Iterable[Question]) -> list[Question]:
    """Each text once, and of each kind at most `MOST` with the same answer."""
    chosen: dict[str, Question] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for question in sorted(questions, key=lambda q: share(q.text)):
        key = question.kind, normalised(question.answers[0])
        if question.text not in chosen and counts[key] < MOST:
            counts[key] += 1
            chosen[question.text] = question
    return list(chosen.values())


def by_kind(questions: Sequence[Question]) -> dict[str, list[Question]]:
    """Questions by kind, kinds in order of their names."""
    kinds: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        kinds[question.kind].append(question)
    return dict(sorted(kinds.items()))
