"""Experiments: what they refuse, how a file is loaded, what the command line may change, what is written down of them."""

import json
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import hypothesis
import pytest
from hypothesis import strategies as st

from agentrl_jax import config, credit, objective
from agentrl_jax.config import (
    Compute,
    ConfigError,
    Critic,
    Evaluate,
    Experiment,
    Limits,
    Lora,
    Mesh,
    Optimizer,
    Rollout,
    WarmStart,
    describe,
    differences,
    override,
)
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.expert import expert
from agentrl_jax.overrides import assignments
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

BASE = Experiment(name="base", environment=BugFix(), expert=expert, advantage=partial(credit.grpo, std="none"), loss=objective.ppo)

FILE = """
from agentrl_jax import credit, objective
from agentrl_jax.config import Experiment, Rollout
from agentrl_jax.envs.bugfix import BugFix
from agentrl_jax.envs.expert import expert

def rule(batch, estimates, *, half=1.0):
    return credit.grpo(batch, estimates)

experiment = Experiment(
    name="x", environment=BugFix(), expert=expert, advantage=rule, loss=objective.ppo, rollout=Rollout(groups={groups})
)
"""


def spoilt(record: Any, name: str, value: object) -> Any:
    """With another value in a field, which the type checks that tests run under would refuse before we do."""
    object.__setattr__(record, name, value)
    return record


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rollout(groups=0), "rollout.groups must be above 0 and finite, got 0"),
        (lambda: Rollout(groups="8"), "rollout.groups must be int, got '8'"),
        (lambda: Rollout(groups=True), "rollout.groups must be int, got True"),
        (lambda: Rollout(temperature=float("nan")), "rollout.temperature must be above 0"),
        (lambda: Rollout(turn_tokens=512), "rollout.turn_tokens must be below rollout.context=512, got 512"),
        (lambda: WarmStart(threshold=1.5), "warmstart.threshold must be between 0 and 1, got 1.5"),
        (lambda: Limits(handling="drpo"), "limits.handling must be score | drop, got 'drpo'"),
        (lambda: Limits(dropped_in_stats=True), "limits.dropped_in_stats=true needs limits.handling=drop"),
        (lambda: Optimizer(learning_rate=-1.0), "optimizer.learning_rate must be above 0"),
        (lambda: Optimizer(weight_decay=-0.1), "optimizer.weight_decay must be 0 or more"),
        (lambda: Lora(rank=0), "lora.rank must be above 0"),
        (lambda: Lora(projections=("q_proj", "w")), "lora.projections must be one or more of q_proj, k_proj, v_proj"),
        (lambda: Mesh(fsdp=0), "mesh.fsdp must be above 0"),
        (lambda: Mesh(data=-1), "mesh.data must be above 0, or none for what the others leave, got -1"),
        (lambda: Critic(trunk="both"), "critic.trunk must be separate | shared, got 'both'"),
        (lambda: Critic(clip=0.0), "critic.clip must be above 0 and finite, got 0.0"),
        (lambda: Critic(coefficient=-1.0), "critic.coefficient must be 0 or more and finite"),
        (lambda: replace(BASE, critic=Critic(warmup=160)), "critic.warmup must be below steps x optimizer.minibatches = 160 updates"),
        (lambda: Evaluate(every=0), "evaluate.every must be above 0"),
        (lambda: replace(BASE, name="a/b"), "name must be a folder name"),
        (lambda: replace(BASE, compute=spoilt(Compute(), "dtype", "bf16")), "compute.dtype must be float32 | bfloat16, got 'bf16'"),
        (lambda: replace(BASE, seed=-1), "seed must be 0 or more"),
        (lambda: replace(BASE, environment=object()), "environment must be module:name or file.py:name, got <object object"),
        (lambda: replace(BASE, loss="ppo"), "loss must be module:function or file.py:function, got 'ppo'"),
        (lambda: replace(BASE, row_length=100), "rollout.context=512 must not exceed row_length=100"),
        (lambda: replace(BASE, rollout=Rollout(groups=1, group_size=2)), "optimizer.minibatches=4 must not exceed"),
        (lambda: replace(BASE, model=replace(config.SMALL, num_heads=3)), "model.num_heads=3 must be a multiple of model.num_kv_heads=2"),
        (lambda: replace(BASE, model=replace(config.SMALL, head_dim=25)), "model.head_dim must be even"),
        (lambda: replace(BASE, model=replace(config.SMALL, num_layers=0)), "model.num_layers must be above 0"),
    ],
)
def test_a_bad_value_is_refused_when_it_is_made_and_named(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(message)


def test_the_run_folder():
    assert BASE.folder == Path("runs/base")


def test_load(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(FILE.format(groups=4))
    experiment = config.load(path)
    assert experiment.rollout.groups == 4
    # What an experiment file defines is named by the file, as the command line would.
    assert describe(experiment)["advantage"] == f"{path}:rule"
    assert describe(override(experiment, assignments(describe(experiment)))) == describe(experiment)
    path.write_text(FILE.format(groups=5))
    assert config.load(path).rollout.groups == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.format(groups=0), ":11: rollout.groups must be above 0 and finite, got 0"),
        ("x = 1\nexperiment = Experiment()\n", ":2: NameError: name 'Experiment' is not defined"),
        ("x = 1\nx = = 2\n", ":2: SyntaxError: invalid syntax"),
        ("import no_such_module\n", ":1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\n", ": must define `experiment = Experiment(...)`; there is none"),
        ("experiment = 3\n", ": must define `experiment = Experiment(...)`; it is a int"),
    ],
)
def test_a_broken_file_gives_one_error_with_file_line_and_cause(tmp_path, text, message):
    path = tmp_path / "x.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        config.load(path)
    assert str(error.value).startswith(f"{path}{message}")


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    (tmp_path / "bugfix_grpo.py").write_text("")
    with pytest.raises(ConfigError, match=r"bugfix_gpro.py: no such file; did you mean bugfix_grpo.py\?"):
        config.load(tmp_path / "bugfix_gpro.py")


