"""The record of one episode: who wrote each token, how it ended, what it earned.

Host side, immutable, numpy only. Everything that training may ask of an episode is decided here, when the record is made:
the loss mask is `author == POLICY` and nothing else, and the prompt that was sent for a policy span is proved to be the
concatenation of all earlier spans of its segment (token in, token out).
"""

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T", bound=np.generic)


class Author(enum.IntEnum):
    """Who wrote a span. Only `POLICY` tokens can be in the loss."""

    TASK = 0
    TEMPLATE = 1
    POLICY = 2
    ENVIRONMENT = 3
    SUMMARIZER = 4
    SUBAGENT = 5
    COPY = 6


class Ending(enum.StrEnum):
    """How an episode ended. Parse errors, failing tools and tool time-outs are observations, not endings."""

    SUBMITTED = "submitted"
    CONTEXT_LIMIT = "context_limit"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    SANDBOX_FAILED = "sandbox_failed"
    INFERENCE_FAILED = "inference_failed"
    GRADER_FAILED = "grader_failed"
    CANCELLED = "cancelled"

    @property
    def infrastructure(self) -> bool:
        """True where the policy could not have caused it: such an episode is in no statistic and in no loss."""
        return self in _INFRASTRUCTURE

    @property
    def limit(self) -> bool:
        """True where the policy ran into a limit instead of submitting."""
        return self in _LIMITS


_INFRASTRUCTURE = frozenset({Ending.SANDBOX_FAILED, Ending.INFERENCE_FAILED, Ending.GRADER_FAILED, Ending.CANCELLED})
_LIMITS = frozenset({Ending.CONTEXT_LIMIT, Ending.TURN_LIMIT, Ending.TOKEN_LIMIT, Ending.TIME_LIMIT})
_FINISH_REASONS = ("stop", "length", "abort")
_KV = ("recomputed", "stale")


def digest(tokens: NDArray[np.int32]) -> bytes:
    """8 bytes that identify a token sequence; what a policy span keeps of the prompt it was sampled from."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=8).digest()


def _frozen(array: NDArray[_T]) -> NDArray[_T]:
    """The array, or a copy that nobody can write to: spans are often cut out of a buffer that goes on growing."""
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Span:
    """A run of tokens by one author within one turn. Spans are equal where every bit of them is.

    author:        who wrote it
    turn:          index of the turn, counted over the whole episode; the task itself belongs to turn 0
    tokens:        i32[n]
    logprobs:      f32[n], policy only: log-prob of `tokens[t]` under the distribution it was sampled from
    versions:      i32[n], policy only: version of the weights that sampled `tokens[t]`
    prompt_digest: policy only: `digest` of the ids that were sent as the prompt of this span
    temperature:   policy only: temperature the tokens were sampled at
    finish_reason: policy only: "stop" | "length" | "abort"
    kv:            policy only: "recomputed" | "stale", the state of the KV cache after a weight update in flight
    """

    author: Author
    turn: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    versions: NDArray[np.int32] | None = None
    prompt_digest: bytes | None = None
    temperature: float | None = None
    finish_reason: str | None = None
    kv: str = "recomputed"

    def __post_init__(self) -> None:
        if self.turn < 0:
            raise ValueError(f"span of turn {self.turn}: turns count from 0")
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 1:
            raise ValueError(f"span of turn {self.turn}: tokens must be i32[n], got {self.tokens.dtype}{list(self.tokens.shape)}")
        n = len(self.tokens)
        if n and self.tokens.min() < 0:
            raise ValueError(f"span of turn {self.turn}: negative token id")
        policy = self.author is Author.POLICY
        for name, dtype in (("logprobs", np.float32), ("versions", np.int32)):
            array = getattr(self, name)
            if (array is not None) != policy:
                raise ValueError(f"{self.author.name} span of turn {self.turn}: {name} must be {'given' if policy else 'None'}")
            if array is not None and (array.dtype != dtype or array.shape != (n,)):
                raise ValueError(
                    f"span of turn {self.turn}: {name} must be {np.dtype(dtype)}[{n}] like its tokens, got {array.dtype}{list(array.shape)}"
                )
        for name in ("prompt_digest", "temperature", "finish_reason"):
            if (getattr(self, name) is not None) != policy:
                raise ValueError(f"{self.author.name} span of turn {self.turn}: {name} must be {'given' if policy else 'None'}")
        if policy:
            self._check_sampled()
        for name in ("tokens", "logprobs", "versions"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _frozen(getattr(self, name)))

    def _check_sampled(self) -> None:
        assert self.logprobs is not None
        assert self.versions is not None
        assert self.temperature is not None
        # Engines round: the log-prob of a certain token may come out a hair above 0.
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-4).any():
            raise ValueError(f"span of turn {self.turn}: a log-prob is not finite or above 0; that is an engine failure, not data")
        if (self.versions < 0).any():
            raise ValueError(f"span of turn {self.turn}: negative weight version")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"span of turn {self.turn}: temperature must be finite and at least 0, got {self.temperature}")
        for name, known in (("finish_reason", _FINISH_REASONS), ("kv", _KV)):
            if getattr(self, name) not in known:
                raise ValueError(f"span of turn {self.turn}: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def _bits(self) -> tuple[object, ...]:
        arrays = (None if a is None else a.tobytes() for a in (self.tokens, self.logprobs, self.versions))
        return (self.author, self.turn, *arrays, self.prompt_digest, self.temperature, self.finish_reason, self.kv)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash(self._bits())


@dataclass(frozen=True)
class Segment:
    """One contiguous token context. A rewritten history starts a new segment."""

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not len(self):
            raise ValueError("a segment needs at least one token")
        if any(a.turn > b.turn for a, b in zip(self.spans, self.spans[1:], strict=False)):
            raise ValueError("turns must not decrease along a segment")
        if next(span for span in self.spans if len(span.tokens)).author is Author.POLICY:
            raise ValueError("a segment cannot start with a policy token: there is nothing to predict it from")
        hasher = hashlib.blake2b(digest_size=8)
        for span in self.spans:
            if span.author is Author.POLICY and span.prompt_digest != hasher.copy().digest():
                raise ValueError(
                    f"policy span of turn {span.turn}: the prompt it was sampled from is not the concatenation of the earlier spans"
                )
            hasher.update(np.ascontiguousarray(span.tokens).tobytes())

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        """i32[n]: all ids of the segment in order."""
        return _frozen(np.concatenate([s.tokens for s in self.spans]))

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """bool[n]: True where the policy sampled the token."""
        return _frozen(np.concatenate([np.full(len(s.tokens), s.author is Author.POLICY) for s in self.spans]))

    def __len__(self) -> int:
        return sum(len(s.tokens) for s in self.spans)


@dataclass(frozen=True)
class Turn:
    """One action and the answer to it.

    reward: reward of this turn alone; None where there is none
    state:  key of the environment state the action was taken in (the anchor of GiGPO); None where unknown
    valid:  False where the action did not parse or named no tool
    """

    reward: float | None = None
    state: str | None = None
    valid: bool = True

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"turn reward must be finite or None, got {self.reward}")


@dataclass(frozen=True)
class Outcome:
    """What the verifier said. `true_success` is None where only the reward is known."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    true_success: bool | None = None
    tampering: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # One NaN would poison the baseline of its whole group.
        for name, value in {"reward": self.reward, **{f"component {k!r}": v for k, v in self.components.items()}}.items():
            if not math.isfinite(value):
                raise ValueError(f"outcome: {name} must be finite, got {value}; a missing reward is no Outcome at all")


