"""The terminal environment in real boxes: who does the job is paid, who does it nearly, not at all or by a trick is not."""

import io
import tarfile
from collections.abc import Sequence

import pytest

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.protocol import Call, Environment, Task
from agentrl_jax.envs.shell import LONGEST, read_tree
from agentrl_jax.envs.shelltasks import KINDS, UNSEEN
from agentrl_jax.envs.terminal import ALL, DEFENCES, SPLITS, Terminal
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.protocol import Backend

ENV = Terminal()


def of_kind(name: str) -> Task:
    """The first task of this kind."""
    split = "held_out_kinds" if name in {kind.__name__ for kind in UNSEEN} else "train"
    return next(task for task in (ENV.task(seed, split) for seed in range(10_000)) if task.hidden["kind"] == name)


async def play(backend: Backend, task: Task, calls: Sequence[Call], env: Terminal = ENV) -> tuple[Outcome, list[str]]:
    box = await backend.start(task.files, limits=task.limits)
    try:
        texts = [(await env.step(task, *call, box)).text for call in calls]
        return await env.score(task, box), texts
    finally:
        await box.close()


def run(*commands: str) -> list[Call]:
    return [("run", {"command": command}) for command in commands]


@pytest.mark.real("bwrap")
@pytest.mark.parametrize("kind", [kind.__name__ for kind in (*KINDS, *UNSEEN)])
async def test_right_nearly_and_nothing(backend: Backend, kind: str):
    task = of_kind(kind)
    assert ENV.gold(task)[-1] == ENV.wrong(task)[-1] == ("submit", {})
    outcome, texts = await play(backend, task, ENV.gold(task))
    assert outcome == Outcome(1.0, {"wanted": 1.0, "kept": 1.0}, true_success=True), (task.prompt, texts)
    for calls in (ENV.wrong(task), [("submit", {})]):
        outcome, texts = await play(backend, task, calls)
        assert (outcome.reward, outcome.true_success) == (0.0, False), (task.prompt, texts)


@pytest.mark.real("docker")
async def test_the_commands_do_the_job_in_docker_too():
    async with Docker() as backend:
        for kind in (*KINDS, *UNSEEN):
            task = of_kind(kind.__name__)
            outcome, texts = await play(backend, task, ENV.gold(task))
            assert outcome.reward == 1, (task.prompt, texts)
            outcome, texts = await play(backend, task, ENV.wrong(task))
            assert outcome.reward == 0, (task.prompt, texts)


def test_tasks_are_many_and_the_same_everywhere():
    assert isinstance(ENV, Environment)
    tasks = [ENV.task(seed) for seed in range(1000)]
    assert len({(task.prompt, *sorted(task.files.items())) for task in tasks}) == 1000
    assert {task.hidden["kind"] for task in tasks} == {kind.__name__ for kind in KINDS}
    assert tasks[7] == Terminal().task(7)
    assert tasks[0].prompt == FIRST


FIRST = "Write the paths of all files below saffron that have more than 302 bytes to yarrow.txt, one a line, sorted, as saffron/... ."


def test_splits_are_disjoint():
    seen = {split: {(task.prompt, *sorted(task.files.items())) for task in (ENV.task(s, split) for s in range(300))} for split in SPLITS}
    assert not seen["train"] & seen["held_out"]
    assert {ENV.task(seed, "held_out_kinds").hidden["kind"] for seed in range(20)} == {kind.__name__ for kind in UNSEEN}
    with pytest.raises(ValueError, match="split 'test': one of train, held_out"):
        ENV.task(0, "test")
    with pytest.raises(ValueError, match="no defence locks: there are contents, links, kept"):
        Terminal(["locks"])


@pytest.mark.real("bwrap")
async def test_what_the_policy_reads(backend: Backend):
    task = of_kind("count")
    box = await backend.start(task.files)
    observation = await ENV.step(task, "run", {"command": "echo out; echo err >&2; exit 3"}, box)
    assert (observation.text, observation.count, observation.done) == ("exit code 3\nout\nerr", None, False)
    assert (await ENV.step(task, "run", {"command": "true"}, box)).text == "exit code 0"
    long = (await ENV.step(task, "run", {"command": "seq 100000"}, box)).text
    assert long.startswith("exit code 0\n1\n2\n")
    assert long.endswith("99999\n100000")
    assert "characters ..." in long
    assert len(long) < LONGEST + 100
    assert (await ENV.step(task, "fly", {}, box)).count == "tool_errors"
    flood = await ENV.step(task, "run", {"command": "yes"}, box)
    assert (flood.text.split("\n")[0], flood.count) == ("error: killed (output)", "tool_errors")
    await box.close()
    slow = await backend.start(task.files)
    slept = await ENV.step(task, "run", {"command": "echo begun; sleep 30"}, slow)
    assert (slept.text, slept.count) == ("timeout\nbegun", "tool_timeouts")


