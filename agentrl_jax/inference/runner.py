"""The device side of the engine: weights, cache and programs, used by one thread so that the event loop never waits for a computation."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.inference.decode import GRANULE, Rows, Sampled, decode, grow, prefill
from agentrl_jax.models.decoder import Cache, Decoder, ModelConfig, Params, cache_length, init_cache

T = TypeVar("T")


@dataclass
class Stats:
    """Totals since the engine was made.

    sampled:   tokens sampled
    prefilled: prompt tokens computed, padding not counted
    cached:    prompt tokens found in the cache
    calls:     calls of a program
    seconds:   time the thread spent in them
    programs:  different programs among them, each compiled once; at most `Runner.max_programs`
    """

    sampled: int = 0
    prefilled: int = 0
    cached: int = 0
    calls: int = 0
    seconds: float = 0.0
    programs: int = 0


def cache_lengths(context_limit: int, shortest: int = GRANULE) -> tuple[int, ...]:
    """How long the cache may be, in tokens a row: 128, 256, 384, 512, 768, 1024, ..., the last one with room for the limit.

    >>> cache_lengths(1000)
    (128, 256, 384, 512, 768, 1024)
    """
    ladder = (GRANULE, *(GRANULE * length for power in range(1, 24) for length in (2**power, 3 * 2 ** (power - 1))))
    last = -(-max(context_limit, shortest) // GRANULE) * GRANULE
    return (*(length for length in ladder if shortest <= length < last), last)


class Runner:
    """Runs one call at a time. The cache is as long as the longest row needs, for the cost of decoding follows it.

    chunks: tokens that a prefill call may append to each of its rows, the smaller first; rows x chunk is `prefill_size`
    """

    def __init__(self, config: ModelConfig, *, slots: int, context_limit: int, steps: int, prefill_size: int, stats: Stats) -> None:
        self.lengths = cache_lengths(context_limit, max(GRANULE, prefill_size // 4))
        self.chunks = [prefill_size // 16, prefill_size // 4]
        self._config, self._decoder = config, Decoder(config)
        self._slots, self._steps, self._prefill_size = slots, steps, prefill_size
        self._device = jax.local_devices()[0]
        self._thread = ThreadPoolExecutor(1, "engine")
        self._cache: Cache | None = None
        self._generation = 0
        self._stats = stats
        self._programs: set[tuple[str, int, int]] = set()

    @property
    def max_programs(self) -> int:
        """For every cache length one program to decode, one per chunk to prefill, and one to grow from each shorter length."""
        n = len(self.lengths)
        return n * (1 + len(self.chunks)) + n * (n - 1) // 2

    @property
    def has_cache(self) -> bool:
        """False after `drop` until the next call, also where that call was in flight at the time."""
        return self._cache is not None

    def load(self, params: Params) -> None:
        """Take a copy of the weights, whole, on the first device of this process; the cache made with the old ones is dropped."""
        # Not device_put(may_alias=False): of an array on several devices that still gives a view.
        self._params = jax.tree.map(lambda x: jnp.array(x, copy=True), jax.device_put(params, self._device))
        self.drop()

    def drop(self) -> None:
        """Begin with a new cache. Not only with lengths of 0: a NaN left in it would show through the mask, as 0 * NaN is NaN."""
        self._generation += 1
        self._cache = None

    def close(self) -> None:
        self._thread.shutdown()

    def rows_of(self, chunk: int) -> int:
        """Rows of a prefill call."""
        return self._prefill_size // chunk

    async def prefill(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], start: NDArray[np.int32], *, reach: int) -> None:
        """`decode.prefill`; afterwards some row of the cache may be `reach` tokens long."""

        def call(params: Params, cache: Cache) -> tuple[Cache, None]:
            return jax.block_until_ready(prefill(self._decoder, params, cache, rows, tokens, start)), None

        await self._run("prefill", call, reach, tokens.shape[1])

    async def decode(self, rows: Rows, *, reach: int) -> Sampled:
        """`decode.decode`, with the results as numpy arrays."""

        def call(params: Params, cache: Cache) -> tuple[Cache, Sampled]:
            cache, sampled = decode(self._decoder, params, cache, rows, steps=self._steps)
            return cache, jax.device_get(sampled)

        return await self._run("decode", call, reach)

    async def _run(self, name: str, call: Callable[[Params, Cache], tuple[Cache, T]], reach: int, chunk: int = 1) -> T:
        params, cache, generation = self._params, self._cache, self._generation
        length = next(length for length in self.lengths if length >= reach)
        # The call consumes the buffers of the cache. It comes back only if the call succeeds and nothing made it invalid meanwhile.
        self._cache = None

        def work() -> tuple[Cache, T]:
            begin = time.perf_counter()
            fitted = self._fit(cache, length)
            self._programs.add((name, cache_length(fitted), chunk))
            result = call(params, fitted)
            self._stats.calls += 1
            self._stats.programs = len(self._programs)
            self._stats.seconds += time.perf_counter() - begin
            return result

        cache, result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        if generation == self._generation:
            self._cache = cache
        return result

    def _fit(self, cache: Cache | None, length: int) -> list[tuple[jax.Array, jax.Array]]:
        if cache is None:
            # Put where the weights are: an array that could be anywhere would make a second program of every one.
            return jax.device_put(init_cache(self._config, self._slots, length), self._device)
        current = cache_length(cache)
        if current >= length:
            return cache
        self._programs.add(("grow", length, current))
        return grow(cache, length=length)

    async def warm_up(self, idle: Rows) -> None:
        """Run every program once, on rows of which none is active."""
        for i, length in enumerate(self.lengths):
            for shorter in self.lengths[:i]:
                self.drop()
                await self.decode(idle, reach=shorter)
                await self.decode(idle, reach=length)
            self.drop()
            for chunk in self.chunks:
                r = self.rows_of(chunk)
                zeros = np.zeros(r, np.int32)
                await self.prefill(zeros, np.zeros((r, chunk), np.int32), zeros, reach=length)
            await self.decode(idle, reach=length)
        self.drop()
