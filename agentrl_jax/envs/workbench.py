"""The tools of whoever works in a repository: a shell command, an edit, a whole file, and handing in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_jax.chat.tools import Tool
from agentrl_jax.envs import worktree
from agentrl_jax.envs.protocol import Observation
from agentrl_jax.sandbox.protocol import Sandbox

SCRIPT = Path(worktree.__file__).read_text(encoding="utf-8")
LONGEST = 4000  # characters of an observation
SECONDS = 20.0  # wall time of an edit; a command has what the task's limits give

TOOLS = (
    Tool("run", "Run a shell command in the repository.", {"command": "string"}),
    Tool("edit", "Replace the text old, found once in the file, by new.", {"path": "string", "old": "string", "new": "string"}),
    Tool("write", "Write a file.", {"path": "string", "text": "string"}),
    Tool("submit", "Hand in the repository as it is."),
)


async def step(name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
    """Do one tool call. After a command the observation does not know the state: `state` does."""
    texts = {key: str(value) for key, value in arguments.items()}
    match name:
        case "submit":
            return Observation("", done=True)
        case "run":
            return await _command(texts.get("command", ""), box)
        case "edit":
            return await _script(box, "edit", texts.get("path", ""), texts.get("old", ""), texts.get("new", ""))
        case "write":
            return await _script(box, "write", texts.get("path", ""), texts.get("text", ""))
        case _:
            return Observation(f"error: no tool {name[:40]}", count="tool_errors")


async def state(box: Sandbox) -> str:
    """Hash of the work tree: paths, kinds and contents of files, without .git and caches. "" where the box cannot say."""
    return (await _script(box, "state")).state or ""


async def _command(command: str, box: Sandbox) -> Observation:
    """Output, then how the command ended where that was not with exit code 0."""
    result = await box.exec(["sh", "-c", command])
    if result.timed_out:
        return Observation(clip(f"{result.text}\ntimeout"), count="tool_timeouts")
    if result.killed:
        return Observation(clip(f"{result.text}\nerror: killed ({result.killed})"), count="tool_errors")
    return Observation(clip(f"{result.text}\nexit code {result.exit_code}" if result.exit_code else result.text))


async def _script(box: Sandbox, *command: str) -> Observation:
    """One command of `worktree` in the box. Whatever the box does to it is an observation."""
    result = await box.exec(["python3", "-I", "-S", "-c", SCRIPT], stdin=ascii(command).encode(), seconds=SECONDS)
    key, nul, answer = result.text.partition("\0")
    if result.timed_out:
        return Observation("timeout", count="tool_timeouts")
    if not nul:
        return Observation(f"error: {result.killed or 'the box is full or broken'}", count="tool_errors")
    return Observation(clip(answer), count="tool_errors" if answer.startswith("error:") else None, state=key)


def clip(text: str) -> str:
    """Head and tail of a text that is too long."""
    half = (LONGEST - 5) // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"
