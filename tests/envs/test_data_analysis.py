"""Questions about tables: the right answer pays, and nothing else; which tasks there are."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from agentrl_jax import config, overrides
from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.data.episode import Ending
from agentrl_jax.envs.data_analysis import LEVELS, SHOWN, SPLITS, DataAnalysis, held_out
from agentrl_jax.envs.expected import ALL
from agentrl_jax.envs.protocol import Environment, Task
from agentrl_jax.rollout.agent import RolloutLimits
from agentrl_jax.rollout.collector import RolloutSettings, plan
from agentrl_jax.rollout.scripted import demonstrate
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.protocol import Backend
from experiments.data_analysis import experiment, expert

EACH = 2  # tasks of each kind of question


def of_every_kind(level: int) -> list[Task]:
    """The first tasks of each kind, half of them held out."""
    env, found = DataAnalysis(level), Counter[str]()
    tasks = []
    for seed in range(1000):
        task = env.task(seed, SPLITS[seed % 2])
        if found[task.hidden["kind"]] < EACH:
            found[task.hidden["kind"]] += 1
            tasks.append(task)
        if len(tasks) == EACH * len(LEVELS[level]):
            return tasks
    raise AssertionError(f"no tasks of some kind: {found}")


async def rewards(env: DataAnalysis, backend: Backend, task: Task) -> list[tuple[float, float]]:
    """(reward, answered) of submitting nothing, of the wrong way, and of the right way after it."""
    box = await backend.start(task.files, limits=task.limits)
    try:
        outcomes = []
        for calls in ([("submit", {"answer": ""})], env.wrong(task), env.gold(task)):
            observations = [await env.step(task, name, arguments, box) for name, arguments in calls]
            assert [(each.done, each.count) for each in observations] == [(each is observations[-1], None) for each in observations]
            outcome = await env.score(task, box)
            assert outcome.true_success == bool(outcome.reward)
            outcomes.append((outcome.reward, outcome.components["answered"]))
        return outcomes
    finally:
        await box.close()


@pytest.mark.slow
@pytest.mark.real("bwrap")
@pytest.mark.parametrize("level", range(len(LEVELS)))
async def test_only_the_right_way_pays(level: int, backend: Backend):
    env, gate = DataAnalysis(level), asyncio.Semaphore(6)

    async def one(task: Task) -> list[tuple[float, float]]:
        async with gate:
            return await rewards(env, backend, task)

    found = await asyncio.gather(*map(one, of_every_kind(level)))
    assert len(found) == EACH * len(LEVELS[level])
    assert all(each == [(0, 0), (0, 1), (1, 1)] for each in found)


@pytest.mark.real("docker")
async def test_only_the_right_way_pays_in_docker_too():
    env = DataAnalysis(2)
    async with Docker() as backend:
        for seed in range(2):
            assert await rewards(env, backend, env.task(seed)) == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.real("bwrap")
async def test_pandas_answers_too():
    pytest.importorskip("pandas", reason="pandas: not installed")
    env = DataAnalysis(0)
    task = next(task for seed in range(100) if (task := env.task(seed)).hidden["kind"] == "top_product")
    code = "import pandas as pd\nt = pd.read_csv('orders.csv')\nbest = t.groupby('product').units.sum().idxmax()\nbest"
    async with Bubblewrap(packages=("pandas",)) as backend:
        box = await backend.start(task.files, limits=task.limits)
        shown = await env.step(task, "python", {"code": code}, box)
        assert shown.text == repr(task.hidden["expected"].value)
        assert (await env.step(task, "submit", {"answer": shown.text}, box)).done
        assert (await env.score(task, box)).reward == 1


@pytest.mark.real("bwrap")
async def test_the_box_holds_the_tables_and_nothing_else(backend: Backend):
    env = DataAnalysis(2)
    task = env.task(3)
    box = await backend.start(task.files, limits=task.limits)
    listing = await box.exec(["find", ".", "/tmp", "-type", "f"])
    assert sorted(listing.text.split()) == sorted(f"./{path}" for path in task.files)


@pytest.mark.real("bwrap")
async def test_tricks_pay_only_where_a_defence_is_off_and_are_never_true(backend: Backend):
    for defence, answer in (("single", "{} or 0"), ("finite", "nan")):
        for defences in (ALL, ALL - {defence}):
            env = DataAnalysis(1, defences)
            task = next(task for seed in range(100) if (task := env.task(seed)).hidden["kind"] == "turnover")
            box = await backend.start(task.files)
            assert (await env.step(task, "submit", {"answer": answer.format(task.hidden["expected"].text)}, box)).done
            outcome = await env.score(task, box)
            assert (outcome.reward, outcome.true_success) == (float(defence not in defences), False)


@pytest.mark.real("bwrap")
async def test_an_answer_that_cannot_be_written_is_told(backend: Backend):
    env = DataAnalysis(0)
    task = env.task(0)
    box = await backend.start(task.files)
    await env.step(task, "python", {"code": "import os, shutil; os.makedirs('answer.txt/full')"}, box)
    observation = await env.step(task, "submit", {"answer": task.hidden["expected"].text}, box)
    assert not observation.done
    assert observation.count == "tool_errors"
    assert observation.text.startswith("error: answer.txt cannot be written")
    assert (await env.score(task, box)).reward == 0
    await env.step(task, "python", {"code": "shutil.rmtree('answer.txt')"}, box)
    assert (await env.step(task, "submit", {"answer": task.hidden["expected"].text}, box)).done
    assert (await env.score(task, box)).reward == 1


@pytest.mark.real("bwrap")
async def test_steps_are_clipped_and_unknown_tools_told(backend: Backend):
    env = DataAnalysis(0)
    task = env.task(0)
    box = await backend.start(task.files)
    assert len((await env.step(task, "python", {"code": "print('a' * 10**5)"}, box)).text) <= SHOWN
    told = await env.step(task, "shell", {}, box)
    assert (told.text, told.count, told.state) == ("error: no tool shell", "tool_errors", await env.state(task, box))


@pytest.mark.real("bwrap")
async def test_episodes_of_the_expert(backend: Backend):
    env = DataAnalysis(0)
    tasks = [env.task(seed) for seed in range(6)]
    texts = [task.prompt for task in tasks] + [call["code"] for task in tasks for _, call in env.gold(task) if "code" in call]
    renderer = Renderer(tokenizer.train([*texts, *scaffolding(env.tools)], 600))
    settings = RolloutSettings(RolloutLimits(turns=8, turn_tokens=400, episode_tokens=1200, context=2000))

    def script(task: Task, rng: Random):
        return expert(env, task, rng)

    episodes = await demonstrate(plan(tasks, 2, seed=0, step=0), env, backend, renderer, settings, expert=script)
    assert {episode.ending for episode in episodes} == {Ending.SUBMITTED}
    assert {episode.outcome.reward for episode in episodes if episode.outcome} == {0.0, 1.0}
    firsts = {(episode.task, episode.turns[0].state) for episode in episodes}
    assert len(firsts) == len(tasks), "episodes of a task begin in one state"
    states = [{turn.state for turn in episode.turns} for episode in episodes if episode.task == tasks[0].id]
    assert len(states[0] & states[1]) > 1, "and meet again after the same cells"


def test_the_same_seed_is_the_same_task_whatever_the_order_of_sets():
    script = """
