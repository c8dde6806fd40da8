"""Tasks by seed, and the tools in real boxes."""

import pytest

from agentrl_jax.envs.bugfix import LEVELS, LONGEST, SPLITS, TESTS, BugFix, handed_out
from agentrl_jax.envs.bugs import evaluate, functions
from agentrl_jax.envs.protocol import Environment, Observation, Task
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

levels = pytest.mark.parametrize("level", range(len(LEVELS)))
bwrap = pytest.mark.real("bwrap")


def content(task: Task) -> tuple[object, ...]:
    return task.prompt, *task.files.values()


def mended(task: Task) -> dict[str, str]:
    sources = handed_out(task)
    for function, old, new in task.hidden["edits"]:
        sources[function] = sources[function].replace(old, new)
    return sources


@levels
def test_a_seed_is_a_task(level: int) -> None:
    first, again = BugFix(level), BugFix(level)
    tasks = [first.task(seed) for seed in range(40)]
    assert tasks == [again.task(seed) for seed in range(40)]
    assert len({content(task) for task in tasks}) == len({task.id for task in tasks}) == 40


@levels
def test_the_gold_edits_restore_the_library_and_bugs_fail_hidden_tests(level: int) -> None:
    env = BugFix(level)
    for seed in range(30):
        task = env.task(seed, SPLITS[seed % 4])
        sources = handed_out(task)
        assert mended(task) == {name: functions()[name].source for name in sources}
        broken = {name for name, source in sources.items() if source != functions()[name].source}
        assert len(broken) == LEVELS[level].bugs
        for name in sources:
            cases = [case for case in task.hidden["cases"] if case.function == name]
            results = evaluate(sources[name], name, tuple(case.arguments for case in cases))
            assert (results == [case.want for case in cases]) == (name not in broken)
        assert not set(task.hidden["visible"]) & set(task.hidden["cases"])
        assert env.gold(task)[-1] == ("submit", {})


@pytest.mark.slow
@levels
def test_splits_are_disjoint(level: int) -> None:
    env = BugFix(level)
    tasks = {split: [env.task(seed, split) for seed in range(50)] for split in SPLITS}
    assert not {content(t) for t in tasks["train"]} & {content(t) for t in tasks["held_out"]}

    def bugs_of(split: str) -> set[tuple[str, str]]:
        return {(name, handed_out(t)[name]) for t in tasks[split] for name, *_ in t.hidden["edits"]}

    assert not (bugs_of("train") | bugs_of("held_out")) & bugs_of("held_out_bugs")
    seen = {name for split in SPLITS[:3] for t in tasks[split] for name in handed_out(t)}
    assert not seen & {name for t in tasks["held_out_functions"] for name in handed_out(t)}


def test_tasks_are_short_at_level_0() -> None:
    task = BugFix(0).task(3)
    assert task.prompt == f"Fix in utils.py:\n{task.hidden['edits'][0][0]}"
    assert set(task.files) == {"utils.py", TESTS}
    assert max(len(source) for seed in range(200) for source in handed_out(BugFix(0).task(seed)).values()) < LONGEST


def test_wrong_arguments_say_what_is_right() -> None:
    with pytest.raises(ValueError, match="levels are 0 to 3"):
        BugFix(9)
    with pytest.raises(ValueError, match="one of train, held_out"):
        BugFix(0).task(0, "test")


def test_it_is_an_environment() -> None:
    def takes(env: Environment) -> None: ...

    takes(BugFix(0))


def find(level: int, function: str) -> Task:
    """A task in which `function` is broken."""
    return next(t for seed in range(10**4) if (t := BugFix(level).task(seed)).hidden["edits"][0][0] == function)


