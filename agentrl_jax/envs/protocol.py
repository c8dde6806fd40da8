"""One environment: tasks by seed, tools the policy may call, a verifier that scores a fork after the episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Outcome
from agentrl_jax.sandbox.protocol import Sandbox


class GraderError(Exception):
    """The verifier itself failed; the policy could not cause it."""


@dataclass(frozen=True)
class Task:
    """One task. What the policy sees is `prompt` and `files`; `hidden` stays on the host.

    id:     unique and reproducible: the same id is the same task on every machine
    prompt: first observation, plain text
    files:  what the box starts with, relative to /workspace
    hidden: the verifier's data; never enters the policy's box
    """

    id: str
    prompt: str
    files: Mapping[str, bytes]
    hidden: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Observation:
    """The environment's answer to one action.

    text:  what the policy reads
    done:  the policy submitted; no answer is shown any more
    count: name of the counter this raises ("tool_errors", "tool_timeouts"), or None
    state: key of the box's state after the action, as `Environment.state` gives it; None where the action did not report it
    """

    text: str
    done: bool = False
    count: str | None = None
    state: str | None = None


@runtime_checkable
class Environment(Protocol):
    """Stateless: all state of an episode is the box and the history."""

    tools: tuple[Tool, ...]

    def task(self, seed: int, split: str = "train") -> Task:
        """The task of a seed. Splits: "train"; "held_out" (tasks never trained on); others as the environment documents."""
        ...

    async def step(self, task: Task, name: str, arguments: Mapping[str, Any], box: Sandbox) -> Observation:
        """Do one tool call in the box. Raises SandboxError only."""
        ...

    async def state(self, task: Task, box: Sandbox) -> str:
        """Key of the box's present state: equal keys, equal states (the anchor of GiGPO).

        Costs a command: ask at the start of an episode (or after a resume); later states come with the observations.
        """
        ...

    async def score(self, task: Task, box: Sandbox) -> Outcome:
        """Score a fork of `box`. Raises SandboxError, or GraderError where the gold solution fails too."""
        ...

    def gold(self, task: Task) -> list[tuple[str, dict[str, Any]]]:
        """Tool calls that solve the task, ending in submit (for `make check-env` and the scripted expert)."""
        ...
