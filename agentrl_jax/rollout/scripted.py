"""A scripted player behind the sampler's protocol: its episodes pass through the same loop and have the token layout of sampled ones."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.renderer import Renderer
from agentrl_jax.data.episode import Episode
from agentrl_jax.envs.protocol import Call, Environment, Observation, Task
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampling
from agentrl_jax.rollout.agent import Job, Parts, Sink, nowhere
from agentrl_jax.rollout.collector import Progress, RolloutSettings, collect
from agentrl_jax.sandbox.protocol import Backend

Script = Generator[Call, Observation, None]
"""Yields tool calls, each in answer to the observation sent in, of which only the text is known."""


async def demonstrate(
    jobs: Sequence[Job],
    environment: Environment,
    backend: Backend,
    renderer: Renderer,
    settings: RolloutSettings,
    *,
    expert: Callable[[Task, Random], Script],
    sink: Sink = nowhere,
    progress: Progress | None = None,
) -> list[Episode]:
    """`collect` with an expert instead of a policy; its random choices come from the seed of each job."""
    of = {job.key: job for job in jobs}
    sampler = ScriptedSampler(renderer, lambda key: expert(of[key].task, Random(of[key].seed)), settings.limits.context)
    return await collect(jobs, Parts(environment, backend, sampler, renderer), settings, sink=sink, progress=progress)


class ScriptedSampler:
    """Writes the calls of a script as turns, with log-prob 0 and version 0. It reads answers off the prompt, as a policy does."""

    def __init__(self, renderer: Renderer, script: Callable[[str], Script], context_limit: int) -> None:
        """`script` starts the script of a session."""
        self._renderer = renderer
        self._script = script
        self._playing: dict[str, _Playing] = {}
        self._context_limit = context_limit

    @property
    def context_limit(self) -> int:
        return self._context_limit

    async def generate(self, prompt: NDArray[np.int32], sampling: Sampling, *, session: str) -> Completion:
        """The script's next call, cut where it is longer than asked for. Raises InferenceError where the script is over."""
        playing = self._playing.get(session)
        try:
            if playing is None:
                script = self._script(session)
                call = next(script)
            else:
                script = playing.script
                call = script.send(Observation(self._renderer.answered(prompt[playing.length :], playing.turn)))
        except StopIteration:
            raise InferenceError(f"session {session}: the script ended before the episode") from None
        whole = self._renderer.call(*call)
        turn = whole[: min(sampling.max_tokens, self._context_limit - len(prompt))]
        self._playing[session] = _Playing(script, turn, len(prompt) + len(turn))
        zeros = np.zeros(len(turn), np.int32)
        return Completion(turn, zeros.astype(np.float32), zeros, "stop" if len(turn) == len(whole) else "length")

    async def release(self, session: str) -> None:
        self._playing.pop(session, None)


@dataclass(frozen=True)
class _Playing:
    """A script, the turn it wrote last, and the number of tokens up to the end of that turn."""

    script: Script
    turn: NDArray[np.int32]
    length: int
