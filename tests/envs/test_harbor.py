"""Task folders: read as they are, played in real boxes, and what is wrong with one said in a sentence."""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.harbor import ALL, Harbor, rewards
from agentrl_jax.envs.protocol import Call, Environment, Task
from agentrl_jax.envs.shell import Entry
from agentrl_jax.envs.taskfolder import MOST, FolderError, load, read
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.protocol import Backend, ImageError

FOLDERS = Path(__file__).parent / "harbor"
NOTHING = [("submit", {})]


def task_of(env: Harbor, name: str) -> Task:
    return next(task for task in (env.task(seed, "all") for seed in range(100)) if task.id == f"harbor/{name}")


async def play(backend: Backend, env: Harbor, task: Task, calls: Sequence[Call]) -> Outcome:
    box = await backend.start(task.files, limits=task.limits, image=task.image)
    try:
        for call in calls:
            await env.step(task, *call, box)
        return await env.score(task, box)
    finally:
        await box.close()


def run(*commands: str) -> list[Call]:
    return [("run", {"command": command}) for command in commands]


@pytest.fixture(
    params=[
        pytest.param(Bubblewrap, id="bubblewrap", marks=pytest.mark.real("bwrap")),
        pytest.param(Docker, id="docker", marks=pytest.mark.real("docker")),
    ]
)
async def either(request: pytest.FixtureRequest):
    async with request.param() as backend:
        yield backend


async def test_the_solution_of_a_plain_folder_scores_on_every_backend(either: Backend):
    env = Harbor(FOLDERS)
    assert isinstance(env, Environment)
    task = task_of(env, "greet")
    assert await play(either, env, task, env.gold(task)) == Outcome(1.0, {"verified": 1.0, "reward/reward": 1.0}, true_success=True)
    for calls in (NOTHING, env.wrong(task), run("echo hello ada > greeting.txt; echo >> greeting.txt")):
        assert (await play(either, env, task, calls)).reward == 0


@pytest.mark.real("docker")
async def test_a_dockerfile_is_built_and_named_rewards_are_averaged():
    env = Harbor(FOLDERS)
    task = task_of(env, "count")
    async with Docker() as backend:
        outcome = await play(backend, env, task, env.gold(task))
        assert outcome == Outcome(1.0, {"verified": 1.0, "reward/answer": 1.0, "reward/log": 1.0}, true_success=True)
        half = await play(backend, env, task, run("echo 137 > answer"))
        assert (half.reward, half.true_success, half.components["reward/log"]) == (0.5, False, 0.0)
        nothing = await play(backend, env, task, NOTHING)
        assert (nothing.reward, nothing.components) == (0.0, {"verified": 0.0}), "its tests fail before they write a reward"
        measure = task_of(env, "measure")
        assert (await play(backend, env, measure, NOTHING)).reward == 0.25
        with pytest.raises(ValueError, match=r"harbor/measure: the folder has no solution/solve\.sh"):
            env.gold(measure)
    async with Bubblewrap() as backend:
        with pytest.raises(ImageError, match=r"cannot start .*count/environment: use the Docker backend"):
            await play(backend, env, task, NOTHING)


@pytest.mark.parametrize(
    ("trick", "defence"),
    [
        ("mkdir -p /tmp/logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 000 /tmp/logs/verifier /tmp/logs", None),
        ("mkdir -p /tmp/logs/verifier; ln -s /workspace/mine /logs/verifier/reward.txt; echo 1 > mine", None),
        ("mkdir /tmp/tests; echo echo 1 '>' /logs/verifier/reward.txt > /tests/test.sh; chmod 555 /tmp/tests", None),
        ("ln -s /workspace /tmp/tests; mkdir /tmp/logs; ln -s /workspace /tmp/logs/verifier; echo 1 > reward.txt", None),
        ("(while :; do mkdir -p /tmp/logs/verifier; echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 & sleep 0.1", "fork"),
    ],
)
async def test_a_reward_that_the_policy_writes_is_none(either: Backend, trick: str, defence: str | None):
    env = Harbor(FOLDERS)
    task = task_of(env, "greet")
    outcome = await play(either, env, task, run(trick))
    assert (outcome.reward, outcome.true_success) == (0.0, False)
    if defence is not None and isinstance(either, Docker):
        assert (await play(either, Harbor(FOLDERS, ALL - {defence}), task, run(trick))).true_success is False


