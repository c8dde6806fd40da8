"""What people get wrong, and what breaks: one line that says what and how to mend it, exit status 1, and nothing saved is lost."""

import re
import shutil
import tempfile
from pathlib import Path

import pytest

from agentrl_jax import train
from experiments.chaos import tiny
from tests.launch import EXPERIMENT

GOOD = Path(tiny.__file__).read_text()


def fails(capsys, message: str, *arguments: object) -> None:
    """The run fails with one line that the pattern is found in."""
    assert train.main([str(argument) for argument in arguments]) == 1
    *before, line = capsys.readouterr().err.splitlines()
    assert not any("Traceback" in text for text in before)
    assert line.startswith("error: ")
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment = Experiment(\n    name='x',,\n)", r"broken.py:2: SyntaxError"),
        ("import agentrl\n", r"broken.py:1: ModuleNotFoundError: No module named 'agentrl'"),
        ("x = 1", r"broken.py: must define `experiment = Experiment\(...\)`; there is none"),
        ("experiment = {'steps': 3}", r"broken.py: must define .*; it is a dict"),
        (GOOD.replace("steps=5", "steps=-5"), r"broken.py:\d+: steps must be above 0 and finite, got -5"),
        (GOOD.replace("steps=5", "step=5"), r"broken.py:\d+: TypeError: .*'step'"),
    ],
)
def test_broken_experiment_files(capsys, tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    fails(capsys, message, path)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.learningrate=1e-3", r"did you mean optimizer.learning_rate\?"),
        ("stepps=3", r"did you mean steps\?"),
        ("steps=many", r"steps must be int, got 'many'"),
        ("steps", r"write path=value"),
        ("limits.handling=ignore", r"limits.handling must be score \| drop, got 'ignore'"),
        ("advantage=agentrl_jax.credit:grop", r"did you mean grpo\?"),
        ("advantage=missing_rule.py:rule", r"missing_rule.py: no such file"),
    ],
)
def test_overrides_that_cannot_be(capsys, tmp_path, assignment, message):
    fails(capsys, message, EXPERIMENT, f"root={tmp_path}", assignment)
    assert list(tmp_path.iterdir()) == []


def test_no_such_experiment_names_the_nearest(capsys, tmp_path):
    (tmp_path / "bugfix.py").touch()
    fails(capsys, r"bugfx.py: no such file; did you mean bugfix.py\?", tmp_path / "bugfx.py")


def test_without_arguments_it_says_how_to_call_it(capsys):
    assert train.main([]) == 2
    assert "EXPERIMENT.py [field=value ...]" in capsys.readouterr().err


@pytest.fixture
def copy(tmp_path: Path, finished: Path) -> Path:
    """A copy of a finished run, to be spoilt. Resumed with `root` set to its parent."""
    return Path(shutil.copytree(finished, tmp_path / "tiny"))


def resume(folder: Path) -> tuple[str, str]:
    return EXPERIMENT, f"root={folder.parent}"


def contents(folder: Path) -> dict[str, bytes]:
    """What was collected and credited."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix == ".store"}


def spoil(path: Path, at: float = 0.5, cut: bool = False) -> None:
    """Flip the byte at a fraction of a file, or cut the file off there."""
    data = bytearray(path.read_bytes())
    position = int(at * len(data))
    data[position] ^= 0xFF
    path.write_bytes(data[:position] if cut else data)


@pytest.mark.real("bwrap")
@pytest.mark.slow
class TestDamage:
    """Of a run that was started before. The rest of it stays as it is."""

    def test_checkpoint(self, capsys, copy):
        latest = max((path for path in (copy / "checkpoints").iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
        for file in latest.rglob("*"):
            if file.is_file() and file.parent.name == "d":
                spoil(file, cut=True)
        before = contents(copy)
        fails(capsys, rf"checkpoints/{latest.name}: cannot read the checkpoint: .*move it away to go on from step 4", *resume(copy))
        assert contents(copy) == before

    def test_episodes(self, capsys, copy):
        spoil(copy / "episodes.store")
        before = contents(copy)
        fails(capsys, r"episodes.store: damaged at byte \d+, .*salvage", *resume(copy))
        assert contents(copy) == before

    def test_warm_start(self, capsys, copy):
        spoil(copy / "warmstart" / "model.safetensors", cut=True)
        fails(capsys, r"warmstart/model.safetensors: not a whole safetensors file", *resume(copy))

    def test_tokenizer_of_the_warm_start(self, capsys, copy):
        spoil(copy / "warmstart" / "tokenizer.json", cut=True)
        fails(capsys, r"warmstart/tokenizer.json: not a tokenizer file", *resume(copy))

    def test_demonstrations(self, capsys, copy):
        shutil.rmtree(copy / "warmstart")
        spoil(copy / "expert.store")
        fails(capsys, r"expert.store: damaged at byte", *resume(copy))

    def test_metrics(self, capsys, copy):
        path = copy / "metrics.jsonl"
        path.write_text(path.read_text().replace('{"step": 2', '{"stop": 2'))
        fails(capsys, r"metrics.jsonl, line 3: not a metrics record", *resume(copy))

    @pytest.mark.parametrize("name", ["config.json", "before.json"])
    def test_small_files(self, capsys, copy, name):
        spoil(copy / name, cut=True)
        fails(capsys, rf"{name}: not valid JSON", *resume(copy))

    def test_folder_of_the_policy_to_start_from(self, capsys, tmp_path):
        fails(capsys, r"config.json: ", EXPERIMENT, f"root={tmp_path}", f"policy={tmp_path}")


@pytest.mark.real("bwrap")
def test_another_experiments_run_is_not_gone_on_with(capsys, finished):
    assert train.main([*resume(finished), "seed=1", "optimizer.learning_rate=1e-2"]) == 1
    line, *changed = capsys.readouterr().err.splitlines()
    assert line == f"error: {finished} holds a run of another experiment; choose another name, or delete it. Changed:"
    assert changed == ["  seed: was 0, now 1", "  optimizer.learning_rate: was 0.003, now 0.01"]


@pytest.mark.real("bwrap")
@pytest.mark.slow
def test_no_user_namespaces(capsys, tmp_path, monkeypatch):
    """A bubblewrap that answers as the kernel makes it answer where user namespaces are switched off."""
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text("""#!/bin/sh
[ "$1" = --version ] && { echo bubblewrap 0.11.0; exit; }
echo "bwrap: No permissions to create new namespace" >&2
exit 1
""")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    with tempfile.TemporaryDirectory() as folder:  # of the sandbox's root, which other users must be able to enter
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        fails(capsys, "this process may not make user namespaces", EXPERIMENT, f"root={tmp_path}")
