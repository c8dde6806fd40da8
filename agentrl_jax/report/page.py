"""One run as one HTML file: what it scored, its curves, how its episodes ended, and the episodes token by token.

The file needs nothing else: its content security policy admits its own script and style by their hashes and no connection at all.
Everything a run wrote (texts, names, configuration) travels as JSON and reaches the page as text nodes, never as markup.
"""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from agentrl_jax.data.episode import Ending
from agentrl_jax.report.audit import PARTS, Watch
from agentrl_jax.report.load import Run, load
from agentrl_jax.report.metrics import json_number, metric
from agentrl_jax.report.sample import encode
from agentrl_jax.report.summary import ERRORS, wilson

FILE = "report.html"
_SCRIPTS = ("dom.js", "charts.js", "tables.js", "viewer.js", "page.js")


@dataclass(frozen=True)
class Chart:
    """Lines of one unit in one frame. log: logarithmic axis, where every value is above 0."""

    title: str
    names: tuple[str, ...]
    log: bool = False


CHARTS = (
    Chart("Success", ("rollout/success", "eval/success")),
    Chart("Reward", ("rollout/reward", "eval/reward")),
    Chart("Entropy", ("train/entropy",)),
    Chart("Returns explained by the critic", ("train/explained_variance",)),
    Chart("KL divergence", ("train/kl", "train/kl_reference")),
    Chart("Gradient norm", ("train/gradient_norm",), log=True),
    Chart("Importance ratio", ("train/ratio",)),
    Chart("Clipped tokens", ("train/clip_fraction",)),
    Chart("|trainer \u2212 sampler| log-prob", ("train/logprob_difference_max", "train/logprob_difference"), log=True),
    Chart("Tokens per second", ("rollout/tokens_per_second", "train/tokens_per_second")),
    Chart("Turns per episode", ("rollout/turns", "eval/turns")),
    Chart("Sampled tokens per episode", ("rollout/sampled_tokens", "eval/sampled_tokens")),
)


def build(folder: Path | str) -> Path:
    """Write `folder/report.html` and return its path. The same run gives the same file.

    Reads what `load` reads; what could not be read is said on the page. Raises what `load` raises.
    """
    run = load(Path(folder))
    path = Path(folder) / FILE
    part = path.with_suffix(".html.part")
    part.write_text(render(run), "utf-8")
    os.replace(part, path)
    return path


def render(run: Run) -> str:
    """The whole page as text."""
    assets = resources.files("agentrl_jax.report.viewer")
    style = assets.joinpath("page.css").read_text("utf-8")
    script = '"use strict";\n' + "\n".join(assets.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    # `<` is written as an escape, so no text of a run can close the data element; JSON reads the same.
    data = json.dumps(page_data(run), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    parts = {"POLICY": policy, "TITLE": html.escape(f"{run.name} \u00b7 run report"), "STYLE": style, "SCRIPT": script, "DATA": data}
    page = assets.joinpath("page.html").read_text("utf-8")
    pieces = page.split("@@")  # markup and names of parts in turn; what is put in is not searched again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def page_data(run: Run) -> dict[str, Any]:
    """All that the scripts read."""
    names = sorted({name for record in run.records for name in record if name != "step"})
    return {
        "name": run.name,
        "config": run.config,
        "problems": list(run.problems),
        "headline": headline(run.records),
        "alarms": _alarms(run.records),
        "steps": [record["step"] for record in run.records],
        "columns": {name: [json_number(r[name]) if name in r else None for r in run.records] for name in names},
        "intervals": {"eval/success": _intervals(run.records)},
        "metrics": {name: [metric(name).unit, metric(name).meaning] for name in names},
        "charts": [{"title": c.title, "names": found, "log": c.log} for c in CHARTS if (found := [n for n in c.names if n in names])],
        "endings": [{"name": e.value, "kind": _kind(e)} for e in Ending],
        "errors": list(ERRORS),
        "paid": [f"rollout/audit/{part}" for part in PARTS],
        "collected": {"episodes": len(run.collected), "steps": len({entry.step for entry in run.collected})},
        "sample": encode(run.episodes, run.advantages, run.spell),
    }


def _kind(ending: Ending) -> str:
    return "infrastructure" if ending.infrastructure else "limit" if ending.limit else "submitted"


def headline(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Success at the first and the last measurement, each with its 95 % interval.

    By the evaluations where there are any, else by the training episodes; None where success was never measured.
    """
    for phase in ("eval", "rollout"):
        measured = [record for record in records if _measured(record, phase)]
        if measured:
            ends = measured[:1] + measured[1:][-1:]
            return {"phase": phase, "ends": [_rate(record, phase) for record in ends]}
    return None


def _alarms(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The run's first alarm, and that of its last step, in words; measured anew, so that a run that had no audit is told of it too."""
    watch = Watch(records)
    return list(dict.fromkeys(str(alarm) for alarm in (watch.first, watch.latest) if alarm is not None))


def _measured(record: Mapping[str, Any], phase: str) -> bool:
    return f"{phase}/success" in record and record.get(f"{phase}/graded", 0) > 0


def _rate(record: Mapping[str, Any], phase: str) -> dict[str, Any]:
    success, n = record[f"{phase}/success"], record[f"{phase}/graded"]
    low, high = wilson(round(success * n), n)
    return {"step": record["step"], "success": success, "n": n, "low": low, "high": high}


def _intervals(records: Sequence[Mapping[str, Any]]) -> list[list[float] | None]:
    rates = [_rate(record, "eval") if _measured(record, "eval") else None for record in records]
    return [None if rate is None else [rate["low"], rate["high"]] for rate in rates]
