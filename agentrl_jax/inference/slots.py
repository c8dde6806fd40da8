"""Who holds which row of the cache: sessions, their tokens, and whose row is taken when there are more sessions than rows."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.inference.protocol import Completion, FinishReason, Sampling


@dataclass(eq=False)
class Request:
    """One call of `generate`, and what was sampled for it so far.

    budget: at most this many tokens: max_tokens, or less where the context ends before
    cached: prompt tokens that were in the cache when it got its slot
    queued: seconds until it got it
    """

    session: str
    prompt: NDArray[np.int32]
    sampling: Sampling
    budget: int
    future: asyncio.Future[Completion]
    created: float = field(default_factory=time.perf_counter)
    queued: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], version: int) -> None:
        self.tokens += tokens.tolist()
        self.logprobs += logprobs.tolist()
        self.versions += [version] * len(tokens)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish_reason=reason,
            cached=self.cached,
            queued=self.queued,
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request is complete; None while it is not."""
        if self.tokens and self.tokens[-1] in self.sampling.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.budget else None


@dataclass(eq=False)
class Slot:
    """One row of the cache.

    context: i32[context limit]; the first `size` are the prompt and the tokens sampled after it
    cached:  the cache holds the keys and values of context[:cached]; always below the context limit
    request: what is being sampled now; None while the session is idle
    """

    index: int
    context: NDArray[np.int32]
    size: int = 0
    cached: int = 0
    request: Request | None = None

    def begin(self, request: Request) -> None:
        """Take the request, and keep of the cache what is a prefix of its prompt."""
        prompt = request.prompt
        # The last token of a prompt is always fed again: decoding starts from its hidden state.
        shared = min(self.cached, len(prompt) - 1)
        differs = np.flatnonzero(prompt[:shared] != self.context[:shared])
        self.cached = request.cached = int(differs[0]) if len(differs) else shared
        self.size = len(prompt)
        self.context[: self.size] = prompt
        self.request = request
        request.queued = time.perf_counter() - request.created

    @property
    def pending(self) -> NDArray[np.int32]:
        """i32[n]: tokens to prefill. The last token is not among them: decoding feeds it."""
        return self.context[self.cached : max(self.size - 1, self.cached)]

    def append(self, tokens: NDArray[np.int32]) -> None:
        self.context[self.size : self.size + len(tokens)] = tokens
        self.size += len(tokens)


class Slots:
    """The rows and the sessions that hold them, least recently used first."""

    def __init__(self, count: int, context_limit: int) -> None:
        self.all = [Slot(index, np.zeros(context_limit, np.int32)) for index in range(count)]
        self._free = self.all[::-1]
        self._held: OrderedDict[str, Slot] = OrderedDict()

    @property
    def active(self) -> list[Slot]:
        """Slots with a request, the one admitted first in front."""
        return [slot for slot in self._held.values() if slot.request is not None]

    @property
    def sessions(self) -> int:
        """How many sessions hold a slot."""
        return len(self._held)

    @property
    def available(self) -> bool:
        """Some slot has no request: it is free, or its session is idle."""
        return len(self.active) < len(self.all)

    @property
    def reach(self) -> int:
        """How long the cache must be: every row needs one place after its last, which decoding of other rows scribbles on."""
        return max(slot.cached for slot in self.all) + 1

    def requests(self) -> list[Request]:
        """The requests of the active slots, in the same order."""
        return [slot.request for slot in self._held.values() if slot.request is not None]

    def admit(self, request: Request) -> bool:
        """Give the request the slot of its session, a free one, or that of the session idle longest; False where none is to be had."""
        slot = self._held.get(request.session)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
        if slot is None or slot.request is not None:
            return False
        self._held[request.session] = slot
        self._held.move_to_end(request.session)
        slot.begin(request)
        return True

    def finish(self, request: Request) -> None:
        """The request is over, done or not: its session becomes idle and keeps its slot. Nothing happens if it holds none."""
        slot = self._held.get(request.session)
        if slot is not None and slot.request is request:
            slot.request = None
            self._held.move_to_end(request.session)

    def release(self, session: str) -> Request | None:
        """Free the session's slot; returns the request that was in it."""
        slot = self._held.pop(session, None)
        if slot is None:
            return None
        request, slot.request, slot.cached = slot.request, None, 0
        self._free.append(slot)
        return request

    def forget(self) -> None:
        """The whole cache became invalid; sessions keep their slots."""
        for slot in self.all:
            slot.cached = 0

    def _evict(self) -> Slot | None:
        for session, slot in self._held.items():
            if slot.request is None:
                del self._held[session]
                slot.cached = 0
                return slot
        return None
