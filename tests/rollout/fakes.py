"""A small world in memory for the loop's own logic: a notebook that the policy adds words to. Real boxes are tested elsewhere."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer, scaffolding
from agentrl_jax.chat.tools import Tool
from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.protocol import Environment, GraderError, Observation, Task
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampler
from agentrl_jax.rollout.agent import Job, Parts, RolloutLimits
from agentrl_jax.sandbox.protocol import Backend, ImageError, Sandbox, SandboxError

TOOLS = (Tool("add", "Add a word.", {"word": "string"}), Tool("submit", "Hand in."))
TOKENIZER = tokenizer.train(["Write the words. added error: no tool call"] * 5, 300, scaffolding(TOOLS))
RENDERER = Renderer(TOKENIZER)
LIMITS = RolloutLimits(turns=8, turn_tokens=64, episode_tokens=256, context=1024, seconds=60.0, deadline=5.0)

SUBMIT = RENDERER.call("submit", {})


def add(word: str):
    return RENDERER.call("add", {"word": word})


def job(key: str = "train-0-0-0", group: str = "train-0-0", seed: int = 3) -> Job:
    return Job(key, Task("words/1", "Write the words.", {"notes": b""}), group, seed, step=0)


class Box(Sandbox):
    """Words instead of files. `fault` names the operation that infrastructure spoils."""

    def __init__(self, backend: "Boxes") -> None:
        self.backend, self.words = backend, list[str]()

    async def close(self) -> None:
        self.backend.open.discard(self)
        if self.backend.fault == "close":
            raise SandboxError("cannot be closed")


class Boxes(Backend):
    """A backend that knows which of its boxes are open, and how many were at once."""

    def __init__(self, fault: str = "", spoilt: int = 1_000_000) -> None:
        self.fault, self.spoilt = fault, spoilt
        self.open: set[Box] = set()
        self.started = self.most = 0

    async def start(self, files, *, snapshot=None, limits=None, image=None) -> Box:
        await asyncio.sleep(0)
        if self.fault == "start" and self.spoilt > 0:
            self.spoilt -= 1
            raise SandboxError("no box to be had")
        if image is not None:
            raise ImageError(f"no image {image}")
        box = Box(self)
        self.started += 1
        self.open.add(box)
        self.most = max(self.most, len(self.open))
        return box


class Notebook(Environment):
    """Adding a word answers with it; `fail` is a failing tool, `sleep` a slow one, `hang` one that never answers. Reward: words."""

    tools = TOOLS

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.states_asked = 0

    async def step(self, task, name, arguments, box) -> Observation:
        if self.fault == "step":
            raise SandboxError("lost the box")
        if name == "submit":
            return Observation("", done=True)
        match arguments["word"]:
            case "fail":
                return Observation("error: failed", count="tool_errors")
            case "timeout":
                return Observation("timeout", count="tool_timeouts")
            case "sleep":
                await asyncio.sleep(1)
            case "hang":
                await asyncio.Event().wait()
            case "bug":
                raise ZeroDivisionError
        box.words.append(arguments["word"])
        return Observation(f"added {arguments['word']}", state=" ".join(box.words))

    async def state(self, task, box) -> str:
        if self.fault == "state":
            raise SandboxError("lost the box")
        self.states_asked += 1
        return " ".join(box.words)

    async def score(self, task, box) -> Outcome:
        match self.fault:
            case "score":
                raise SandboxError("lost the box")
            case "grade":
                raise GraderError("the gold solution fails too")
            case "grade forever":
                await asyncio.Event().wait()
        return Outcome(float(len(box.words)), true_success=len(box.words) > 1)


class Turns(Sampler):
    """A sampler of given turns, the same for each session, that remembers the prompts. `fault` is what happens at the second one."""

    context_limit = 1024

    def __init__(self, turns: Sequence[np.ndarray], fault: str = "") -> None:
        self.turns, self.fault = turns, fault
        self.prompts: dict[str, list[np.ndarray]] = {}
        self.samplings: dict[str, list] = {}

    async def generate(self, prompt, sampling, *, session) -> Completion:
        await asyncio.sleep(0)
        prompts = self.prompts.setdefault(session, [])
        prompts.append(prompt)
        self.samplings.setdefault(session, []).append(sampling)
        whole = self.turns[len(prompts) - 1]
        turn = whole[: min(sampling.max_tokens, self.context_limit - len(prompt))]
        n = len(turn)
        completion = Completion(turn, np.full(n, -0.5, np.float32), np.full(n, 7, np.int32), "stop" if n == len(whole) else "length")
        if len(prompts) == 2:
            match self.fault:
                case "raise":
                    raise InferenceError("the engine died")
                case "hang":
                    await asyncio.Event().wait()
                case "nan":
                    return replace(completion, logprobs=np.full(n, np.nan, np.float32))
                case "short":
                    return replace(completion, versions=completion.versions[1:])
        return completion

    async def release(self, session) -> None:
        if self.fault == "release":
            raise InferenceError("cannot be released")
        self.released = session


def parts(turns=None, *, environment=None, backend=None, sampler=None) -> Parts:
    return Parts(environment or Notebook(), backend or Boxes(), sampler or Turns(turns or [add("a"), SUBMIT]), RENDERER)
