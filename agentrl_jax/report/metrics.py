"""What a run measured, one line per step: `metrics.jsonl` for programs, TensorBoard events beside it.

Every name is declared in `TABLE`; writing an undeclared one is an error, so a misspelt metric cannot make a new curve.
A value that is not finite is written as the string "nan", "inf" or "-inf": strict JSON, and nothing is lost.
Steps increase strictly, so a resumed run cuts the file at its first step and goes on; TensorBoard is told to do the same.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] - made when it is imported
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from agentrl_jax.data.episode import Ending
from agentrl_jax.report.audit import ALARM

FILE = "metrics.jsonl"


class MetricsError(ValueError):
    """A metrics file cannot be read or written. The message names the file, and the line where one is no record."""


@dataclass(frozen=True)
class Metric:
    """One row of the table. A name that ends in `/*` declares a family: its members are named by the data."""

    name: str
    unit: str
    meaning: str


def _of_episodes(phase: str, whose: str) -> tuple[Metric, ...]:
    """What `summary.summarise` measures, once for the episodes that are trained on and once for those of an evaluation."""
    rows = (
        ("episodes", "episodes", "all that ended, however they ended"),
        ("usable", "episodes", "those with the policy's own ending and a reward; the base of reward and reward_std"),
        ("graded", "episodes", "usable ones of which the verifier knows whether they succeeded; the base of success"),
        ("success", "fraction", "graded episodes that truly succeeded"),
        ("reward", "reward", "mean final reward of the usable episodes"),
        ("reward_std", "reward", "population standard deviation of the same"),
        ("turns", "turns", "mean number of turns of an episode"),
        ("tokens", "tokens", "mean length of an episode, all authors and segments"),
        ("sampled_tokens", "tokens", "mean number of tokens the policy sampled in an episode"),
        ("invalid_turns", "fraction", "turns whose action did not parse or named no tool"),
        ("tampered", "episodes", "those in which the verifier saw tampering"),
        (
            "audit/true",
            "reward",
            "mean reward over the usable episodes, of those that truly succeeded; of rewards 0 and 1 a share",
        ),
        ("audit/wrong", "reward", "the same of those that did not and yet were paid: wrong fixes that slipped through"),
        ("audit/tampering", "reward", "the same of those that did not and tampered: tampering that slipped through"),
        ("audit/ungraded", "reward", "the same of those of which the verifier does not know; the four add up to the mean reward"),
        ("audit/missed", "reward", "what those that truly succeeded got less than 1, over the usable episodes"),
        ("component/*", "reward", "mean of a named part of the reward over the usable episodes that have it"),
        (
            "count/*",
            "events",
            "sum of a named counter: parse errors, failing tools, tool time-outs, attempts made again by cause, ...",
        ),
        ("share/*", "fraction", "share of the episodes' time: generating, tools, scoring, queueing, ..."),
    )
    endings = tuple((f"ending/{e.value}", "episodes", f"ended by: {e.value.replace('_', ' ')}") for e in Ending)
    return tuple(Metric(f"{phase}/{name}", unit, f"{whose}: {meaning}") for name, unit, meaning in rows + endings)


TABLE: tuple[Metric, ...] = (
    *_of_episodes("rollout", "training episodes"),
    Metric("rollout/tokens_per_second", "tokens/s", "sampled tokens over the seconds of the collection"),
    Metric("rollout/episodes_per_second", "episodes/s", "finished episodes over the seconds of the collection"),
    Metric("rollout/programs", "programs", "of generation, compiled so far in this process; the engine has a bound for them"),
    Metric("rollout/staleness", "updates", "mean age of a trained token: version of the trained weights minus version that sampled it"),
    Metric("rollout/staleness_max", "updates", "age of the oldest trained token"),
    Metric("rollout/degenerate_groups", "fraction", "groups whose members all earned the same, so that they teach nothing"),
    Metric(ALARM, "steps", "1 where reward has risen and true success has not followed, see report/audit.py"),
    Metric("rollout/dropped", "episodes", "usable episodes kept out of the loss: ended by a limit, or not selected by the experiment"),
    Metric("rollout/repetition", "fraction", "4-grams that the policy had sampled before in the same segment, per trained token"),
    *_of_episodes("eval", "evaluation episodes"),
    Metric("train/loss", "loss", "value that was minimised"),
    Metric("train/policy_loss", "loss", "its policy part"),
    Metric("train/value_loss", "loss", "its value part"),
    Metric("train/value", "reward", "mean value that the critic gives the states before trained tokens"),
    Metric("train/value_clip_fraction", "fraction", "trained tokens whose value left the interval around the one before the step"),
    Metric("train/value_gradient_norm", "norm", "global norm of the critic's gradient before clipping"),
    Metric("train/explained_variance", "fraction", "of the returns, by the values before the update: 1 all, 0 none, below 0 worse"),
    Metric("train/entropy", "nats", "mean entropy of the policy at the trained tokens"),
    Metric("train/kl", "nats", "estimated KL of the policy from the one that sampled, per trained token"),
    Metric("train/kl_reference", "nats", "estimated KL of the policy from the reference, per trained token"),
    Metric("train/gradient_norm", "norm", "global norm of the gradient before clipping"),
    Metric("train/update_norm", "norm", "global norm of the change of the weights"),
    Metric("train/learning_rate", "1/step", "learning rate of the last update of the step"),
    Metric("train/ratio", "ratio", "mean importance ratio train/behaviour of the trained tokens"),
    Metric("train/weight", "ratio", "mean weight that the correction gave the trained tokens"),
    Metric("train/clip_fraction", "fraction", "trained tokens whose ratio was clipped"),
    Metric("train/effective_sample_size", "fraction", "(sum w)^2 / (n sum w^2) of the importance weights"),
    Metric("train/logprob_difference", "nats", "mean |trainer - sampler| log-prob of the trained tokens"),
    Metric("train/logprob_difference_max", "nats", "largest |trainer - sampler| log-prob; above 1e-3 in fp32 something is misaligned"),
    Metric("train/advantage_mean", "reward", "mean advantage of the trained tokens"),
    Metric("train/advantage_std", "reward", "standard deviation of the same"),
    Metric("train/tokens", "tokens", "tokens in the loss"),
    Metric("train/skipped", "updates", "1 where the batch was empty or the gradient not finite and the weights stayed"),
    Metric("train/programs", "programs", "of updates, compiled so far in this process: one for each shape of a batch"),
    Metric("train/tokens_per_second", "tokens/s", "tokens of all authors over the seconds of the update"),
    Metric("time/*", "s", "wall-clock of a part of the step: collect, update, publish, evaluate, ..."),
)
_BY_NAME = {metric.name: metric for metric in TABLE}
_FAMILIES = {name.removesuffix("*"): metric for name, metric in _BY_NAME.items() if name.endswith("/*")}


def metric(name: str) -> Metric:
    """Look a name up, a member of a family too. Raises KeyError with the nearest declared names."""
    found = _BY_NAME.get(name) or next((row for prefix, row in _FAMILIES.items() if name.startswith(prefix)), None)
    if found is None:
        phase = name.partition("/")[0]
        near = ", ".join(m.name for m in TABLE if m.name.startswith(f"{phase}/"))
        raise KeyError(f"unknown metric {name!r}; declare it in agentrl_jax/report/metrics.py, or use one of: {near or 'see TABLE'}")
    return found


def json_number(value: float) -> float | str:
    """A number as strict JSON: what is not finite becomes the string "nan", "inf" or "-inf", which `float` reads back."""
    return float(value) if math.isfinite(value) else str(float(value))


def _parse(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Records of the whole lines and the byte at which each starts, then the end of the last; a line cut by a crash is left out."""
    records: list[dict[str, Any]] = []
    starts = [0]
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            record = {"step": int(record.pop("step")), **{str(k): float(v) for k, v in record.items()}}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MetricsError(f"{path}, line {number}: not a metrics record ({error}); delete the line to read the rest") from error
        if records and record["step"] <= records[-1]["step"]:
            raise MetricsError(f"{path}, line {number}: step {record['step']} after step {records[-1]['step']}; steps must increase")
        records.append(record)
        starts.append(starts[-1] + len(line))
    return records, starts


