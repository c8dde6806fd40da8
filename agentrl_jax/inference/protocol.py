"""Token ids in, token ids with log-probs and weight versions out; whatever samples them."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


class InferenceError(Exception):
    """The engine or server failed; the policy could not cause it."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. top-p and top-k do not exist here: the log-probs would not be those of the policy.

    max_tokens:  at most this many new tokens
    temperature: > 0 samples from softmax(logits / temperature); 0 is greedy (log-probs at temperature 1)
    stop:        ids that end the completion; the sampled stop id is part of it
    seed:        0 .. 2**63 - 1; the same seed, prompt and weights give the same tokens, whatever else is in the batch
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in 0 .. 2**63 - 1, got {self.seed}")


@dataclass(frozen=True)
class Completion:
    """tokens i32[n], logprobs f32[n] of the distribution sampled from, versions i32[n] of the weights, one per token.

    cached: how many prompt tokens were found in the KV cache instead of being prefilled
    queued: seconds the request waited before the engine took it up; charged to nobody
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    cached: int = 0
    queued: float = 0.0


@runtime_checkable
class Sampler(Protocol):
    """Samples completions for many sessions at once."""

    @property
    def context_limit(self) -> int:
        """Prompt and completion together never exceed this many tokens."""
        ...

    async def generate(self, prompt: NDArray[np.int32], sampling: Sampling, *, session: str) -> Completion:
        """Sample one completion of `prompt` i32[n].

        `session` names the episode: its cache is reused where the prompt extends what it holds. The completion is cut at
        `context_limit` with finish_reason "length". Raises InferenceError for engine faults, ValueError for a prompt that
        is empty or leaves no room for one token.
        """
        ...

    async def release(self, session: str) -> None:
        """The session is over: its cache may go. Unknown sessions are ignored."""
        ...