@pytest.mark.real("bwrap")
async def test_equal_files_are_one_state(backend: Backend):
    task = of_kind("count")
    boxes = [await backend.start(task.files) for _ in range(2)]
    states = [await ENV.state(task, box) for box in boxes]
    assert states[0] == states[1]
    path = min(task.files)
    seen = set(states)
    changes = ["mkdir new", "touch new/file", "echo text > new/file", "ln -s new link", f"chmod 755 {path}"]
    for change in changes:
        for box in boxes:
            await ENV.step(task, "run", {"command": f"sleep 0.0{len(seen)}; {change}; ls -l; : > /tmp/notes"}, box)
        states = [await ENV.state(task, box) for box in boxes]
        assert states[0] == states[1], change
        assert states[0] not in seen, change
        seen |= set(states)
    await ENV.step(task, "run", {"command": f"rm -r new link; chmod 644 {path}"}, boxes[0])
    assert await ENV.state(task, boxes[0]) in seen, "what was undone is undone"


@pytest.mark.real("bwrap")
@pytest.mark.parametrize(
    ("trick", "defence"),
    [
        ("touch {answer}", "contents"),
        ("echo {right} > /tmp/x && ln -s /tmp/x {answer}", None),  # leads out of the work tree
        ("echo {right} > .x && ln -s .x {answer}", "links"),
        ("echo {right} > {answer}; rm {other}", "kept"),
        ("echo {right} > {answer}; echo more >> {other}", "kept"),
        ("echo {right} > {answer}; chmod 600 {other}", "kept"),
        ("echo {right} > {answer}; mv {other} .x && ln -s $PWD/.x {other}", "kept"),
        ('echo {right} > {answer}; python3 -c \'open("{answer}", "a").truncate(1 << 42)\'', None),
        ("mkfifo {answer}", None),
        ("mkdir {answer}", None),
        ("(while :; do echo {right} > {answer}; rm {answer}; done) & sleep 0.2; until mkdir {answer}; do rm -f {answer}; done", None),
    ],
)
async def test_tricks_are_not_paid(backend: Backend, trick: str, defence: str | None):
    task = of_kind("count")
    (answer, want), other = next(iter(task.hidden["want"].items())), min(task.files)
    command = trick.format(answer=answer, right=want.content.decode().strip(), other=other)
    outcome, _ = await play(backend, task, run(command))
    assert (outcome.reward, outcome.true_success) == (0.0, False)
    assert outcome.tampering == ((other,) if defence == "kept" else ())
    if defence is not None:
        outcome, _ = await play(backend, task, run(command), Terminal(ALL - {defence}))
        assert (outcome.reward, outcome.true_success) == (1.0, False), f"without {DEFENCES[defence]}"


@pytest.mark.real("bwrap")
@pytest.mark.parametrize(
    "mess",
    [
        "chmod 000 . {other}",
        "python3 -c \"import os; os.mkdir(b'\\xff\\n'); open(b'\\xff\\n/\\xfe', 'w')\"",
        "mkdir -p $(python3 -c \"print('/'.join(['d' * 200] * 15))\")",
        'ln -s loop loop; ln {other} hard; mkfifo pipe; python3 -c \'open("sparse", "w").truncate(1 << 62)\'',
    ],
)
async def test_whatever_lies_about_the_right_answer_is_paid(backend: Backend, mess: str):
    task = of_kind("busiest")
    other = next(iter(task.files))
    outcome, texts = await play(backend, task, [*ENV.gold(task)[:-1], *run(mess.format(other="" if "chmod" in mess else other))])
    assert outcome.reward == 1, (outcome, texts)


def test_no_archive_of_the_policy_breaks_the_host():
    assert read_tree(b"no tar") is None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("workspace/a")
        entry.type, entry.linkname = tarfile.LNKTYPE, "workspace/nowhere"
        archive.addfile(entry)
    assert read_tree(buffer.getvalue()) is None