@pytest.mark.real("bwrap")
async def test_start_up_files_of_the_policy_do_not_run_within_the_tests():
    site = "p=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $p"
    cheat = "import sys; sys.argv[0].endswith('check.py') and [open('/logs/verifier/x', 'w'), __import__('os')._exit(0)]"
    command = f'{site}; echo "{cheat}" > $p/usercustomize.py; echo hello ada > greeting.txt; echo >> greeting.txt'
    task = task_of(Harbor(FOLDERS), "greet")
    paid = []
    async with Bubblewrap() as backend:
        for defences in (ALL, ALL - {"python"}):
            outcome = await play(backend, Harbor(FOLDERS, defences), task, run(command))
            paid.append((outcome.reward, outcome.true_success))
    assert paid == [(0.0, False), (1.0, False)]


def test_what_the_folder_says_becomes_limits_and_variables():
    greet, count = read(FOLDERS / "greet"), read(FOLDERS / "count")
    assert (greet.limits.seconds, greet.limits.memory, greet.limits.disk, greet.verifier_seconds) == (20.0, 512 << 20, 64 << 20, 30.0)
    assert (count.limits.seconds, count.limits.memory, count.limits.disk) == (MOST.seconds, 1 << 30, MOST.disk)
    assert (greet.image, greet.files, greet.env) == (None, {"name.txt": b"ada\n"}, {"GREETING": "hello"})
    assert (count.image, count.files) == (FOLDERS / "count/environment", {})
    assert task_of(Harbor(FOLDERS), "greet").prompt == (FOLDERS / "greet/instruction.md").read_text()
    assert "check.py" in greet.tests


@pytest.mark.parametrize(
    ("dockerfile", "files"),
    [
        ("FROM agentrl-jax-sandbox\nWORKDIR /workspace\nCOPY . /workspace/in/\n", {"in/Dockerfile", "in/name.txt"}),
        ("FROM agentrl-jax-sandbox\nCOPY name.txt /app/as\nCOPY \\\n name.txt deep/\n", {"as", "deep/name.txt"}),
        ("FROM agentrl-jax-sandbox\nWORKDIR /elsewhere\n", None),
        ("FROM agentrl-jax-sandbox:other\n", None),
        ("FROM agentrl-jax-sandbox\nCOPY --chown=1:1 name.txt .\n", None),
        ("FROM agentrl-jax-sandbox\nCOPY *.txt .\n", None),
        ("FROM agentrl-jax-sandbox\nCOPY name.txt /etc/\n", None),
        ("FROM agentrl-jax-sandbox\nENV A=1\n", None),
    ],
)
def test_which_dockerfiles_need_no_image(tmp_path: Path, dockerfile: str, files: set[str] | None):
    folder = shutil.copytree(FOLDERS / "greet", tmp_path / "greet")
    (folder / "environment/Dockerfile").write_text(dockerfile)
    task = read(folder)
    assert (None if task.image else set(task.files)) == files


def test_a_docker_image_is_taken_by_its_name(tmp_path: Path):
    folder = shutil.copytree(FOLDERS / "measure", tmp_path / "named")
    (folder / "task.toml").write_text('[environment]\ndocker_image = "some/image:1"\n')
    shutil.rmtree(folder / "environment")
    assert read(folder).image == "some/image:1"


