"""The line a person watches: aligned, rewritten on a terminal, sparse in a log, and undisturbed."""

import io
import logging
import re
import warnings

import pytest

from agentrl_jax.report.audit import ALARM
from agentrl_jax.report.progress import Progress, clock_text, library_chatter_to, progress_line

VALUES = {
    "rollout/success": 0.43,
    "rollout/reward": 0.43,
    "rollout/tokens_per_second": 1234.4,
    "rollout/episodes_per_second": 8.9,
    "train/logprob_difference_max": 2.1e-5,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self):
        return self.now


def test_the_line():
    assert progress_line(12, 60, VALUES, 192) == "step 12/60  success 0.43  reward  0.43    1,234 tok/s    8.9 ep/s  left 3:12  apart 2e-05"


def test_lines_are_aligned_whatever_is_known():
    lines = [progress_line(1, 60, {}, 0), progress_line(60, 60, VALUES, 0), progress_line(7, 60, {"rollout/reward": -1.0}, 0)]
    assert len({len(line) for line in lines}) == 1
    assert "-" in lines[0]


def test_an_alarm_comes_first():
    calm, alarmed = (progress_line(12, 60, VALUES | {ALARM: alarm}, 192) for alarm in (0.0, 1.0))
    assert calm == progress_line(12, 60, VALUES, 192)
    assert alarmed == f"ALARM: reward without success  {calm}"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (192, "3:12"), (3783, "1:03:03")])
def test_clock_text(seconds, text):
    assert clock_text(seconds) == text


def test_on_a_terminal_one_line_is_rewritten():
    stream, clock = Terminal(), Clock()
    progress = Progress(3, stream=stream, clock=clock)
    for done in (1, 2):
        clock.now += 1
        progress.show(done, {})
    assert stream.getvalue().count("\r") == 2
    assert "\n" not in stream.getvalue()
    progress.say("a note")
    assert stream.getvalue().endswith("\r\x1b[Ka note\n")
    progress.show(3, {})
    progress.close()
    assert stream.getvalue().endswith("\n")


def test_in_a_log_lines_are_sparse_and_the_last_step_is_shown():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, every=10.0, clock=clock)
    for done in range(1, 101):
        clock.now += 1
        progress.show(done, {})
    progress.close()
    shown = [int(n) for n in re.findall(r"step +(\d+)/100", stream.getvalue())]
    assert shown[:3] == [1, 11, 21]
    assert shown[-1] == 100
    assert not set("\r\x1b") & set(stream.getvalue())


def test_the_first_step_compiles_and_says_nothing_about_the_rest():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(12, done=2, stream=stream, every=0, clock=clock)
    clock.now += 100
    progress.show(3, {})
    for done in (4, 5):
        clock.now += 2
        progress.show(done, {})
    assert stream.getvalue().splitlines()[-1].endswith("left 0:14  apart     -")


def test_library_chatter_goes_to_a_file(tmp_path, capsys):
    before = logging.getLogger().handlers[:]
    with library_chatter_to(tmp_path / "log.txt"):
        logging.getLogger("some.library").warning("careful")
        warnings.simplefilter("always")
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
    assert logging.getLogger().handlers == before
    written = (tmp_path / "log.txt").read_text()
    assert "some.library: careful" in written
    assert "old name" in written
    assert capsys.readouterr().err == ""