def test_override_by_value_and_by_function():
    changed = override(
        BASE,
        [
            "optimizer.learning_rate=1e-3",
            "optimizer.decay=constant",
            "compute.dtype=bfloat16",
            "compute.remat=true",
            "mesh.data=none",
            "mesh.fsdp=8",
            "rollout.groups=16",
            "limits.handling=drop",
            "limits.dropped_in_stats=true",
            "environment.level=2",
            "advantage=agentrl_jax.credit.of_turns:gigpo",
            "advantage.omega=0.5",
            "loss.clip_high=0.28",
            "model.rope.attention_factor=none",
            "policy=some/folder",
            "sandbox=agentrl_jax.sandbox.bubblewrap:Bubblewrap",
        ],
    )
    assert changed.optimizer == Optimizer(learning_rate=1e-3, decay="constant")
    assert changed.rollout == Rollout(groups=16)
    assert changed.compute == Compute(dtype="bfloat16", remat=True)
    assert changed.mesh == Mesh(fsdp=8)
    assert changed.limits == Limits(handling="drop", dropped_in_stats=True)
    assert isinstance(changed.environment, BugFix)
    assert changed.environment.level == 2
    assert changed.sandbox is Bubblewrap
    assert changed.policy == "some/folder"
    assert differences(describe(BASE), describe(changed), free=["optimizer", "compute", "mesh", "rollout.groups", "limits", "policy"]) == [
        "environment.level: was 0, now 2",
        "advantage: was agentrl_jax.credit.episodes:grpo, now agentrl_jax.credit.of_turns:gigpo",
        "advantage.std: was none, now (not set)",
        "advantage.omega: was (not set), now 0.5",
        "loss.clip_high: was (not set), now 0.28",
    ]
    assert BASE.rollout == Rollout()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.learning_rat=1", "there is no optimizer.learning_rat; did you mean optimizer.learning_rate?"),
        ("group_size=4", "there is no group_size; did you mean rollout.group_size?"),
        ("learning_rate=1", "there is no learning_rate; did you mean warmstart.learning_rate or optimizer.learning_rate?"),
        ("limits.qqq=1", "there is no limits.qqq; known: dropped_in_stats, handling"),
        ("seed.x=1", "there is no seed.x; did you mean seed?"),
        ("rollout.groups=1.5", "rollout.groups must be int, got '1.5'"),
        ("compute.dtype=bf16", "compute.dtype must be float32 | bfloat16, got 'bf16'"),
        ("rollout.groups=", "rollout.groups must be int, got ''"),
        ("limits.dropped_in_stats=1", "limits.dropped_in_stats must be true or false, got '1'"),
        ("limits=drop", "limits is a group of settings; set one of limits.handling, limits.dropped_in_stats"),
        ("advantage.std=all", "advantage.std must be population | sample | leave_one_out | none, got 'all'"),
        ("advantage=grpo", "'grpo' is not module:name or file.py:name"),
        ("advantage=agentrl_jax.credit:gipgo", "agentrl_jax.credit has no 'gipgo'; did you mean gigpo?"),
        ("advantage=no_such:rule", "cannot import 'no_such'"),
        ("advantage=no_such.py:rule", "no_such.py: no such file"),
        ("advantage=agentrl_jax:__version__", "advantage must be module:function or file.py:function"),
        ("rollout.groups=0", "rollout.groups must be above 0 and finite, got 0"),
        ("environment.level=9", "BugFix(level=9)"),
        ("seed", "write path=value"),
    ],
)
def test_a_bad_override_says_what_to_write_instead(assignment, message):
    with pytest.raises(ConfigError) as error:
        override(BASE, [assignment])
    assert str(error.value).startswith(f"override {assignment!r}: {message}")


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of the types that settings have; ranges that pass every check of the records."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return {int: st.integers(64, 10_000), float: st.floats(1e-9, 1.0), bool: st.booleans(), str: st.sampled_from(["a", "b-1"])}[hint]