@bwrap
async def test_tools_answer_shortly_and_tell_the_state(backend: Bubblewrap) -> None:
    env, task = BugFix(0), find(0, "clamp")
    (_, gold), _ = env.gold(task)

    box = await backend.start(task.files)

    async def step(name: str, **arguments: object) -> Observation:
        return await env.step(task, name, arguments, box)

    start = await env.state(task, box)
    shown = await step("read", function="clamp")
    assert shown == Observation(handed_out(task)["clamp"].rstrip(), state=start)

    def error(text: str) -> Observation:
        return Observation(f"error: {text}", count="tool_errors", state=start)

    assert await step("read", function="nope") == error("no function nope")
    assert await step("edit", function="nope", old="a", new="b") == error("no function nope")
    assert await step("edit", function="clamp", old="zzz", new="b") == error("old not found in clamp")
    assert await step("edit", function="clamp", old="", new="b") == error("old not found in clamp")
    count = handed_out(task)["clamp"].count("x")
    assert await step("edit", function="clamp", old="x", new="b") == error(f"old found {count} times in clamp")
    assert await step("edit", function="clamp", old="(x, lo", new="((x, lo") == error("not valid Python")
    assert await step("edit", function="clamp", old="(x, lo", new="(x, lo\0\ud800") == error("not valid Python")
    assert await step("edit", function="clamp", old="clamp", new="grip") == error("keep the def lines")
    assert await step("edit", function="clamp", old="(x, lo", new="(x, lo") == error("old and new are the same")
    assert (await step("rm")).count == "tool_errors"

    edited = await step("edit", **gold)
    assert edited.text == "ok"
    assert edited.state not in (None, start)
    assert await step("test") == Observation(f"ok: {len(task.hidden['visible'])} passed", state=edited.state)
    assert await box.get("utils.py") == task.hidden["gold"]["utils.py"].encode()
    assert (await env.score(task, box)).true_success is True
    assert (await step("submit")).done
    assert await box.get("utils.py") == task.hidden["gold"]["utils.py"].encode(), "scoring left the box as it was"


@bwrap
@levels
async def test_edits_start_from_the_text_handed_out_unless_cumulative(level: int, backend: Bubblewrap) -> None:
    env, task = BugFix(level), BugFix(level).task(0)
    function = task.hidden["edits"][0][0]

    box = await backend.start(task.files)
    for name in ("first", "second"):
        await env.step(task, "edit", {"function": function, "old": f"def {function}(", "new": f"def {function}({name}, "}, box)
    text = (await env.step(task, "read", {"function": function}, box)).text
    assert text.startswith(f"def {function}(second, {'first, ' if LEVELS[level].cumulative else ''}")
    before = {name: source.rstrip() for name, source in handed_out(task).items() if name != function}
    assert before == {name: (await env.step(task, "read", {"function": name}, box)).text for name in before}


@bwrap
async def test_failures_are_shown_with_what_was_wanted(backend: Bubblewrap) -> None:
    env = BugFix(0)
    task = next(t for t in map(env.task, range(100)) if "!ValueError" in {case.want for case in t.hidden["visible"]})
    function = task.hidden["edits"][0][0]
    case = task.hidden["visible"][0]
    shown = f"{function}({case.arguments[1:-1].rstrip(',')})"
    first = task.files["utils.py"].decode().partition(f"def {function}")[0]

    box = await backend.start(task.files)

    async def test_with(body: str) -> str:
        code = f"{first}def {function}(*_):\n    {body}\n"
        await box.put({"utils.py": code.encode()})
        observation = await env.step(task, "test", {}, box)
        assert len(observation.text) <= LONGEST
        assert observation.state == await env.state(task, box)
        return observation.text

    want = case.want.lstrip("!")
    assert (await test_with("return object()")).startswith(f"FAIL {shown} = <object>, want {want} (")
    assert (await test_with("raise KeyError")).startswith(f"FAIL {shown} raised KeyError, want {want} (")
    assert (await test_with("exit(0)")).startswith(f"FAIL {shown} raised SystemExit, want {want} (")
    assert (await test_with("while True: pass")) == "timeout"
    assert (await test_with("import os; os._exit(0)")) == "error: crashed"
    assert (await test_with("import os; os.kill(os.getpid(), 9)")) == "error: crashed"
    assert " ... " in await test_with("return 'x' * 10**6")
    assert (await test_with("print('noise' * 99999); return object()")).startswith(f"FAIL {shown} = <object>")
    assert (await test_with("return (")) == "FAIL utils.py: SyntaxError"
