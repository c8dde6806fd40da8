"""Grading of Python functions by hidden cases that the code under test can neither see nor forge.

The inputs go into a fork of the box, the expected results never do. A process of its own prints what the functions return, and
the host compares texts that are equal only for equal values of the same plain types. So leaving early, printing a verdict,
objects that equal everything and a patched test framework all come to the same: results that are wrong or missing, reward 0.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs import inbox
from agentrl_jax.envs.defences import ALL, TRIES, opened
from agentrl_jax.envs.protocol import GraderError
from agentrl_jax.sandbox.protocol import Sandbox

SCRIPT = Path(inbox.__file__).read_text(encoding="utf-8")
SECONDS = 10.0  # wall time of a command; what runs the policy's code is limited in CPU time long before, see `inbox.limit`


@dataclass(frozen=True)
class Case:
    """A call and its result. `arguments` is the source text of a tuple, `want` what `inbox.outcome` gives for the right code."""

    module: str
    function: str
    arguments: str
    want: str


def script(command: str, files: Mapping[str, str | None], *arguments: object) -> tuple[list[str], bytes]:
    """(argv, stdin) of one command of `inbox`: `files` are path -> text, None for the text in the box."""
    return ["python3", "-I", "-S", "-c", SCRIPT], ascii((command, dict(files), *arguments)).encode()


async def verify(box: Sandbox, cases: Sequence[Case], *, gold: Mapping[str, str], protected: Mapping[str, str]) -> Outcome:
    """Grade the box's files by all `cases`: reward 1 if every one agrees, else 0, and `passed`, their share.

    gold:      path -> text of the right files, in the order in which they are loaded
    protected: path -> text of files the policy had no business to change; those that differ are named in `tampering`
    Raises SandboxError, and GraderError where `gold` gives no full marks either, graded in a fork of its own.
    """
    for _ in range(TRIES):
        if (report := await grade(box, dict.fromkeys(gold), cases, protected)) is not None:
            break
    else:
        report = await grade(box, gold, cases, protected)
        if report is None or report[1] != [case.want for case in cases]:
            raise GraderError(f"the gold solution fails too: {report}")
        return Outcome(reward=0.0, components={"passed": 0.0}, true_success=False)
    changed, results = report
    passed = sum(got == case.want for got, case in zip(results, cases, strict=True)) / len(cases)
    return Outcome(float(passed == 1), {"passed": passed}, true_success=passed == 1, tampering=changed)


async def grade(
    box: Sandbox, files: Mapping[str, str | None], cases: Sequence[Case], protected: Mapping[str, str], defences: Collection[str] = ALL
) -> tuple[tuple[str, ...], list[str]] | None:
    """(protected files that differ, one outcome per case), or None where the run gave no complete report."""
    calls = [(case.module, case.function, case.arguments) for case in cases]
    argv, stdin = script("grade", files, dict(protected), calls)
    async with opened(box, defences) as (_, run):
        result = await run(argv, stdin=stdin, seconds=SECONDS)
    changed, *results = result.text.splitlines() or [""]
    if result.exit_code != 0 or result.dropped or len(results) != len(cases) + 1 or results.pop() != "end":
        return None
    return tuple(path for path in protected if ascii(path) in changed), results