def read(path: Path | str) -> list[dict[str, Any]]:
    """Records of a `metrics.jsonl`, or of the one in a run folder: `{"step": int, name: float, ...}`, in the order of the steps.

    A last line that a crash cut off is ignored. Raises FileNotFoundError, and MetricsError naming the line that is not a record.
    """
    path = Path(path)
    return _parse(path / FILE if path.is_dir() else path)[0]


def columns(records: list[dict[str, Any]]) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """By name: the steps i64[n] that measured it and the values f64[n]. A step that did not measure it is not in its column."""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    pairs = {name: [(record["step"], record[name]) for record in records if name in record] for name in names}
    return {name: (np.array([s for s, _ in p], np.int64), np.array([v for _, v in p], np.float64)) for name, p in pairs.items()}


class MetricsWriter:
    """Appends to `folder/metrics.jsonl` and to `folder/tensorboard/`.

    start: the first step this process will write. Records at or after it are superseded and cut off, like a cut last line.

    >>> with MetricsWriter(run, start=state.step) as metrics:
    ...     metrics.write(step, {"train/loss": 0.5, "train/entropy": 1.2})
    """

    def __init__(self, folder: Path | str, *, start: int = 0) -> None:
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        records, starts = _parse(path)
        kept = sum(record["step"] < start for record in records)
        self._last = records[kept - 1]["step"] if kept else -1
        os.truncate(path, starts[kept])
        self._path, self._file = path, path.open("a", encoding="utf-8")
        board = path.parent / "tensorboard"
        board.mkdir(exist_ok=True)
        # Not a SummaryWriter: its thread dies of a full disk, and then whoever writes waits for ever.
        self._board = EventsWriter(str(board / "events"), f".{start}")
        self._board.write_event(Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the one record of a step; it is on the disk when this returns.

        Raises KeyError for an undeclared name, ValueError for a step that is not after the last one, MetricsError where the disk is full.
        """
        if step <= self._last:
            raise ValueError(f"metrics of step {step} after those of step {self._last}; a step has one record")
        for name in values:
            metric(name)
        values = {name: float(value) for name, value in values.items()}
        record = {"step": step, **{name: json_number(value) for name, value in values.items()}}
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._board.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            self._board.flush()
        except OSError as error:
            raise MetricsError(
                f"{self._path}: the metrics of step {step} cannot be written: {error.strerror}; make room on the disk"
            ) from error
        self._last = step

    def close(self) -> None:
        # What did not fit has been told by `write`.
        for file in (self._file, self._board):
            with suppress(OSError):
                file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