@dataclass(frozen=True)
class Episode:
    """A finished episode.

    id:       unique within a run
    task:     id of the task
    group:    id of the group whose members share the task
    seed:     every random choice of the episode derives from it
    step:     training step that collected it
    outcome:  None where no reward exists; a missing reward is never 0
    counters: named counts ("parse_errors", "tool_errors", "tool_timeouts", "sampled_tokens", ...)
    timings:  seconds by name ("generate", "tools", "score", "queue")
    """

    id: str
    task: str
    group: str
    seed: int
    step: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    ending: Ending
    outcome: Outcome | None
    counters: Mapping[str, int] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ending.infrastructure and self.outcome is not None:
            raise ValueError(f"episode {self.id}: ended by {self.ending.value}, so it can have no outcome")
        if not self.segments and not self.ending.infrastructure:
            raise ValueError(f"episode {self.id}: no segment")
        spans = [span for segment in self.segments for span in segment.spans]
        last = max((span.turn for span in spans), default=-1)
        if last >= max(len(self.turns), 1):
            raise ValueError(f"episode {self.id}: a span of turn {last}, but only {len(self.turns)} turns")
        sampled = [span.turn for span in spans if span.author is Author.POLICY]
        if sampled and not self.turns:
            raise ValueError(f"episode {self.id}: a policy span, but no turns")
        if sampled != sorted(sampled):
            raise ValueError(f"episode {self.id}: segments must be in the order they were sampled in, got policy turns {sampled}")

    @cached_property
    def policy_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(int(segment.mask.sum()) for segment in self.segments)

    @property
    def usable(self) -> bool:
        """True where the episode may be in group statistics: the policy's own ending, a reward, and at least one sampled token."""
        return self.outcome is not None and not self.ending.infrastructure and self.policy_tokens > 0

    @property
    def reward(self) -> float | None:
        return None if self.outcome is None else self.outcome.reward
