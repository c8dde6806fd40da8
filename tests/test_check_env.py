"""Every environment passes a sample of its check; and each thing that the check requires can fail."""

import hashlib
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.protocol import GraderError, Observation, Task
from agentrl_jax.overrides import ConfigError
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from experiments.check_env import NAMES, check, digest, drawn_afresh, line, main, make, nothing, splits_of

ROOT = Path(__file__).parent.parent
SPLITS = ("train", "late")


class Word:
    """Write the word that is asked for."""

    tools = (Tool("write", "Write a word.", {"word": "string"}), Tool("submit", "Hand in.", {"sure": "boolean", "note": "string"}))

    def task(self, seed, split="train"):
        word = hashlib.sha256(f"{split}{seed}".encode()).hexdigest()[:6]
        return Task(f"word/{split}/{seed}", f"Write {word}.", {"word": b""}, {"word": word})

    async def step(self, task, name, arguments, box):
        if name == "submit":
            return Observation("", done=True)
        await box.put({"word": arguments["word"].encode()})
        return Observation("ok", state=await self.state(task, box))

    async def state(self, task, box):
        return hashlib.sha256(await box.get("word") or b"").hexdigest()

    async def score(self, task, box):
        fork = await box.fork()
        solved = await fork.get("word") == task.hidden["word"].encode()
        await fork.close()
        return Outcome(float(solved), true_success=solved)

    def gold(self, task):
        return [("write", {"word": task.hidden["word"]}), ("submit", {"sure": True, "note": "done"})]

    def wrong(self, task):
        return [("write", {"word": "other"}), ("submit", {"sure": True, "note": "done"})]


class PaysAll(Word):
    async def score(self, task, box):
        return Outcome(1.0, true_success=True)


class PaysNothing(Word):
    async def score(self, task, box):
        return Outcome(0.0, true_success=False)


class PaysWithoutTruth(Word):
    async def score(self, task, box):
        return replace(await super().score(task, box), true_success=None)


class FlagsGold(Word):
    async def score(self, task, box):
        return replace(await super().score(task, box), tampering=("word",))


class Scolds(Word):
    async def step(self, task, name, arguments, box):
        return replace(await super().step(task, name, arguments, box), count="tool_errors")


class NoGrader(Word):
    async def score(self, task, box):
        raise GraderError("the gold solution fails too")


class NeverEnds(Word):
    def gold(self, task):
        return [*super().gold(task)[:1], ("write", {"word": "more"})]


class Fickle(Word):
    drawn = itertools.count()

    def task(self, seed, split="train"):
        return replace(super().task(seed, split), privileged=str(next(self.drawn)))


class Unhinged(Word):
    """Its keys depend on the box."""

    boxes: ClassVar[list[object]] = []  # kept, as the `id` of one that is gone may be another's

    async def state(self, task, box):
        if box not in self.boxes:
            self.boxes.append(box)
        return f"{self.boxes.index(box)}"


class TellsOther(Word):
    async def step(self, task, name, arguments, box):
        observation = await super().step(task, name, arguments, box)
        return observation if observation.done else replace(observation, state="after")


class HashSeed(Word):
    """Its tasks depend on the process."""

    def task(self, seed, split="train"):
        return replace(super().task(seed, split), privileged=str(hash(f"{split}{seed}")))


pays_all = PaysAll()


@pytest.fixture
async def backend():
    async with Bubblewrap() as backend:
        yield backend


@pytest.mark.real("bwrap")
async def test_an_environment_that_holds(backend):
    row = await check(Word(), backend, split="train", tasks=3)
    assert row.faults == []
    assert (row.rewards["null"], row.rewards["gold"], row.rewards["wrong"]) == ([0] * 3, [1] * 3, [0] * 3)
    assert row.rewards["expert"] == []
    # start; state; put, get of the first call; fork, get of the score
    assert row.calls == [6] * 3
    assert "WRONG" not in line("word", "train", row, 200)


@pytest.mark.real("bwrap")
@pytest.mark.parametrize(
    ("env", "faults"),
    [
        (PaysAll, ["null gives", "wrong gives"]),
        (PaysNothing, ["gold gives"]),
        (PaysWithoutTruth, ["gold gives", "null gives", "wrong gives"]),
        (FlagsGold, ["gold gives"]),
        (Scolds, ["gold is told ['write: ok']"]),
        (NoGrader, ["GraderError: the gold solution fails too"]),
        (NeverEnds, ["ScriptError: the calls end in write"]),
        (Fickle, ["drawn a second time it is another task"]),
        (Unhinged, ["the same calls lead to states", "boxes start in different states"]),
        (TellsOther, ["the same calls lead to states"]),
    ],
)
async def test_each_requirement_can_fail(env, faults, backend):
    row = await check(env(), backend, split="train", tasks=1)
    assert len(row.faults) == len(faults)
    for told, fault in zip(row.faults, faults, strict=True):
        assert told.startswith("word/train/0: ")
        assert fault in told
    assert "WRONG" in line("word", "train", row, 200)


async def test_a_task_of_its_own_process_is_another():
    afresh = await drawn_afresh(f"{__file__}:HashSeed", ["train"])
    assert afresh["train"] != [digest(HashSeed().task(seed)) for seed in range(3)]
    assert await drawn_afresh(f"{__file__}:Word", SPLITS) == {s: [digest(Word().task(seed, s)) for seed in range(3)] for s in SPLITS}


def test_the_null_policy_has_nothing_to_say():
    assert nothing(Word(), Word().task(0)) == [("submit", {"sure": False, "note": ""})]


def test_splits_are_those_of_the_module():
    assert splits_of(Word()) == SPLITS
    assert splits_of(make("bugfix0")) == ("train", "held_out", "held_out_bugs", "held_out_functions")


def test_an_unknown_environment_is_an_error():
    with pytest.raises(ConfigError, match=r"no environment 'bugfix'.*bugfix0, .*file\.py:Class"):
        make("bugfix")


@pytest.mark.real("bwrap")
async def test_the_exit_status_tells(capsys):
    assert await main([f"{__file__}:Word"], ["late"], 1) == 0
    out = capsys.readouterr().out
    assert "200/200" in out
    assert "all rows are as they must be" in out
    assert await main([f"{__file__}:pays_all"], ["late"], 1) == 1
    out = capsys.readouterr().out
    assert "1 rows are not as they must be" in out
    assert "word/late/0: null gives" in out


@pytest.mark.real("bwrap")
async def test_what_is_not_installed_is_skipped_with_the_reason(capsys, monkeypatch):
    monkeypatch.setitem(NAMES, "search", ("nowhere_to_be_found", "Search", ()))
    assert await main(["search"], [], 1) == 0
    assert "search         skipped: No module named 'agentrl_jax.envs.nowhere_to_be_found'" in capsys.readouterr().out


def test_the_command_refuses_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.check_env", "--env", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no environment 'nothing'")


@pytest.mark.slow
@pytest.mark.real("bwrap")
@pytest.mark.parametrize("name", NAMES)
async def test_a_sample_of_every_environment(name, backend):
    try:
        env = make(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    row = await check(env, backend, split="train", tasks=2)
    assert row.faults == []
