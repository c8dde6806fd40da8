"""The embedded engine: continuous batching over a fixed number of cache rows, for many asyncio tasks at once.

One task on the event loop schedules; the computation runs in a thread beside it (runner.py), so sandboxes go on meanwhile. Requests come
and go between two calls, and the schedule is: while a row has tokens to prefill, prefill; else decode a few steps.

What holds bit for bit, for ids and log-probs: a completion depends on the weights, the prompt, the sampling, and on which of the prompt's
tokens were prefilled and which decoded in earlier turns. It depends neither on the rest of the batch, nor on the slot, the time of
arrival, or the split into calls. While every session has a slot, runs are therefore reproducible. A session that lost its slot, and a
request that met a weight update, are prefilled anew: their log-probs agree with the undisturbed ones to rounding (1e-5).
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.inference.decode import Rows
from agentrl_jax.inference.protocol import Completion, FinishReason, InferenceError, Sampling
from agentrl_jax.inference.runner import Runner, Stats
from agentrl_jax.inference.slots import Request, Slot, Slots
from agentrl_jax.models.decoder import ModelConfig, Params

logger = logging.getLogger(__name__)

MAX_STOP_IDS = 8


class Engine:
    """A `Sampler` over a `Decoder` in this process: `async with Engine(...) as engine`, from one event loop.

    slots:         rows of the cache: the requests that run at once, and the sessions that keep their cache. With more sessions an
                   idle one gives its slot to one that waits, and is prefilled from the start when it comes back.
    context_limit: prompt and completion together never exceed it
    steps:         tokens a row may sample per call; a finished request waits for the end of its call
    prefill_size:  tokens per prefill call: many rows of a small chunk, or few rows of a large one
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        context_limit: int,
        version: int = 0,
        slots: int = 64,
        steps: int = 8,
        prefill_size: int = 512,
    ) -> None:
        self.stats = Stats()
        self._vocab_size, self._limit, self._steps = config.vocab_size, context_limit, steps
        self._runner = Runner(config, slots=slots, context_limit=context_limit, steps=steps, prefill_size=prefill_size, stats=self.stats)
        self._slots = Slots(slots, context_limit)
        self._waiting: list[Request] = []
        self._wake = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._closed = False
        self._patience = 0.0
        self._load(params, version)

    @property
    def context_limit(self) -> int:
        return self._limit

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    @property
    def max_programs(self) -> int:
        """The engine compiles at most this many programs, whatever is asked of it."""
        return self._runner.max_programs

    async def __aenter__(self) -> Self:
        self._scheduler = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for the call in flight, then fail every request that is left with InferenceError."""
        self._closed = True
        self._wake.set()
        if self._scheduler is not None:
            await self._scheduler
        self._runner.close()

    async def warm_up(self) -> None:
        """Compile every program now instead of when it is first needed. Call it before the first request."""
        await self._runner.warm_up(Rows.idle(len(self._slots.all), MAX_STOP_IDS))

    async def update(self, params: Params, version: int) -> None:
        """Swap the weights. `params` may be sharded; they are copied, so that the trainer may donate its own.

        The tokens of the call in flight belong to the old version. All caches become invalid: running requests are prefilled anew
        and go on under the new weights.
        """
        self._load(params, version)

    def _load(self, params: Params, version: int) -> None:
        self._runner.load(params)
        self._slots.forget()
        self._version = version

    async def generate(self, prompt: NDArray[np.int32], sampling: Sampling, *, session: str) -> Completion:
        """See `Sampler.generate`. Requests of one session run one after the other; cancelling one gives its row back."""
        if self._scheduler is None or self._closed:
            raise InferenceError("the engine is not running: use it within `async with Engine(...)`")
        self._check(prompt, sampling)
        budget = min(sampling.max_tokens, self._limit - len(prompt))
        request = Request(session, prompt, sampling, budget, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._wake.set()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._slots.finish(request)
            if request in self._waiting:
                self._waiting.remove(request)
            raise

    async def release(self, session: str) -> None:
        """The session is over. A request still running for it ends with the tokens it has, finish_reason "abort"."""
        request = self._slots.release(session)
        if request is not None:
            self._complete(request, "abort")
        if not self._slots.sessions:
            # Nothing worth keeping: begin with a short cache again.
            self._runner.drop()

    def _check(self, prompt: NDArray[np.int32], sampling: Sampling) -> None:
        if not 0 < len(prompt) < self._limit:
            raise ValueError(f"a prompt of {len(prompt)} tokens: it needs at least 1, and at most {self._limit - 1} for one more to fit")
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            raise ValueError(f"the prompt holds an id outside 0 .. {self._vocab_size - 1}")
        if len(sampling.stop) > MAX_STOP_IDS:
            raise ValueError(f"{len(sampling.stop)} stop ids; the engine takes at most {MAX_STOP_IDS}")

    async def _run(self) -> None:
        while not self._closed:
            self._admit()
            active = self._slots.active
            pending = [slot for slot in active if len(slot.pending)]
            if not active:
                self._wake.clear()
                await self._wake.wait()
                continue
            if self._patience > 0 and 2 * len(active) < self._slots.sessions:
                # A call costs the same for one row as for all: while most sessions are at their tools, wait for more of them, at most
                # as long as the last call took. Who shares a call changes no result.
                patience, self._patience = self._patience, 0.0
                await asyncio.sleep(patience)
                continue
            programs, begin = self.stats.programs, time.perf_counter()
            try:
                await (self._prefill(pending) if pending else self._decode(active))
            except Exception as error:
                # Whatever it was, the cache of all rows went with it. The engine lives on, and so do requests that wait.
                logger.exception("a call failed")
                for request in self._slots.requests():
                    self._fail(request, f"{type(error).__name__}: {error}")
                self._reset()
            compiled = self.stats.programs > programs
            self._patience = 0.0 if compiled else time.perf_counter() - begin
        for request in [*self._waiting, *self._slots.requests()]:
            self._fail(request, "the engine was closed")

    def _admit(self) -> None:
        """First come, first served, but for a request whose session is busy."""
        for request in list(self._waiting):
            if not self._slots.available:
                break
            if self._slots.admit(request):
                self._waiting.remove(request)
                self.stats.cached += request.cached

    async def _prefill(self, pending: list[Slot]) -> None:
        """One chunk of the slot admitted first, and of others whose next chunk has the same size."""
        chunk = self._chunk(pending[0])
        count = self._runner.rows_of(chunk)
        batch = [slot for slot in pending if self._chunk(slot) == chunk][:count]
        requests = [slot.request for slot in batch]
        # Rows left over repeat the first one: they write its values once more.
        filled = batch + batch[:1] * (count - len(batch))
        tokens = np.zeros((count, chunk), np.int32)
        for row, slot in zip(tokens, filled, strict=True):
            row[: len(slot.pending)] = slot.pending[:chunk]
        fed = [len(slot.pending[:chunk]) for slot in batch]
        reach = max(self._slots.reach, *(slot.size for slot in batch))
        await self._runner.prefill(_column(slot.index for slot in filled), tokens, _column(slot.cached for slot in filled), reach=reach)
        self.stats.prefilled += sum(fed)
        for slot, request, n in zip(batch, requests, fed, strict=True):
            if slot.request is request and self._runner.has_cache:
                slot.cached += n

    def _chunk(self, slot: Slot) -> int:
        """The largest chunk that the pending tokens fill, or the smallest of all: a matter of the request alone."""
        return max((chunk for chunk in self._runner.chunks if chunk <= len(slot.pending)), default=self._runner.chunks[0])

    async def _decode(self, active: list[Slot]) -> None:
        """Up to `steps` tokens for every active slot; none of them has tokens to prefill."""
        requests = self._slots.requests()
        version = self._version
        reach = max(self._slots.reach, *(min(slot.size + self._steps, self._limit) for slot in active))
        sampled = await self._runner.decode(self._rows(), reach=reach)
        self.stats.sampled += int(np.sum(sampled.count))
        for slot, request in zip(active, requests, strict=True):
            if slot.request is not request:
                continue
            n = sampled.count[slot.index]
            tokens, logprobs = sampled.tokens[slot.index, :n], sampled.logprobs[slot.index, :n]
            if not np.isfinite(logprobs).all():
                self._fail(request, "a sampled log-prob is not finite")
                self._reset()
                continue
            slot.append(tokens)
            request.append(tokens, logprobs, version)
            if self._runner.has_cache:
                slot.cached = slot.size - 1
            if request.finish_reason is not None:
                self._complete(request, request.finish_reason)

    def _rows(self) -> Rows:
        rows = Rows.idle(len(self._slots.all), MAX_STOP_IDS)
        for slot in self._slots.all:
            i, request = slot.index, slot.request
            rows.length[i] = slot.cached
            if request is not None:
                rows.token[i] = slot.context[slot.size - 1]
                rows.active[i] = True
                rows.index[i] = len(request.tokens)
                rows.budget[i] = request.budget - len(request.tokens)
                rows.seed[i] = divmod(request.sampling.seed, 2**32)
                rows.temperature[i] = request.sampling.temperature
                rows.stop[i, : len(request.sampling.stop)] = request.sampling.stop
        return rows

    def _reset(self) -> None:
        """Nothing in the cache can be trusted: every active row is prefilled anew."""
        self._runner.drop()
        self._slots.forget()

    def _complete(self, request: Request, reason: FinishReason) -> None:
        self._slots.finish(request)
        if not request.future.done():
            request.future.set_result(request.completion(reason))

    def _fail(self, request: Request, why: str) -> None:
        self._slots.finish(request)
        if not request.future.done():
            request.future.set_exception(InferenceError(f"session {request.session}: {why}"))


def _column(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)
