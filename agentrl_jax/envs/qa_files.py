"""Questions and passages from JSONL files that somebody brings, in the formats of the public data sets.

Questions, one object a line. Of `question` and one of the answer fields there must be one each; nothing else may be there:

    question                                   text
    answer | answers | golden_answers          text or list of texts: any of them is right (HotpotQA; NQ-open; FlashRAG and others)
    id | _id                                   text or number, different for each; the line number where there is none
    context                                    passages: [[title, [sentence, ...]], ...], as HotpotQA is distributed, or
                                               {"title": [...], "sentences": [[...], ...]}, as it is on the Hub
    supporting_facts                           [[title, sentence number], ...] or {"title": [...], "sent_id": [...]}
    type, level, metadata, meta_data           not used

Passages, one object a line: `id` or `_id`, and either `contents` (FlashRAG, Pyserini: the title is the first line) or `text`, with or
without `title` (BEIR, DPR); `metadata` is not used.

What is wrong with a line is one error that names file, line and field, and the line is left out; the others are read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentrl_jax.envs.answers import normalised
from agentrl_jax.envs.corpus import Corpus, Passage
from agentrl_jax.envs.questions import Exam, Question, Step

_TITLE = 200
_ID = ("id", "_id")
_ANSWER = ("answer", "answers", "golden_answers")
_QUESTION_FIELDS = frozenset({*_ID, *_ANSWER, "question", "context", "supporting_facts", "type", "level", "metadata", "meta_data"})
_PASSAGE_FIELDS = frozenset({*_ID, "contents", "text", "title", "metadata"})


@dataclass(frozen=True)
class Loaded:
    """What could be read, and one error for each line that could not."""

    exam: Exam
    errors: tuple[str, ...]


def load(questions: Path, corpus: Path | None = None) -> Loaded:
    """Read a file of questions; the passages are those of `corpus` and of the questions' own contexts.

    Raises ValueError where a file cannot be opened, or no question or no passage can be read.
    """
    errors: list[str] = []
    shelf = _Shelf()
    if corpus is not None:
        for where, record in _records(corpus, _PASSAGE_FIELDS, errors):
            try:
                shelf.add(*_passage(record))
            except _WrongError as error:
                errors.append(f"{where}: {error}")
    found: dict[str, Question] = {}
    for where, record in _records(questions, _QUESTION_FIELDS, errors):
        try:
            key, question, context = _question(record, where.rpartition(":")[2])
            if key in found:
                raise _WrongError(f"id: {key!a} was there before; give each question its own")
        except _WrongError as error:
            errors.append(f"{where}: {error}")
            continue
        for title, text in context:
            shelf.add(title, text)
        found[key] = question
    for what, there in (("question", found), ("passage", shelf.passages)):
        if not there:
            first = f"; the first of {len(errors)} errors: {errors[0]}" if errors else ""
            raise ValueError(f"{questions}: no {what} could be read{first}")
    # A supporting fact may name what no file has.
    kept = [Question(q.text, q.answers, tuple(s for s in q.steps if s.passage in shelf.passages), q.kind, q.fact) for q in found.values()]
    passages = tuple(Passage(title, text) for title, text in shelf.passages.items())
    return Loaded(Exam(Corpus(questions.stem, passages), tuple(kept), selective=False), tuple(errors))


class _WrongError(Exception):
    """What is wrong with a record: field, and what it must be."""


class _Shelf:
    """Passages by id. Another text under a title that is taken gets a number."""

    def __init__(self) -> None:
        self.passages: dict[str, str] = {}

    def add(self, title: str, text: str) -> None:
        free, number = title, 1
        while self.passages.get(free, text) != text:
            number += 1
            free = f"{title} ({number})"
        self.passages[free] = text


def _records(path: Path, known: frozenset[str], errors: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", object) of each line that holds one with known fields only; `errors` gets what is wrong with the others."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            errors.append(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8")
            continue
        except (ValueError, RecursionError) as error:
            errors.append(f"{where}: not JSON: {error}")
            continue
        if not isinstance(record, dict):
            errors.append(f"{where}: must be an object, is {_kind(record)}")
            continue
        fields = cast("dict[str, Any]", record)
        unknown = sorted(fields.keys() - known)
        if unknown:
            errors.append(f"{where}: unknown field {unknown[0]!a}; known: {', '.join(sorted(known))}")
            continue
        yield where, fields


def _question(record: dict[str, Any], line: str) -> tuple[str, Question, list[tuple[str, str]]]:
    """(id, question, its own passages)"""
    text = _text(record, "question")
    name = _one_of(record, _ANSWER)
    given = record[name]
    answers = [_checked(answer, name) for answer in cast("list[object]", given if isinstance(given, list) else [given])]
    if not answers:
        raise _WrongError(f"{name}: must hold at least one answer")
    for answer in answers:
        if not normalised(answer):
            raise _WrongError(f"{name}: {answer!a} is nothing once articles and punctuation are gone; every empty answer would be right")
    key = _id(record) if any(name in record for name in _ID) else line
    context = _context(record["context"]) if "context" in record else []
    facts = dict.fromkeys(_facts(record["supporting_facts"])) if "supporting_facts" in record else {}
    return key, Question(text, tuple(dict.fromkeys(answers)), tuple(Step(title, title) for title in facts), "", f"{key} {text}"), context


def _passage(record: dict[str, Any]) -> tuple[str, str]:
    """(title, or id where there is none; text)"""
    key = _id(record)
    name = _one_of(record, ("contents", "text"))
    text = _text(record, name)
    if name == "contents":
        title, _, text = text.partition("\n")
        return (_line(title.strip().strip('"')) or key, text) if text else (key, title)
    return _line(_checked(record.get("title") or key, "title")), text


def _context(value: object) -> list[tuple[str, str]]:
    """(title, text) of each paragraph, in either layout."""
    wrong = _WrongError('context: must be [[title, [sentence, ...]], ...] or {"title": [...], "sentences": [[...], ...]}')
    pairs = _pairs(value, "title", "sentences", wrong)
    if not all(isinstance(title, str) and _texts(sentences) for title, sentences in pairs):
        raise wrong
    return [(_line(_checked(title, "context")), _checked(" ".join(map(str.strip, cast("list[str]", s))), "context")) for title, s in pairs]


def _facts(value: object) -> list[str]:
    """Titles of the paragraphs that lead to the answer, in either layout."""
    wrong = _WrongError('supporting_facts: must be [[title, sentence number], ...] or {"title": [...], "sent_id": [...]}')
    pairs = _pairs(value, "title", "sent_id", wrong)
    if not all(isinstance(title, str) and isinstance(number, int) for title, number in pairs):
        raise wrong
    return [_line(_checked(title, "supporting_facts")) for title, _ in pairs]


def _pairs(value: object, first: str, second: str, wrong: _WrongError) -> list[tuple[object, object]]:
    """A list of pairs, or an object of two lists of one length."""
    if isinstance(value, dict):
        columns = cast("dict[str, object]", value)
        a, b = columns.get(first), columns.get(second)
        if columns.keys() != {first, second} or not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
            raise wrong
        return list(zip(cast("list[object]", a), cast("list[object]", b), strict=True))
    if not isinstance(value, list):
        raise wrong
    rows = cast("list[object]", value)
    if not all(isinstance(row, list) and len(cast("list[object]", row)) == 2 for row in rows):
        raise wrong
    return [(row[0], row[1]) for row in cast("list[list[object]]", rows)]


def _id(record: dict[str, Any]) -> str:
    name = _one_of(record, _ID)
    value = record[name]
    return _line(_checked(str(value) if isinstance(value, int) and not isinstance(value, bool) else value, name))


def _one_of(record: dict[str, Any], names: tuple[str, ...]) -> str:
    """The one of `names` that the record has."""
    present = [name for name in names if name in record]
    if not present:
        raise _WrongError(f"{names[0]}: missing" + (f" (or {' or '.join(names[1:])})" if names[1:] else ""))
    if len(present) > 1:
        raise _WrongError(f"{present[1]}: says the same as {present[0]}; keep one")
    return present[0]


def _text(record: dict[str, Any], name: str) -> str:
    if name not in record:
        raise _WrongError(f"{name}: missing")
    return _checked(record[name], name)


def _checked(value: object, name: str) -> str:
    """The value as text that can be shown."""
    if not isinstance(value, str):
        raise _WrongError(f"{name}: must be text, is {_kind(value)}")
    if not value.strip():
        raise _WrongError(f"{name}: is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _WrongError(f"{name}: half of a surrogate pair is no text") from None
    return value


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))


def _line(text: str) -> str:
    """A title or id: one line of at most `_TITLE` characters, since a box keeps those of all that was seen."""
    return " ".join(text.split())[:_TITLE]


def _kind(value: object) -> str:
    """JSON's name of a value's type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
