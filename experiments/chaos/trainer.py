"""The trainer killed at random moments, and the same command again: the run becomes the one that was never killed."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from agentrl_jax.data.credits import read_credits
from agentrl_jax.data.events import Packed, events_of
from agentrl_jax.data.store import read, unfinished
from agentrl_jax.report import metrics
from agentrl_jax.report.load import CREDITS, EPISODES
from experiments.chaos.audit import Row, require
from experiments.chaos.sandboxes import of_an_engine

EXPERIMENT = Path(__file__).with_name("tiny.py")
DOCKER = "sandbox=agentrl_jax.sandbox.docker:Docker"
DEADLINE = 300.0  # seconds for a whole run on a slow machine
WRITTEN = ("policy/model.safetensors", "warmstart/model.safetensors", "tokenizer.json", "before.json", "after.json")


class Run:
    """`python -m agentrl_jax.train` of the tiny experiment in a folder, as often as it takes. `scratch`: for temporary files."""

    def __init__(self, root: Path, scratch: Path, *overrides: str) -> None:
        self.root, self.folder, self._scratch = root, root / "tiny", scratch
        self._processes: list[int] = []
        root.mkdir()
        self._command = [sys.executable, "-m", "agentrl_jax.train", str(EXPERIMENT), f"root={root}", *overrides]

    def go(self, kill_after: float = DEADLINE) -> bool:
        """Run it; SIGKILL it after so many seconds. Whether it ended by itself, and well."""
        environment = os.environ | {"TMPDIR": str(self._scratch), "JAX_PLATFORMS": "cpu"}
        with open(self.root / "log", "ab") as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        self._processes.append(process.pid)
        with process:
            try:
                code = process.wait(kill_after)
            except subprocess.TimeoutExpired:
                process.kill()
                return False
        require(code == 0, f"a run ends well, by itself or killed: {(self.root / 'log').read_text('utf-8', 'replace')[-2000:]}")
        return True

    def left_over(self) -> list[str]:
        """Temporary files but the root that all boxes share, processes with its temporary folder in their environment, and containers."""
        mark = f"TMPDIR={self._scratch}".encode()
        files = [str(path) for path in self._scratch.iterdir() if not path.name.startswith("agentrl_jax-")]
        alive = [f"process {pid}" for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if mark in _environment(pid)]
        engine = DOCKER in self._command
        return [*files, *alive, *(what for process in self._processes if engine for what in of_an_engine(process))]

    def measured(self) -> str:
        """A digest of everything that the run computed: weights, scores, episodes, credit and metrics, without the seconds they took."""
        digest = hashlib.sha256()
        for name in WRITTEN:
            digest.update((self.folder / name).read_bytes())
        for record in metrics.read(self.folder):
            digest.update(repr(sorted((name, value) for name, value in record.items() if _computed(name))).encode())
        for episode in sorted(read(self.folder / EPISODES), key=lambda episode: episode.id):
            digest.update(Packed.of(episode.id, 0, list(events_of(replace(episode, timings={})))).to_bytes())
        for episode, parts in sorted(dict(read_credits(self.folder / CREDITS)).items()):
            digest.update(episode.encode() + b"".join(part.tobytes() for part in parts))
        return digest.hexdigest()


def _environment(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def _computed(metric: str) -> bool:
    return not metric.startswith(("time/", "rollout/share/", "eval/share/")) and not metric.endswith(("_per_second", "/programs"))


def run(times: int, *overrides: str, seed: int = 0) -> Iterator[Row]:
    """Kill runs `times` times in all, each time at a random moment after a third of a whole run's duration, and let the last one end."""
    row, random = Row(" ".join(["the trainer, SIGKILL", *(["over Docker"] if DOCKER in overrides else [])])), Random(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        Path(folder).chmod(0o711)  # users of boxes pass through
        first, whole, hurt = (Run(Path(folder, name), scratch, *overrides) for name in ("first", "whole", "hurt"))
        require(first.go(), "a run ends")  # it compiles, and makes the root of the boxes
        began = time.monotonic()
        require(whole.go(), "a run ends")
        duration = time.monotonic() - began
        while row.times < times:
            if hurt.go(kill_after=random.uniform(duration / 3, duration)):  # earlier it has hardly begun
                compare(whole, hurt, row)  # it was done before its time came: another one begins
                shutil.rmtree(hurt.folder)
            else:
                row.times += 1
        with row.within(DEADLINE, "the last resumption"):
            require(hurt.go(), "the last resumption ends")
        compare(whole, hurt, row)
    yield row


def compare(whole: Run, hurt: Run, row: Row) -> None:
    """The run that was killed is the one that never was, and left nothing behind."""
    stored = list(read(hurt.folder / EPISODES))
    ids = [episode.id for episode in stored]
    require(len(ids) == len(set(ids)), "no episode is counted twice")
    require(not unfinished(hurt.folder / EPISODES), "no episode is left unfinished")
    require(set(ids) == {episode.id for episode in read(whole.folder / EPISODES)}, "no episode is lost")
    require(hurt.measured() == whole.measured(), "weights, scores, episodes, credit and metrics are those of a run never killed")
    require(not (left := hurt.left_over()), f"nothing is left over, found {left}")
    row.episodes += len(ids)
    row.seen["bit for bit the run never killed"] += 1
