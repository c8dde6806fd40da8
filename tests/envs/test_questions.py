"""Questions about the standard library against what Python itself says of it."""

import importlib
import inspect
import operator
import re
from collections import Counter
from collections.abc import Iterator
from functools import reduce

from agentrl_jax.envs.answers import exact, normalised
from agentrl_jax.envs.corpus import LONGEST, standard_corpus, standard_library
from agentrl_jax.envs.questions import MOST, Question, by_kind, standard_exam

# Modules that every platform can import, without effects.
IMPORTED = (
    "argparse",
    "calendar",
    "collections",
    "configparser",
    "csv",
    "email",
    "http",
    "json",
    "logging",
    "socketserver",
    "tarfile",
    "urllib",
)


def questions(kind: str = "") -> list[Question]:
    return [q for q in standard_exam().questions if q.kind.startswith(kind)]


def target(question: Question) -> object | None:
    """The object that the last step of a question leads to; None where its module is not imported here."""
    d = standard_library()[question.steps[-1].passage]
    if d.module.partition(".")[0] not in IMPORTED:
        return None
    try:
        return reduce(getattr, d.name.split("."), importlib.import_module(d.module))
    except (ImportError, AttributeError):  # only on another platform, or under a condition
        return None


def told(kind: str) -> Iterator[tuple[Question, object]]:
    pairs = [(q, thing) for q in questions(kind) if (thing := target(q)) is not None]
    assert len(pairs) > 30
    yield from pairs


def test_there_are_thousands_and_of_many_steps() -> None:
    assert len(standard_corpus().passages) > 5000
    assert len({q.text for q in questions()}) == len(questions()) > 4000
    assert Counter(len(q.steps) for q in questions()).keys() == {1, 2, 3}
    assert sum(len(q.steps) > 1 for q in questions()) > 500
    assert 0.05 < sum(q.held_out for q in questions()) / len(questions()) < 0.15


def test_passages_are_short_and_have_titles_of_their_own() -> None:
    corpus = standard_corpus()
    assert len(corpus.by_id) == len(corpus.passages)
    assert all(0 < len(p.text) <= LONGEST for p in corpus.passages)


def test_no_question_tells_its_answer_and_no_passage_but_the_last() -> None:
    by_id = standard_corpus().by_id
    for q in questions():
        *earlier, last = (f"{step.passage} {by_id[step.passage].text}" for step in q.steps)
        for answer in map(normalised, q.answers):
            assert answer
            assert not any(answer in normalised(text) for text in (q.text, *earlier)), q
        assert any(normalised(answer) in normalised(last) for answer in q.answers), q


def test_each_step_follows_from_the_question_or_the_passage_before() -> None:
    by_id = standard_corpus().by_id
    for q in questions():
        text = q.text
        for step in q.steps:
            parts = step.query.split(".")  # a method of what the passage names, asked for in the question
            assert step.query in text or (".".join(parts[:-1]) in text and parts[-1] in q.text), (q, step)
            text = f"{step.passage} {by_id[step.passage].text}"


def test_no_answer_is_worth_guessing() -> None:
    for kind, asked in by_kind(questions()).items():
        assert max(Counter(normalised(q.answers[0]) for q in asked).values()) <= MOST, kind


def test_facts_are_in_one_split() -> None:
    train, held_out = ({q.fact for q in questions() if q.held_out == is_held_out} for is_held_out in (False, True))
    assert not train & held_out


def test_bases_are_those_of_the_classes() -> None:
    for q, cls in told("base"):
        assert isinstance(cls, type)
        (base,) = cls.__bases__
        assert exact(base.__name__, q.answers) or exact(q.answers[0].rpartition(".")[2], [base.__qualname__]), q


def test_modules_are_those_of_the_objects() -> None:
    for q, thing in told("module"):
        assert operator.attrgetter("__module__")(thing) == q.answers[0], q


def test_defaults_are_those_of_the_signatures() -> None:
    count = 0
    for q, function in told("default"):
        (parameter,) = re.findall(r"of the parameter (\w+) of", q.text)
        assert callable(function)
        default = inspect.signature(inspect.unwrap(function)).parameters[parameter].default
        if type(default) in (int, str) and not re.fullmatch(r"[A-Za-z_.]+", q.answers[0]):
            assert str(default) == q.answers[0], q
            count += 1
    assert count > 10


def test_a_documented_thing_is_documented_so() -> None:
    for q, thing in told("name"):
        if getattr(thing, "__module__", "") == "email.policy":  # puts its docstrings together when it is imported
            continue
        (summary,) = re.findall(r'"(.*)"', q.text)
        assert summary in " ".join((inspect.getdoc(thing) or "").split()), q


def test_exceptions_are_classes_that_can_be_raised() -> None:
    for q, function in told("raises"):
        globals_ = getattr(inspect.unwrap(function), "__globals__", {})  # pyright: ignore[reportArgumentType]
        try:
            raised = eval(q.answers[0], globals_)  # noqa: S307 - a name out of the sources
        except NameError:  # imported within the function
            continue
        assert issubclass(raised, BaseException), q


def test_only_public_modules_and_names() -> None:
    names = {part for d in standard_library().values() for part in d.id.split(".")}
    assert not any(name.startswith("_") for name in names)
    modules = {part for d in standard_library().values() for part in d.module.split(".")}
    assert {"json", "socketserver", "handlers"} <= modules
    assert not modules & {"test", "tests", "tkinter", "idlelib", "site-packages"}
