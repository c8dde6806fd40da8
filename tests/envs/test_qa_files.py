"""Files that people bring: the public formats, and one error for each thing that is wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.envs.corpus import Passage
from agentrl_jax.envs.qa_files import load
from agentrl_jax.envs.questions import Step

PASSAGES = '{"id": "1", "contents": "\\"Rome\\"\\nRome is in Italy."}\n'
GOOD = {"question": "Where is Rome?", "answer": "Italy"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", PASSAGES)


def write(path: Path, content: str | bytes | list[object]) -> Path:
    if isinstance(content, list):
        content = "".join(f"{json.dumps(record)}\n" for record in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_hotpotqa_in_both_layouts(tmp_path: Path) -> None:
    distributed = {
        "_id": "5a8b",
        "question": "In which country is the capital that Nero ruled?",
        "answer": "Italy",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Nero", 0], ["Rome", 0], ["Nero", 1]],
        "context": [["Nero", ["Nero ruled Rome.", " He died there."]], ["Rome", ["Rome is in Italy."]], ["Oslo", ["Oslo is in Norway."]]],
    }
    columns = {
        **{key: value for key, value in distributed.items() if key != "_id"},
        "id": "5a8b",
        "supporting_facts": {"title": ["Nero", "Rome", "Nero"], "sent_id": [0, 0, 1]},
        "context": {
            "title": ["Nero", "Rome", "Oslo"],
            "sentences": [["Nero ruled Rome.", " He died there."], ["Rome is in Italy."], ["Oslo is in Norway."]],
        },
    }
    exams = [load(write(tmp_path / "hotpot.jsonl", [record])) for record in (distributed, columns)]
    assert exams[0] == exams[1]
    assert exams[0].errors == ()
    (question,) = exams[0].exam.questions
    assert question.answers == ("Italy",)
    assert question.steps == (Step("Nero", "Nero"), Step("Rome", "Rome"))
    assert exams[0].exam.corpus.passages[0] == Passage("Nero", "Nero ruled Rome. He died there.")


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Where is Rome?", "answer": ["Italy", "in Italy"]},  # NQ-open
        {"id": "test_0", "question": "Where is Rome?", "golden_answers": ["Italy", "in Italy"], "metadata": {}},  # FlashRAG
        {"id": 7, "question": "Where is Rome?", "answers": ["Italy", "in Italy", "Italy"]},
    ],
)
@pytest.mark.parametrize(
    "passage",
    [
        {"id": "1", "contents": '"Rome"\nRome is in Italy.'},  # FlashRAG, Pyserini
        {"_id": "1", "title": "Rome", "text": "Rome is in Italy.", "metadata": {}},  # BEIR
        {"id": 1, "title": "Rome", "text": "Rome is in Italy."},  # DPR
    ],
)
def test_questions_and_passages_apart(record: dict[str, object], passage: dict[str, object], tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "questions.jsonl", [record]), write(tmp_path / "corpus.jsonl", [passage]))
    assert loaded.errors == ()
    (question,) = loaded.exam.questions
    assert (question.text, question.answers, question.steps) == ("Where is Rome?", ("Italy", "in Italy"), ())
    assert loaded.exam.corpus.passages == (Passage("Rome", "Rome is in Italy."),)


def test_other_text_under_the_same_title_is_another_passage(tmp_path: Path, corpus: Path) -> None:
    context = [["Rome", ["Rome is in Italy."]], ["Rome", ["Rome is in Georgia."]], ["Rome", ["Rome fell."]]]
    loaded = load(write(tmp_path / "questions.jsonl", [{**GOOD, "context": context}]), corpus)
    assert [p.id for p in loaded.exam.corpus.passages] == ["Rome", "Rome (2)", "Rome (3)"]


def test_titles_are_lines_of_bounded_length(tmp_path: Path) -> None:
    record = {**GOOD, "context": [["Rome\n" * 99, ["Rome is in Italy."]]], "supporting_facts": [["Rome\n" * 99, 0]]}
    exam = load(write(tmp_path / "questions.jsonl", [record])).exam
    (passage,) = exam.corpus.passages
    assert passage.id == ("Rome " * 99)[:200]
    assert exam.questions[0].steps[0].passage == passage.id


WRONG = [
    ('{"answer": "x"}', "question: missing"),
    ('{"question": "Q"}', "answer: missing (or answers or golden_answers)"),
    ('{"question": "Q", "answer": "x", "answers": ["x"]}', "answers: says the same as answer; keep one"),
    ('{"question": 3, "answer": "x"}', "question: must be text, is a number"),
    ('{"question": " ", "answer": "x"}', "question: is empty"),
    ('{"question": "Q", "answer": null}', "answer: must be text, is null"),
    ('{"question": "Q", "answers": ["x", 4]}', "answers: must be text, is a number"),
    ('{"question": "Q", "answers": []}', "answers: must hold at least one answer"),
    (
        '{"question": "Q", "answer": "The."}',
        "answer: 'The.' is nothing once articles and punctuation are gone; every empty answer would be right",
    ),
    ('{"question": "Q", "answer": "\\ud800"}', "answer: half of a surrogate pair is no text"),
    ('{"question": "Q", "answer": "x", "id": true}', "id: must be text, is true or false"),
    ('{"question": "Q", "answer": "x", "id": "good"}', "id: 'good' was there before; give each question its own"),
    ('{"question": "Q", "answer": "x", "hint": "y"}', "unknown field 'hint'; known: _id, answer, answers, context, "),
    ('{"question": "Q", "answer": "x", "context": "Rome"}', "context: must be [[title, [sentence, ...]], ...] or "),
    (
        '{"question": "Q", "answer": "x", "context": [["Rome", "Rome is in Italy."]]}',
        "context: must be [[title, [sentence, ...]], ...] or ",
    ),
    (
        '{"question": "Q", "answer": "x", "context": {"title": ["a"], "sentences": []}}',
        "context: must be [[title, [sentence, ...]], ...] or ",
    ),
    ('{"question": "Q", "answer": "x", "context": [["Rome", []]]}', "context: is empty"),
    ('{"question": "Q", "answer": "x", "supporting_facts": [["Rome"]]}', "supporting_facts: must be [[title, sentence number], ...] or "),
    (
        '{"question": "Q", "answer": "x", "supporting_facts": [["Rome", "0"]]}',
        "supporting_facts: must be [[title, sentence number], ...] or ",
    ),
    ('["Q", "x"]', "must be an object, is a list"),
    ('{"question": "Q"', "not JSON: "),
    ("[" * 10**5, "not JSON: "),
    (b'{"question": "\xff"}', "byte 15 is not UTF-8; save the file as UTF-8"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_what_is_wrong_is_one_error_and_the_rest_is_read(line: str | bytes, message: str, tmp_path: Path, corpus: Path) -> None:
    good = json.dumps({**GOOD, "id": "good"}).encode()
    raw = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / "questions.jsonl", b"\n".join([good, raw, b"", json.dumps({**GOOD, "id": "last"}).encode()]))
    loaded = load(path, corpus)
    (error,) = loaded.errors
    assert error.startswith(f"{path}:2: {message}")
    assert len(error) < 500
    assert [q.fact for q in loaded.exam.questions] == ["good Where is Rome?", "last Where is Rome?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"contents": "Rome"}', "id: missing (or _id)"),
        ('{"id": "1"}', "contents: missing (or text)"),
        ('{"id": "1", "contents": "x", "text": "x"}', "text: says the same as contents; keep one"),
        ('{"id": "1", "text": "x", "title": 3}', "title: must be text, is a number"),
        ('{"id": "1", "text": ["x"]}', "text: must be text, is a list"),
        ('{"id": "1", "text": "x", "url": "y"}', "unknown field 'url'; known: _id, contents, id, metadata, text, title"),
    ],
)
def test_so_it_is_with_passages(line: str, message: str, tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", f"{line}\n{PASSAGES}")
    loaded = load(write(tmp_path / "questions.jsonl", [GOOD]), corpus)
    assert loaded.errors == (f"{corpus}:1: {message}",)
    assert len(loaded.exam.corpus.passages) == len(loaded.exam.questions) == 1


def test_files_with_nothing_in_them(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.jsonl: cannot be read: No such file"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory"):
        load(tmp_path)
    empty = write(tmp_path / "empty.jsonl", "\n")
    with pytest.raises(ValueError, match=r"empty.jsonl: no question could be read$"):
        load(empty, corpus)
    with pytest.raises(ValueError, match=r"no passage could be read$"):
        load(write(tmp_path / "questions.jsonl", [GOOD]))
    array = write(tmp_path / "array.jsonl", json.dumps([GOOD]))
    with pytest.raises(
        ValueError, match=r"no question could be read; the first of 1 errors: .*array.jsonl:1: must be an object, is a list"
    ):
        load(array, corpus)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["question", "answer", "id", "title"]), inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.dictionaries(
    st.sampled_from(["question", "answer", "answers", "id", "_id", "context", "supporting_facts", "metadata", "text", "contents", "title"]),
    ANY,
)
LINES = st.one_of(
    st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), RECORDS.map(lambda record: json.dumps(record).encode())
)


@given(st.lists(LINES, max_size=6), st.lists(LINES, max_size=6))
def test_whatever_is_in_the_files_good_lines_are_read_and_each_bad_one_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, asked: list[bytes], told: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    questions = write(folder / "questions.jsonl", b"\n".join([json.dumps({**GOOD, "id": "good"}).encode(), *asked]))
    corpus = write(folder / "corpus.jsonl", b"\n".join([PASSAGES.strip().encode(), *told]))
    loaded = load(questions, corpus)
    assert loaded.exam.questions[0].answers == ("Italy",)
    assert loaded.exam.corpus.passages[0] == Passage("Rome", "Rome is in Italy.")
    assert len(loaded.exam.questions) - 1 + sum(error.startswith(f"{questions}:") for error in loaded.errors) == sum(
        map(bool, map(bytes.strip, asked))
    )
    assert all(error.startswith((f"{questions}:", f"{corpus}:")) for error in loaded.errors)
    "\n".join([loaded.exam.id, *loaded.errors]).encode()