def settings(node: object, prefix: str = "") -> list[tuple[str, Any]]:
    """(path, type) of every plain setting of nested records."""
    found: list[tuple[str, Any]] = []
    for name, hint in get_type_hints(type(node)).items():
        value = getattr(node, name)
        if is_dataclass(value):
            found += settings(value, f"{prefix}{name}.")
        elif hint in (int, float, bool, str) or get_origin(hint) is Literal:
            found.append((f"{prefix}{name}", hint))
    return found


def test_what_is_optional_is_set_by_its_fields_where_there_is_one():
    adapted = replace(BASE, lora=Lora())
    changed = override(adapted, ["lora.rank=8", "lora.projections=q_proj,v_proj"])
    assert changed.lora == Lora(8, projections=("q_proj", "v_proj"))
    assert override(BASE, assignments(describe(changed))).lora == changed.lora
    assert override(adapted, ["lora=none"]).lora is None
    assert override(BASE, ["lora.rank=8"]).lora == Lora(8)
    with pytest.raises(ConfigError, match=r"there is no lora.ranks; did you mean rank"):
        override(BASE, ["lora.ranks=8"])


def test_settings_that_go_together_are_set_together():
    for order in (["reduction=constant", "horizon=512"], ["horizon=512", "reduction=constant"]):
        changed = override(BASE, order)
        assert (changed.reduction, changed.horizon) == ("constant", 512)
    with pytest.raises(ConfigError, match="override 'reduction=constant steps=3': horizon goes with reduction=constant"):
        override(BASE, ["reduction=constant", "steps=3"])


# Each of these is tied to another setting.
TIED = {"rollout.turn_tokens", "rollout.context", "row_length", "limits.dropped_in_stats", "optimizer.minibatches"}
TIED |= {"model.num_heads", "model.num_kv_heads", "model.head_dim", "reduction", "horizon"}
FREE = [(path, hint) for path, hint in settings(BASE) if path not in TIED]


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.data())
def test_what_was_described_is_read_back_as_it_was(data):
    chosen = data.draw(st.lists(st.sampled_from(FREE), unique_by=lambda setting: setting[0]))
    drawn = {path: data.draw(values(hint), label=path) for path, hint in chosen}
    changed = override(BASE, [f"{path}={str(value).lower() if isinstance(value, bool) else value}" for path, value in drawn.items()])
    described = describe(changed)
    assert {path: described[path] for path in drawn} == drawn
    # Through JSON and back, onto the experiment as it was: nothing differs.
    written = json.loads(json.dumps(described))
    again = override(BASE, assignments(written))
    assert differences(written, describe(again)) == []
    for field in fields(Experiment):
        if field.name not in ("environment", "advantage", "loss"):  # made anew, so equal by description only
            assert getattr(again, field.name) == getattr(changed, field.name)