def written(name: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def linked(folder: Path) -> None:
    (folder / "tests/link").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "task.toml").unlink(), r"task\.toml: No such file"),
        (lambda folder: (folder / "instruction.md").unlink(), r"instruction\.md: No such file"),
        (lambda folder: shutil.rmtree(folder / "environment"), r"environment/Dockerfile: No such file"),
        (lambda folder: (folder / "tests/test.sh").unlink(), r"tests/test\.sh: missing"),
        (lambda folder: (folder / "solution/solve.sh").unlink(), r"solution/solve\.sh: missing"),
        (linked, r"tests/link: neither a regular file nor a folder"),
        (written("instruction.md", b"\xff"), r"instruction\.md: not UTF-8 at byte 0"),
        (written("instruction.md", b"\n"), r"instruction\.md: empty"),
        (written("task.toml", b"[agent\n"), r"task\.toml: not TOML: .*line 1"),
        (written("task.toml", "[agent]\ntimeout = 3\n"), r"task\.toml: agent\.timeout: unknown; known are timeout_sec"),
        (written("task.toml", "[agnt]\n"), r"task\.toml: agnt: unknown; known are agent, environment"),
        (written("task.toml", 'agent = "x"\n'), r"task\.toml: agent: must be dict, got 'x'"),
        (written("task.toml", '[verifier]\ntimeout_sec = "9"\n'), r"task\.toml: verifier\.timeout_sec: must be int or float, got '9'"),
        (written("task.toml", "[verifier]\ntimeout_sec = true\n"), r"verifier\.timeout_sec: must be int or float, got True"),
        (written("task.toml", "[verifier]\ntimeout_sec = nan\n"), r"verifier\.timeout_sec: must be positive, got nan"),
        (written("task.toml", "[environment]\nmemory_mb = 0\n"), r"environment\.memory_mb: must be positive, got 0"),
        (written("task.toml", '[environment]\nmemory = "much"\n'), r"environment\.memory: must be a size such as \"2G\", got 'much'"),
        (written("task.toml", "[environment]\ngpus = 1\n"), r"environment\.gpus = 1: boxes here have nothing of the kind"),
        (written("task.toml", '[environment]\nos = "windows"\n'), r"environment\.os = 'windows': boxes here have nothing"),
        (written("task.toml", '[verifier]\nuser = "root"\n'), r"verifier\.user = 'root': boxes here have nothing of the kind"),
        (written("task.toml", '[verifier.env]\nKEY = "${SECRET}"\n'), r"verifier\.env\.KEY = '\$\{SECRET\}': variables of this machine"),
        (written("task.toml", "[solution.env]\nKEY = 1\n"), r"solution\.env\.KEY: must be a name and a text, got 1"),
        (written("environment/docker-compose.yaml", "x"), r"docker-compose\.yaml: boxes here are one container each"),
        (written("environment/Dockerfile", "FROM x\nCOPY ../secret .\n"), r"Dockerfile: COPY \.\./secret \.: \.\./secret leads out of"),
        (written("environment/Dockerfile", "RUN true\n"), r"Dockerfile: FROM is missing"),
        (written("environment/Dockerfile", "FROM x\nVOLUME /data\n"), r"Dockerfile: VOLUME /data would be a disk without limit"),
        (written("environment/Dockerfile", "FROM x\nRUNN true\n"), r"Dockerfile: RUNN: no instruction of a Dockerfile"),
        (written("solution/data", bytes(1 << 17)), r"solution: more than 64 KiB"),
    ],
)
def test_a_bad_folder_is_one_error_and_the_others_go_on(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str, caplog: pytest.LogCaptureFixture
):
    for name in ("bad", "good"):
        shutil.copytree(FOLDERS / "greet", tmp_path / name)
    spoil(tmp_path / "bad")
    with pytest.raises(FolderError, match=problem):
        read(tmp_path / "bad")
    tasks, errors = load(tmp_path)
    assert ([task.name for task in tasks], len(errors)) == (["good"], 1)
    with caplog.at_level(logging.WARNING):
        env = Harbor(tmp_path)
    assert env.errors == tuple(errors)
    assert errors[0] in caplog.text
    assert env.task(3, "all").id == "harbor/good"
    if (tmp_path / "bad/task.toml").exists():
        with pytest.raises(FolderError, match=problem):
            Harbor(tmp_path / "bad")


def test_a_folder_without_tasks_and_unknown_names_are_errors(tmp_path: Path):
    with pytest.raises(FolderError, match=r"no task; a task is a folder with a task\.toml"):
        Harbor(tmp_path)
    with pytest.raises(FolderError, match="nowhere: no folder"):
        Harbor(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="split 'test': one of train, held_out, all"):
        Harbor(FOLDERS).task(0, "test")
    with pytest.raises(ValueError, match="no defence x: there are fork, clear, python"):
        Harbor(FOLDERS, ["x"])


@pytest.mark.parametrize(
    ("text", "named", "expected"),
    [
        ("1", None, {"reward": 1.0}),
        (" 0.5\n", '{"reward": 1}', {"reward": 0.5}),
        (None, '{"a": 1, "reward": 0.5}', {"a": 1.0, "reward": 0.5}),
        ("", None, None),
        ("nan", None, None),
        ("inf", None, None),
        ("1 1", None, None),
        (None, "[1]", None),
        (None, "{}", None),
        (None, '{"a": true}', None),
        (None, '{"a": "1"}', None),
        (None, '{"a": NaN}', None),
        (None, '{"a": 1' + "0" * 400 + "}", None),
        (None, "[" * 100_000, None),
        (None, None, None),
    ],
)
def test_which_rewards_are_read(text: str | None, named: str | None, expected: dict[str, float] | None):
    contents = {"txt": text, "json": named}
    files = {f"tmp/logs/verifier/reward.{end}": Entry("file", 0o644, c.encode(), len(c)) for end, c in contents.items() if c is not None}
    assert rewards(files) == expected
