"""One environment: tasks by seed, tools the policy may call, a verifier that scores a fork after the episode."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Outcome
from agentrl_jax.sandbox.protocol import Limits, Sandbox


class GraderError(Exception):
    """The verifier itself failed; the policy could not cause it."""


@dataclass(frozen=True)
class Task:
    """One task. What the policy sees is `prompt` and `files`; `hidden` and `privileged` stay on the host.

    id:         unique and reproducible: the same id is the same task on every machine
    prompt:     first observation, plain text
    files:      what the box starts with, relative to /workspace
    hidden:     the verifier's data; never enters the policy's box
    limits:     of the box; None for the backend's usual ones
    privileged: what a critic may be told in training that the policy never sees, such as the solution
    image:      what the box is made of: the name of an image or the folder of a Dockerfile; None for the backend's own
    """

    id: str
    prompt: str
    files: Mapping[str, bytes]
    hidden: Mapping[str, Any] = field(default_factory=dict, repr=False)
    limits: Limits | None = None
    privileged: str = field(default="", repr=False)
    image: str | Path | None = None


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


Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""A tool call: the tool's name and its arguments."""

TurnRewardFn: TypeAlias = Callable[[Task, Call, Observation], Awaitable[float | None]]
"""Reward of one turn, by the call and what it was answered; None for none. Raises InferenceError where a judge does not answer."""


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

    def gold(self, task: Task) -> Sequence[Call]:
        """Tool calls that solve the task, ending in submit (for `make check-env` and the scripted expert)."""
        ...

    def wrong(self, task: Task) -> Sequence[Call]:
        """Tool calls of someone who did some of the work, ending in submit: all that the policy can check looks right, and the task is
        not solved."""
        ...
