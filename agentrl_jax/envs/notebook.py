"""A Python interpreter in a box that keeps its variables from cell to cell.

The interpreter is a process of the box that commands leave running. It is gone after a time-out, after what a cell did to it, and in a
fork or a restored snapshot, which have the files of the box and none of its processes: the next cell then gets a new one and is told so.
"""

import re
from pathlib import Path

from agentrl_jax.envs import interpreter
from agentrl_jax.envs.protocol import Observation
from agentrl_jax.sandbox.protocol import Sandbox

SCRIPT = Path(interpreter.__file__).read_text(encoding="utf-8")
LOST = "a new one starts, without variables"
REPORT = re.compile(r"(ok|error|exit) ([01]) ([0-9a-f]{16})")


async def run_cell(box: Sandbox, code: str, *, seconds: float, longest: int) -> Observation:
    """Run a cell: what it prints and the value of its last expression, or the exception in one line; at most `longest` characters.

    Whatever the cell does is an observation: "tool_timeouts" counts those that took longer than `seconds`, "tool_errors" the exceptions
    and what ended the interpreter. Raises SandboxError only.
    """
    result = await box.exec(["python3", "-I", "-c", SCRIPT, "run"], stdin=code.encode(), seconds=seconds)
    if result.timed_out:
        return Observation(
            _text(result.text, f"timeout: more than {seconds:g} s; the interpreter ends, {LOST}", longest), count="tool_timeouts"
        )
    output, _, rest = result.text.rpartition("\0")
    report = REPORT.match(rest)  # what runs on in the background may write after it
    if result.killed or report is None:
        why = {"output": "too much output", "memory": "out of memory"}.get(result.killed or "", "killed")
        return Observation(_text(result.text, f"error: {why}; variables may be lost", longest), count="tool_errors")
    ended, lost, key = report.groups()
    if lost == "1":
        output = f"(the interpreter is a new one, without earlier variables)\n{output}"
    if ended == "exit":
        return Observation(_text(output, f"error: the interpreter ended; {LOST}", longest), count="tool_errors", state=key)
    return Observation(_text(output, "", longest) or "ok", count="tool_errors" if ended == "error" else None, state=key)


async def state(box: Sandbox, *, seconds: float) -> str:
    """Key of the box: its files, and the cells that the running interpreter has run, but those that only look at something."""
    result = await box.exec(["python3", "-I", "-c", SCRIPT, "state"], seconds=seconds)
    report = REPORT.search(result.text)
    return report[3] if report else ""


def clip(text: str, longest: int) -> str:
    """The head and the tail of a text."""
    half = (longest - 5) // 2
    return text if len(text) <= longest else f"{text[:half]}\n...\n{text[-half:]}"


def _text(output: str, end: str, longest: int) -> str:
    """The output and, whole, what is to be said of how the cell ended."""
    room = longest - len(end) - 1
    return "\n".join(filter(None, (clip(output.rstrip("\n").replace("\0", "\\0"), room), end)))
