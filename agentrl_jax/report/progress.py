"""What a person sees while a run runs: one aligned line, and none of the libraries' chatter."""

import io
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from agentrl_jax.report.audit import ALARM

_FIELDS = (
    ("success {}", "rollout/success", "{:4.2f}"),
    ("reward {}", "rollout/reward", "{:5.2f}"),
    ("{} tok/s", "rollout/tokens_per_second", "{:7,.0f}"),
    ("{} ep/s", "rollout/episodes_per_second", "{:5.1f}"),
)


def clock_text(seconds: float) -> str:
    """`3:12`, or `1:03:12` from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def progress_line(done: int, total: int, values: Mapping[str, float], left: float | None) -> str:
    """`step 12/60  success 0.43  reward  0.43    1,234 tok/s    8.9 ep/s  left 3:12  apart 2e-05`; what is not known is a dash.

    Apart: the largest difference of the log-probs of trainer and sampler in the step, in nats. Last, as narrow terminals cut it off.
    An alarm of the audit comes first.
    """
    parts = ["ALARM: reward without success"] if values.get(ALARM) else []
    parts.append(f"step {done:{len(str(total))}}/{total}")
    for text, name, form in _FIELDS:
        dash = "-".rjust(len(form.format(0)))
        parts.append(text.format(form.format(values[name]) if name in values else dash))
    parts.append(f"left {'-' if left is None else clock_text(left)}")
    apart = values.get("train/logprob_difference_max")
    parts.append(f"apart {'-'.rjust(5) if apart is None else f'{apart:.0e}'}")
    return "  ".join(parts)


class Progress:
    """Shows a run of `total` steps of which `done` were done before this process started.

    On a terminal the line is rewritten in place. Elsewhere (a file, a CI log) a new line appears at most every `every` seconds,
    and for the last step. The time left is the mean duration of the steps so far, without the first, which compiles.
    """

    def __init__(
        self,
        total: int = 1,
        *,
        done: int = 0,
        stream: io.TextIOBase | None = None,
        every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._every, self._clock = total, every, clock
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._times = [(done, clock())]
        self._shown: float | None = None
        self._open_line = False

    def show(self, done: int, values: Mapping[str, float]) -> None:
        """Report that `done` steps are done; `values` are the named metrics of the latest."""
        now = self._clock()
        self._times.append((done, now))
        if not self._terminal and self._shown is not None and now - self._shown < self._every and done < self._total:
            return
        self._shown = now
        self._write(progress_line(done, self._total, values, self._left(done)))

    def _write(self, line: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{line[:width]}\x1b[K")
            self._open_line = True
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def count(self, what: str, done: int, total: int) -> None:
        """Report on a part of the work that has no steps: `expert episodes 640/1500`."""
        now = self._clock()
        if not self._terminal and self._shown is not None and now - self._shown < self._every and done < total:
            return
        self._shown = now
        self._write(f"{what} {done:{len(str(total))}}/{total}")

    def say(self, text: str) -> None:
        """Print a line of its own; the progress line goes on below it."""
        self._stream.write(f"{chr(13) + chr(27) + '[K' if self._open_line else ''}{text}\n")
        self._stream.flush()
        self._open_line = False

    def close(self) -> None:
        """End the rewritten line, so that what follows starts on its own."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
            self._open_line = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _left(self, done: int) -> float | None:
        (first, started), (last, now) = self._times[min(1, len(self._times) - 2)], self._times[-1]
        return None if last <= first else (now - started) / (last - first) * (self._total - done)


@contextmanager
def library_chatter_to(path: Path) -> Iterator[None]:
    """Send warnings and log records of every library to a file instead of the terminal, so that the progress line stays whole."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with warnings.catch_warnings():
        logging.captureWarnings(True)
        root.handlers[:] = [handler]
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.handlers[:], root.level = before, level
            handler.close()
