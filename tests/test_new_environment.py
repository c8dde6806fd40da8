"""The files that docs/new_environment.md builds are an environment that holds, and an experiment that can be played."""

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from agentrl_jax import config
from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.overrides import load_attribute
from agentrl_jax.rollout.agent import RolloutLimits
from agentrl_jax.rollout.collector import RolloutSettings, plan
from agentrl_jax.rollout.scripted import demonstrate
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from experiments.check_env import check

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "new_environment.md").read_text()
NAMES = ("ledger.py", "ledger_grpo.py")


@pytest.fixture
def folder(tmp_path):
    """The files of the page, as a reader saves them: each block follows the sentence that names its file."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert re.findall(r"as `(\w+\.py)`", TEXT) == list(NAMES)
    for name, block in zip(NAMES, blocks, strict=True):
        (tmp_path / name).write_text(block)
    return tmp_path


def test_the_files_keep_the_rules_of_the_package(folder):
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, "--config", ROOT / "pyproject.toml", folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.real("bwrap")
@pytest.mark.parametrize("split", ["train", "held_out"])
async def test_the_environment_holds(folder, split):
    env = load_attribute(f"{folder / 'ledger.py'}:Ledger")()
    async with Bubblewrap() as backend:
        row = await check(env, backend, split=split, tasks=4)
    assert row.faults == []
    assert (row.rewards["null"], row.rewards["gold"], row.rewards["wrong"]) == ([0] * 4, [1] * 4, [0] * 4)


@pytest.mark.real("bwrap")
async def test_a_changed_ledger_is_flagged_and_pays_nothing(folder):
    env = load_attribute(f"{folder / 'ledger.py'}:Ledger")()
    task = env.task(0)
    async with Bubblewrap() as backend:
        box = await backend.start(task.files)
        await env.step(task, "run", {"command": f"echo {task.hidden['all']},paid > ledger.csv; cut -d, -f1 ledger.csv > total.txt"}, box)
        outcome = await env.score(task, box)
        await box.close()
    assert (outcome.reward, outcome.tampering) == (0.0, ("ledger.csv",))


@pytest.mark.real("bwrap")
async def test_its_experts_episodes_are_what_a_run_begins_with(folder):
    experiment = config.load(folder / "ledger_grpo.py")
    env = experiment.environment
    renderer = Renderer(tokenizer.train([env.task(0).prompt, *scaffolding(env.tools)], 400))
    settings = RolloutSettings(RolloutLimits(turns=4, turn_tokens=200, episode_tokens=600, context=2000))
    jobs = plan([env.task(seed) for seed in range(8)], 1, seed=0, step=0)

    def expert(task, rng: Random):
        return experiment.expert(env, task, rng)

    async with Bubblewrap() as backend:
        episodes = await demonstrate(jobs, env, backend, renderer, settings, expert=expert)
    assert 0 < sum(episode.reward for episode in episodes) < 8, "something is left to learn"
    assert {len(episode.turns) for episode in episodes} == {3}
