"""The record of a run's numbers: declared names only, and nothing lost or doubled by a crash and a resume."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event

from agentrl_jax.data.episode import Ending
from agentrl_jax.report.metrics import FILE, TABLE, MetricsWriter, columns, metric, read


def events(folder):
    """Every event of the folder's TensorBoard files: length, check, data, check."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def test_what_is_written_is_read_back(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"train/loss": 0.5, "train/entropy": math.inf})
        metrics.write(1, {"train/loss": math.nan})
        metrics.write(7, {"train/loss": -math.inf, "time/collect": 2})
    records = read(tmp_path)
    assert records[0] == {"step": 0, "train/loss": 0.5, "train/entropy": math.inf}
    assert math.isnan(records[1]["train/loss"])
    steps, values = columns(records)["train/loss"]
    assert steps.tolist() == [0, 1, 7]
    assert values[[0, 2]].tolist() == [0.5, -math.inf]
    assert columns(records)["time/collect"][0].tolist() == [7]


def test_the_file_is_strict_json(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"train/loss": math.nan, "train/entropy": -math.inf})

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads((tmp_path / FILE).read_text(), parse_constant=refuse) == {"step": 0, "train/loss": "nan", "train/entropy": "-inf"}


def test_a_step_is_on_the_disk_when_write_returns(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(3, {"train/loss": 0.5})
        assert read(tmp_path) == [{"step": 3, "train/loss": 0.5}]


def test_an_undeclared_name_is_an_error_that_helps(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        with pytest.raises(KeyError, match=r"train/los.*metrics\.py.*train/loss"):
            metrics.write(0, {"train/entropy": 1.0, "train/los": 1.0})
        assert read(tmp_path) == []


@pytest.mark.parametrize("name", ["rollout/count", "train/count/x", "loss", "", "*"])
def test_names_outside_the_table_are_unknown(name):
    with pytest.raises(KeyError):
        metric(name)


def test_members_of_a_family_are_declared():
    assert metric("time/anything").name == "time/*"
    assert metric("eval/count/new_error").name == "eval/count/*"


def test_the_table_names_everything_once():
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
    assert {f"rollout/ending/{ending.value}" for ending in Ending} <= set(names)
    assert all(row.unit and row.meaning for row in TABLE)


def test_steps_increase(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(2, {"train/loss": 1.0})
        with pytest.raises(ValueError, match="step 2 after those of step 2"):
            metrics.write(2, {"train/loss": 1.0})


def test_resuming_supersedes_the_steps_from_there_on(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        for step in range(4):
            metrics.write(step, {"train/loss": float(step)})
    with MetricsWriter(tmp_path, start=2) as metrics:
        metrics.write(2, {"train/loss": 20.0})
    assert [record["train/loss"] for record in read(tmp_path)] == [0.0, 1.0, 20.0]
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts[-1] == 2, "TensorBoard must be told to forget steps from 2 on"


def test_tensorboard_gets_the_same_values(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(5, {"train/loss": 0.25, "rollout/ending/submitted": 8})
    seen = {(e.step, v.tag): v.simple_value for e in events(tmp_path) for v in e.summary.value}
    assert seen == {(5, "train/loss"): 0.25, (5, "rollout/ending/submitted"): 8.0}


@given(st.integers(0, 200), st.integers(0, 5))
def test_a_crash_at_any_byte_loses_at_most_the_cut_line(tmp_path_factory, cut, start):
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"step": step, "train/loss": step / 4}) + "\n" for step in range(5)]
    (folder / FILE).write_text("".join(lines)[:cut])
    whole = [step for step in range(5) if sum(map(len, lines[: step + 1])) <= cut]
    assert [record["step"] for record in read(folder)] == whole
    with MetricsWriter(folder, start=start) as metrics:
        metrics.write(9, {"train/loss": 1.0})
    assert [record["step"] for record in read(folder)] == [step for step in whole if step < start] + [9]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "not a metrics record"),
        ("[1]", "not a metrics record"),
        ('{"train/loss": 1}', "step"),
        ('{"step": 0}', "must increase"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, complaint):
    path = tmp_path / FILE
    path.write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 2.*{complaint}"):
        read(path)
    with pytest.raises(ValueError, match="line 2"):
        MetricsWriter(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read(tmp_path)
