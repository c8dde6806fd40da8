"""Runs of the tiny experiment in processes of their own, as people start them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl_jax.data.episode import Episode
from agentrl_jax.data.store import read
from agentrl_jax.report import metrics
from agentrl_jax.report.load import EPISODES
from tests.processes import descendants
from tests.tiny import STOPPING

EXPERIMENT = str(Path(__file__).with_name("tiny.py"))
DEADLINE = 240.0  # seconds: a machine may be slow, and a run that hangs must not be waited for

# Strict promotion is for our code, and the exception that tests make for optax does not reach other processes.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")}


@dataclass(frozen=True)
class Ended:
    """How a process ended. left: processes it had started, some of which may be alive."""

    code: int
    out: str
    err: str
    left: frozenset[int]


def train(
    root: Path,
    *overrides: str,
    stop: str = "",
    send: signal.Signals | None = None,
    when: str = STOPPING,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """`python -m agentrl_jax.train` until it ends.

    stop: "how,step", see tests/tiny.py
    send: goes to all of its process group (as Ctrl-C does), when its stderr says `when`
    environment: further variables
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl_jax.train", EXPERIMENT, f"root={root}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**_ENVIRONMENT, "TINY_STOP": stop, **(environment or {})},
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        err: list[str] = []
        reader = threading.Thread(target=err.extend, args=(process.stderr,))
        reader.start()
        try:
            started = frozenset[int]()
            if send is not None:
                wait_for(lambda: any(when in line for line in err) or not reader.is_alive())
                started = frozenset(descendants(process.pid))
                os.killpg(process.pid, send)
            process.wait(DEADLINE)
        finally:
            process.kill()
        reader.join()
        return Ended(process.returncode, process.stdout.read(), "".join(err), started)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def measured(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run that do not depend on the clock or on the process."""
    timed, of_the_process = ("time/", "rollout/share/", "eval/share/"), ("_per_second", "/programs")
    return [
        {name: value for name, value in record.items() if not name.startswith(timed) and not name.endswith(of_the_process)}
        for record in metrics.read(folder)
    ]


def collected(folder: Path, *, superseded: bool = False) -> list[Episode]:
    """The episodes of a run, without the seconds they took, in the order of their ids."""
    episodes = [replace(episode, timings={}) for episode in read(folder / EPISODES, superseded=superseded)]
    return sorted(episodes, key=lambda episode: episode.id)
