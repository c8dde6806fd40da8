"""The folder of a run: whose it is, what it was made by, and how errors of a command are told to people."""

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_jax import config
from agentrl_jax.config import ConfigError, Experiment
from agentrl_jax.data.frames import StoreError
from agentrl_jax.inference.protocol import InferenceError
from agentrl_jax.learner.checkpoint import CheckpointError
from agentrl_jax.models.hf_config import PretrainedError
from agentrl_jax.report.load import CONFIG
from agentrl_jax.report.metrics import MetricsError
from agentrl_jax.report.score import Score
from agentrl_jax.rollout.collector import CollectError
from agentrl_jax.sandbox.protocol import SandboxError

BEFORE, AFTER = "before.json", "after.json"
"""Files with the success rates of the policy that a run started from and of the one it ended with."""

FREE = ("name", "root", "checkpoint_every", "evaluate", "mesh", "rollout.slots", "rollout.retries", "inference.urls", "inference.venv")
"""What may change when a run is resumed."""

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ERRORS = (ConfigError, StoreError, CheckpointError, MetricsError, PretrainedError, CollectError, SandboxError, InferenceError)
"""What a person can mend: told in one line, without a traceback. So is trouble with a file or a full disk."""


def claim(folder: Path, experiment: Experiment) -> None:
    """Make the folder this experiment's, or check that it is. Raises ConfigError with every field that differs."""
    described = config.describe(experiment)
    path = folder / CONFIG
    then = _read_json(path, "restore it, or choose another name") if path.exists() else described
    if changed := config.differences(then, described, free=FREE):
        listed = "\n  ".join(changed)
        raise ConfigError(f"{folder} holds a run of another experiment; choose another name, or delete it. Changed:\n  {listed}")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(path, described)


def read_score(path: Path) -> Score | None:
    """The score in a file, if it was measured."""
    if not path.exists():
        return None
    return {name: (won, n) for name, (won, n) in _read_json(path, "delete it to measure again").items()}


def write_score(path: Path, score: Score) -> Score:
    """Keep a score in a file; returns it."""
    _write_json(path, score)
    return score


def _read_json(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); {remedy}") from error


def _write_json(path: Path, value: object) -> None:
    """Whole or not at all: what the file held before survives a full disk."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1), "utf-8")
    os.replace(partial, path)


@dataclass
class Status:
    """Exit status of a command."""

    code: int = 0


@contextmanager
def reported() -> Iterator[Status]:
    """Tell errors that a person can mend in one line, and Ctrl-C without a traceback."""
    status = Status()
    try:
        yield status
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from here" + "\n")
        status.code = 130
    except Exception as error:
        causes = _causes(error)
        if not all(map(_mendable, causes)):
            raise
        sys.stderr.write(f"error: {causes[0]}" + "\n")
        status.code = 1


def _mendable(error: Exception) -> bool:
    of_a_file = isinstance(error, OSError) and (error.filename is not None or error.errno in DISK)
    return of_a_file or isinstance(error, ERRORS)


def _causes(error: Exception) -> list[Exception]:
    """What went wrong: several things where tasks ran at the same time."""
    return [cause for each in error.exceptions for cause in _causes(each)] if isinstance(error, ExceptionGroup) else [error]