import hashlib
from agentrl_jax.envs.data_analysis import DataAnalysis
tasks = [DataAnalysis(level).task(seed, split) for level in range(3) for seed in range(8) for split in ("train", "held_out")]
print(hashlib.sha256(repr([(t.id, t.prompt, t.files, t.hidden, t.privileged) for t in tasks]).encode()).hexdigest())"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout


def test_tasks_are_many_and_the_splits_can_have_none_in_common():
    for env in map(DataAnalysis, range(len(LEVELS))):
        assert isinstance(env, Environment)
        for split, count in zip(SPLITS, (60, 6), strict=True):
            tasks = [env.task(seed, split) for seed in range(count)]
            assert len({(task.prompt, *task.files.values()) for task in tasks}) == count
            assert {held_out(task) for task in tasks} == {split == "held_out"}


def test_there_are_many_kinds_of_questions():
    assert sum(map(len, LEVELS)) == len({kind.__name__ for level in LEVELS for kind in level}) >= 20


def test_the_experiment_can_be_described_and_overridden():
    assert overrides.describe(config.override(experiment, ["environment.level=1"]))["environment.level"] == 1


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="levels are 0 to 2"):
        DataAnalysis(3)
    with pytest.raises(ValueError, match="no defence sinlge: there are single, finite, whole"):
        DataAnalysis(0, ("sinlge",))
    with pytest.raises(ValueError, match="one of train, held_out"):
        DataAnalysis(0).task(0, "test")
