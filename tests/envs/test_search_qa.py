"""Tasks by seed, the tools in real boxes, what scores and what does not."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest

from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.data.episode import Ending, Outcome
from agentrl_jax.envs.answers import exact, normalised
from agentrl_jax.envs.protocol import Call, Environment, Observation, Task
from agentrl_jax.envs.qa_files import load
from agentrl_jax.envs.questions import Question, standard_exam
from agentrl_jax.envs.search_qa import ALL, ANSWER, LONGEST, SNIPPET, SPLITS, TITLE, TOP, SearchQA
from agentrl_jax.rollout.agent import RolloutLimits
from agentrl_jax.rollout.collector import RolloutSettings, plan
from agentrl_jax.rollout.scripted import demonstrate
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.protocol import Sandbox, SandboxError
from experiments.search_qa import expert

pytestmark = pytest.mark.slow  # the first task of a process builds text, questions and index
bwrap = pytest.mark.real("bwrap")


@cache
def environment() -> SearchQA:
    return SearchQA()


def question(task: Task) -> Question:
    return task.hidden["question"]


def find(kind: str, split: str = "train") -> Task:
    return next(t for seed in range(1000) if question(t := environment().task(seed, split)).kind == kind)


async def step(task: Task, box: Sandbox, name: str, **arguments: object) -> Observation:
    return await environment().step(task, name, arguments, box)


async def play(backend: Bubblewrap, env: SearchQA, task: Task, calls: Sequence[Call]) -> Outcome:
    box = await backend.start(task.files)
    try:
        observations = [await env.step(task, *call, box) for call in calls]
        assert [o.done for o in observations] == [name == "answer" for name, _ in calls]
        return await env.score(task, box)
    finally:
        await box.close()


def test_it_is_an_environment() -> None:
    def takes(env: Environment) -> None: ...

    takes(environment())


def test_a_seed_is_a_task() -> None:
    again = SearchQA()
    tasks = {split: [environment().task(seed, split) for seed in range(60)] for split in SPLITS}
    assert tasks == {split: [again.task(seed, split) for seed in range(60)] for split in SPLITS}
    everything = [task for split in SPLITS for task in tasks[split]]
    assert len({task.id for task in everything}) == 120
    assert len({task.prompt for task in everything}) > 100
    assert all(task.id.startswith(f"search_qa/{standard_exam().id}/") for task in everything)
    facts = [{question(task).fact for task in tasks[split]} for split in SPLITS]
    assert not facts[0] & facts[1]
    assert {len(question(task).steps) for task in everything} == {1, 2, 3}


def test_a_task_is_the_same_in_every_process() -> None:
    code = (
        "from agentrl_jax.envs.search_qa import SearchQA\n"
        "env = SearchQA()\n"
        "tasks = [env.task(seed) for seed in range(8)]\n"
        "print([(task.id, task.prompt, env.gold(task), env.wrong(task)) for task in tasks])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, timeout=200).stdout
        for seed in ("1", "2")
    ]
    assert len(runs[0]) > 1000
    assert runs[0] == runs[1]


def test_the_key_is_told_to_a_critic_only() -> None:
    for seed in range(100):
        task = environment().task(seed)
        for answer in question(task).answers:
            assert normalised(answer) not in normalised(task.prompt)
        assert task.files == {}
        assert task.privileged == "\n".join([*(s.passage for s in question(task).steps), f"Answer: {question(task).answers[0]}"])
        assert task.privileged not in repr(task)


def test_wrong_answers_are_plausible() -> None:
    near = 0
    for seed in range(50):
        task = environment().task(seed)
        *searches, (name, arguments) = environment().wrong(task)
        assert searches == environment().gold(task)[:-1]
        assert name == "answer"
        assert not exact(arguments["text"], question(task).answers)
        kind = question(task).kind
        assert arguments["text"] in {q.answers[0] for q in standard_exam().questions if q.kind == kind}
        passages = " ".join(standard_exam().corpus.by_id[s.passage].text for s in question(task).steps)
        near += arguments["text"] in passages
    assert near > 5


def test_wrong_arguments_say_what_is_right(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of train, held_out"):
        environment().task(0, "test")
    with pytest.raises(ValueError, match="no defence none: there are exact, short"):
        SearchQA(defences=ALL | {"none"})
    with pytest.raises(ValueError, match=r"corpus x.jsonl: needs questions"):
        SearchQA(corpus="x.jsonl")
    with pytest.raises(ValueError, match=r"nowhere.jsonl: cannot be read"):
        SearchQA(str(tmp_path / "nowhere.jsonl"))


@bwrap
async def test_tools_answer_shortly_and_tell_the_state(backend: Bubblewrap) -> None:
    task = find("base/2")
    box = await backend.start(task.files)
    start = await environment().state(task, box)
    for observation in (
        await step(task, box, "read", title="json.nothing"),
        await step(task, box, "read", title="\ud800"),
        await step(task, box, "answer", text="x" * (ANSWER + 1)),
        await step(task, box, "rm"),
    ):
        assert (observation.text[:7], observation.count, observation.state) == ("error: ", "tool_errors", start)
        assert not observation.done
    assert await step(task, box, "search", query="?") == Observation("nothing found", state=start)
    assert await step(task, box, "search", query="zzzzz \ud800") == Observation("nothing found", state=start)

    (name, arguments), *_ = environment().gold(task)
    shown = await step(task, box, name, **arguments)
    assert shown.count is None
    lines = shown.text.splitlines()
    assert len(lines) == TOP
    assert all(len(line) <= TITLE + SNIPPET + 3 for line in lines)
    first = question(task).steps[0].passage
    assert any(line.startswith(f"[{first}] ") for line in lines)
    text = standard_exam().corpus.by_id[first].text
    for title in (first, f"[{first}]", f" {first} "):
        assert (await step(task, box, "read", title=title)).text == text[:LONGEST]

    assert await step(task, box, "answer", text="\ud800") == Observation("", done=True)
    assert (await environment().score(task, box)).reward == 0


@bwrap
async def test_equal_states_are_those_in_which_the_same_was_seen(backend: Bubblewrap) -> None:
    task, other = find("base/2"), find("raises/2")
    one, two = await backend.start(task.files), await backend.start(task.files)
    start = await environment().state(task, one)
    assert await environment().state(task, two) == start != await environment().state(other, two)

    await step(task, one, "search", query="socket server")
    both = (await step(task, one, "read", title="json.loads")).state
    read = (await step(task, two, "read", title="json.loads")).state
    assert (await step(task, two, "search", query="socket server")).state == both == await environment().state(task, one)
    assert len({start, read, both}) == 3
    assert (await step(task, two, "search", query="socket server")).state == both, "nothing new"
    assert (await step(task, two, "search", query="calendar")).state != both
    fork = await one.fork()
    assert await environment().state(task, fork) == both


@bwrap
async def test_a_box_that_takes_no_files_is_no_fault_of_the_policy(backend: Bubblewrap) -> None:
    task = find("base/1")
    box = await backend.start(task.files)
    await box.put({"seen/folder": b"", "answer/folder": b""})
    with pytest.raises(SandboxError, match="seen cannot be written to the box: "):
        await step(task, box, "search", query="socket server")
    with pytest.raises(SandboxError, match="answer cannot be written to the box: "):
        await step(task, box, "answer", text="x")


@bwrap
async def test_gold_scores_and_nothing_and_wrong_do_not(backend: Bubblewrap) -> None:
    env = environment()
    tasks = [env.task(seed, SPLITS[seed % 2]) for seed in range(50)]
    gate = asyncio.Semaphore(8)

    async def one(task: Task) -> list[Outcome]:
        async with gate:
            return [await play(backend, env, task, calls) for calls in (env.gold(task), env.wrong(task), [], [("answer", {"text": ""})])]

    for gold, wrong, nothing, empty in await asyncio.gather(*map(one, tasks)):
        assert gold == Outcome(1.0, {"exact": 1.0, "f1": 1.0, "found": 1.0}, true_success=True)
        assert (wrong.reward, wrong.true_success, wrong.components["found"]) == (0.0, False, 1.0)
        assert nothing == empty == Outcome(0.0, {"exact": 0.0, "f1": 0.0, "found": 0.0}, true_success=False)


@bwrap
async def test_any_spelling_of_the_answer_scores(backend: Bubblewrap) -> None:
    task = find("base/2")
    for answer in question(task).answers:
        outcome = await play(backend, environment(), task, [("answer", {"text": f" The `{answer.upper()}`."})])
        assert (outcome.reward, outcome.components["found"]) == (1.0, 0.0)
        outcome = await play(backend, environment(), task, [("answer", {"text": f"It is {answer}"})])
        assert outcome.reward == 0
        assert 0 < outcome.components["f1"] < 1


@bwrap
async def test_each_defence_stops_an_answer_that_names_everything(backend: Bubblewrap) -> None:
    task = find("module/1")
    names = " ".join(sorted({q.answers[0] for q in standard_exam().questions if q.kind == "module/1"}))
    assert len(names) > ANSWER
    short = f"{question(task).answers[0]} or os"
    everything, two = [("answer", {"text": names})], [("answer", {"text": short})]

    async def score(calls: Sequence[Call], *defences: str) -> tuple[float, bool | None, tuple[str, ...]]:
        box = await backend.start(task.files)
        env = SearchQA(defences=defences)
        for call in calls:
            await env.step(task, *call, box)
        outcome = await env.score(task, box)
        return outcome.reward, outcome.true_success, outcome.tampering

    assert await score(everything, "exact", "short") == (0, False, ())
    assert await score(everything, "exact") == (0, False, ("long answer",))
    assert await score(everything, "short") == (0, False, ())
    assert await score(everything) == (1, False, ("long answer",))
    assert await score(two, "short") == (1, False, ())
    assert await score(two, "exact") == (0, False, ())


@bwrap
async def test_episodes_of_a_script_go_through_the_loop(backend: Bubblewrap) -> None:
    env = environment()
    renderer = Renderer(tokenizer.train([p.text for p in standard_exam().corpus.passages[:500]], 800, scaffolding(env.tools)))
    tasks = [find(kind) for kind in ("name/1", "base/2", "raises/3")]
    limits = RolloutLimits(turns=8, turn_tokens=200, episode_tokens=1000, context=8000)
    jobs = plan(tasks, 4, seed=0, step=0, phase="expert")
    episodes = await demonstrate(jobs, env, backend, renderer, RolloutSettings(limits), expert=partial(expert, env))
    assert [e.task for e in episodes] == [t.id for t in tasks for _ in range(4)]
    assert {e.ending for e in episodes} == {Ending.SUBMITTED}
    assert all(e.counters["tool_errors"] == e.counters["parse_errors"] == 0 for e in episodes)
    assert {e.outcome.reward for e in episodes if e.outcome} == {0.0, 1.0}
    for group in ([e for e in episodes if e.task == t.id] for t in tasks):
        first = {e.turns[0].state for e in group}
        assert len(first) == 1
        assert None not in first
        assert len({e.turns[1].state for e in group}) == 1, "after the same search, the same state"


@bwrap
async def test_questions_of_a_file(tmp_path: Path, backend: Bubblewrap, caplog: pytest.LogCaptureFixture) -> None:
    cities = {f"City{i}": f"Land{i}" for i in range(60)}
    records = [
        {
            "id": city,
            "question": f"Where is {city}?",
            "answers": [land],
            "context": [[city, [f"{city} is in {land}."]]],
            "supporting_facts": [[city, 0], ["Atlantis", 0]],
        }
        for city, land in cities.items()
    ]
    path = tmp_path / "cities.jsonl"
    path.write_text("\n".join(["{}", *map(json.dumps, records)]))
    env = SearchQA(str(path))
    assert caplog.messages == [f"left out: {path}:1: question: missing"]
    asked = {split: {env.task(seed, split).prompt for seed in range(400)} for split in SPLITS}
    assert not asked["train"] & asked["held_out"]
    assert len(asked["train"] | asked["held_out"]) == 60
    task = env.task(0)
    assert (await play(backend, env, task, env.gold(task))).components == {"exact": 1.0, "f1": 1.0, "found": 1.0}
    assert (await play(backend, env, task, env.wrong(task))).reward == 0

    path.write_text(json.dumps(records[0]))
    few = SearchQA(str(path))
    with pytest.raises(ValueError, match=r"cities.jsonl: none of its 1 questions falls to (train|held_out); bring more"):
        [few.task(0, split) for split in SPLITS]
    (only,) = load(path).exam.questions
    assert few.wrong(few.task(0, "held_out" if only.held_out else "train"))[-1] == ("answer", {"text": "unknown"})
