"""The embedded engine: what holds to the bit, weight updates, failures, fairness, compilations."""

import asyncio
from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from agentrl_jax.inference import decode
from agentrl_jax.inference.engine import MAX_STOP_IDS, Engine
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampling
from agentrl_jax.inference.runner import cache_lengths
from agentrl_jax.models.decoder import Params
from tests.inference.conftest import CONFIG, score, weights

LIMIT = 300  # three cache lengths: 128, 256, 384


def ids(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, n).astype(np.int32)


def assert_same(a: Completion, b: Completion) -> None:
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)  # no tolerance: the same bits


def new(params: Params, **options: int) -> Engine:
    return Engine(CONFIG, params, **{"context_limit": LIMIT, "slots": 8, "prefill_size": 128} | options)


async def noise(engine: Engine, name: str, seed: int, turns: int = 3) -> None:
    """Somebody else's episode, of any length, that comes and goes at any time."""
    rng = np.random.default_rng(seed)
    prompt = ids(int(rng.integers(1, 150)), seed)
    for turn in range(turns):
        await asyncio.sleep(float(rng.random()) / 50)
        if len(prompt) >= LIMIT:
            break
        sampling = Sampling(int(rng.integers(1, 40)), seed=turn, temperature=float(rng.random()))
        done = await engine.generate(prompt, sampling, session=name)
        prompt = np.concatenate([prompt, done.tokens, ids(int(rng.integers(1, 30)), turn)])
    await engine.release(name)


async def turns(engine: Engine, session: str, pause: float = 0.0) -> list[Completion]:
    """The episode that must come out the same everywhere: a long first prompt, three turns of 20 tokens."""
    prompt, result = ids(70, seed=99), []
    for turn in range(3):
        done = await engine.generate(prompt, Sampling(20, seed=turn), session=session)
        result.append(done)
        prompt = np.concatenate([prompt, done.tokens, ids(15, seed=turn)])
        await asyncio.sleep(pause)
    return result


@pytest.fixture(scope="module")
def alone(params: Params) -> list[Completion]:
    async def run() -> list[Completion]:
        async with new(params) as engine:
            return await turns(engine, "alone")

    return asyncio.run(run())


@pytest.mark.slow
@settings(max_examples=6)
@given(crowd=st.integers(0, 7), before=st.integers(0, 7), delay=st.floats(0, 0.05), steps=st.sampled_from([3, 8]), seed=st.integers(0, 99))
def test_neighbours_slot_timing_and_split_into_calls_change_no_bit(
    params: Params, alone: list[Completion], crowd: int, before: int, delay: float, steps: int, seed: int
):
    async def run() -> None:
        async with new(params, steps=steps) as engine:
            # Others use the slots first, and some stay in them.
            await asyncio.gather(*(noise(engine, f"before {i}", seed + i, turns=1) for i in range(before)))
            others = [asyncio.create_task(noise(engine, f"crowd {i}", 100 * seed + i)) for i in range(crowd)]
            await asyncio.sleep(delay)
            for done, expected in zip(await turns(engine, "a", pause=delay), alone, strict=True):
                assert_same(done, expected)
                assert done.cached == expected.cached
            await asyncio.gather(*others)

    asyncio.run(run())


async def test_the_length_of_the_cache_changes_no_bit(params: Params, alone: list[Completion]):
    async with new(params) as engine:
        # The neighbour's context makes the cache 384 long, where `alone` ran with 128 and 256.
        long = asyncio.create_task(engine.generate(ids(260), Sampling(40, seed=0), session="long"))
        for done, expected in zip(await turns(engine, "a"), alone, strict=True):
            assert_same(done, expected)
        await long


@pytest.mark.slow
async def test_a_lost_slot_costs_time_and_at_most_rounding(params: Params):
    async def run(slots: int) -> list[list[Completion]]:
        async with new(params, slots=slots) as engine:
            return await asyncio.gather(*(turns(engine, str(i)) for i in range(5)))

    for kept, evicted in zip(await run(8), await run(1), strict=True):
        for a, b in zip(kept, evicted, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            assert b.cached <= a.cached


async def test_an_update_between_turns_makes_the_old_cache_worthless(params: Params):
    other = weights(1)
    async with new(params) as engine:
        await engine.generate(ids(40), Sampling(10, seed=0), session="a")
        await engine.update(other, 7)
        assert engine.version == 7
        updated = await engine.generate(ids(40), Sampling(10, seed=0), session="a")
    async with new(other, version=7) as engine:
        fresh = await engine.generate(ids(40), Sampling(10, seed=0), session="a")
    assert updated.cached == 0
    assert set(updated.versions) == {7}
    assert_same(updated, fresh)


async def test_an_update_in_flight_splits_the_completion_by_version(params: Params):
    other = weights(1)
    prompt = ids(30)
    async with new(params, steps=1) as engine:
        task = asyncio.create_task(engine.generate(prompt, Sampling(200, seed=0), session="a"))
        while engine.stats.sampled < 50:
            await asyncio.sleep(0)
        await engine.update(other, 1)
        done = await task
    assert set(done.versions) == {0, 1}
    assert (np.diff(done.versions) >= 0).all()
    assert len(done.tokens) == 200
    # Every token has the log-prob of the weights that sampled it, over a context computed with those weights alone.
    tokens = np.concatenate([prompt, done.tokens])
    for version, model in ((0, params), (1, other)):
        expected = score(model, tokens)[len(prompt) - 1 : -1][np.arange(200), done.tokens]
        mine = done.versions == version
        np.testing.assert_allclose(done.logprobs[mine], expected[mine], atol=1e-4)


@pytest.mark.parametrize("sharding", [PartitionSpec(), PartitionSpec(None, "data")])
async def test_weights_are_copied_from_wherever_they_are(params: Params, alone: list[Completion], sharding: PartitionSpec):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def place(x: jax.Array) -> jax.Array:
        whole = x.ndim == 1 or x.shape[1] % 4
        return jax.device_put(x.copy(), NamedSharding(mesh, PartitionSpec() if whole else sharding))

    on_mesh = jax.tree.map(place, params)
    async with new(on_mesh) as engine:
        jax.tree.map(lambda x: x.delete(), on_mesh)  # as donation does
        for done, expected in zip(await turns(engine, "a"), alone, strict=True):
            assert_same(done, expected)


async def test_nan_weights_fail_requests_and_leave_nothing_behind(params: Params, alone: list[Completion]):
    async with new(params) as engine:
        await engine.update(jax.tree.map(lambda x: x * np.nan, params), 1)
        results = await asyncio.gather(
            *(engine.generate(ids(20, i), Sampling(5, seed=i), session=str(i)) for i in range(20)), return_exceptions=True
        )
        assert all(isinstance(r, InferenceError) and "not finite" in str(r) for r in results)
        await engine.update(params, 2)
        for done, expected in zip(await turns(engine, "a"), alone, strict=True):
            assert_same(done, expected)


async def test_a_failing_call_fails_its_requests_and_the_engine_goes_on(params: Params, alone: list[Completion]):
    async with new(params) as engine:
        await engine.update({"embed": params["embed"]}, 1)  # no layers: the call raises
        for _ in range(2):
            with pytest.raises(InferenceError, match="session a"):
                await engine.generate(ids(20), Sampling(5, seed=0), session="a")
        await engine.update(params, 2)
        for done, expected in zip(await turns(engine, "a"), alone, strict=True):
            assert_same(done, expected)


async def test_release_in_flight_aborts_with_what_there_is(params: Params):
    async with new(params) as engine:
        whole = await engine.generate(ids(5), Sampling(100, seed=0), session="whole")
        task = asyncio.create_task(engine.generate(ids(5), Sampling(100, seed=0), session="a"))
        while engine.stats.sampled < 100 + 30:
            await asyncio.sleep(0)
        await engine.release("a")
        part = await task
    assert part.finish_reason == "abort"
    assert 0 < len(part.tokens) < 100
    np.testing.assert_array_equal(part.tokens, whole.tokens[: len(part.tokens)])
    np.testing.assert_array_equal(part.logprobs, whole.logprobs[: len(part.tokens)])


async def test_close_fails_what_is_left(params: Params):
    engine = new(params)
    with pytest.raises(InferenceError, match="not running"):
        await engine.generate(ids(5), Sampling(1, seed=0), session="a")
    async with engine:
        tasks = [asyncio.create_task(engine.generate(ids(5), Sampling(200, seed=0), session=str(i))) for i in range(12)]
        await asyncio.sleep(0)
    assert all(isinstance(r, InferenceError) for r in await asyncio.gather(*tasks, return_exceptions=True))
    with pytest.raises(InferenceError, match="not running"):
        await engine.generate(ids(5), Sampling(1, seed=0), session="a")


async def test_requests_of_one_session_run_one_after_the_other(params: Params):
    async with new(params) as engine:
        both = await asyncio.gather(*(engine.generate(ids(20), Sampling(10, seed=1), session="a") for _ in range(2)))
    assert [done.cached for done in both] == [0, 19]
    np.testing.assert_array_equal(both[0].tokens, both[1].tokens)


async def test_requests_that_wait_are_served_in_order(params: Params):
    finished: list[int] = []

    async def one(engine: Engine, i: int) -> None:
        await engine.generate(ids(5, i), Sampling(10, seed=i), session=str(i))
        finished.append(i)

    async with new(params, slots=1) as engine:
        await asyncio.gather(*(one(engine, i) for i in range(12)))
    assert finished == list(range(12))


@pytest.mark.parametrize(
    ("prompt", "stop", "message"),
    [
        (np.array([0, CONFIG.vocab_size], np.int32), (), "outside 0 .. 60"),
        (np.array([0, -1], np.int32), (), "outside 0 .. 60"),
        (np.array([0], np.int32), tuple(range(MAX_STOP_IDS + 1)), "stop ids"),
    ],
)
async def test_bad_requests_are_refused(engine: Engine, prompt: NDArray[np.int32], stop: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        await engine.generate(prompt, Sampling(5, seed=0, stop=stop), session="a")


@pytest.mark.slow
async def test_the_number_of_programs_is_bounded(params: Params, compilations: Callable[[], int]):
    async with new(params) as engine:
        await engine.warm_up()
        assert engine.stats.programs == engine.max_programs
        before = compilations()
        await asyncio.gather(*(noise(engine, str(i), seed=i) for i in range(20)))
        await engine.update(weights(1), 1)
        await asyncio.gather(*(noise(engine, str(i), seed=i) for i in range(20)))
        assert compilations() == before
        assert engine.stats.programs == engine.max_programs


@pytest.fixture
def compilations() -> Callable[[], int]:
    """How often a program was compiled since the test began."""
    programs = (decode.decode, decode.prefill, decode.grow)
    for program in programs:
        program.clear_cache()
    return lambda: sum(program._cache_size() for program in programs)


async def test_stats_count_tokens(engine: Engine):
    prompt = ids(30)
    first = await engine.generate(prompt, Sampling(10, seed=0), session="a")
    await engine.generate(np.concatenate([prompt, first.tokens, ids(7)]), Sampling(5, seed=0), session="a")
    # Of the second prompt the token sampled last and the 7 new ones are fed, the very last of them by decoding.
    assert (engine.stats.sampled, engine.stats.prefilled, engine.stats.cached) == (15, 29 + 7, 39)
    assert engine.stats.seconds > 0


def test_cache_lengths_are_multiples_of_128_with_room_for_the_limit():
    assert cache_lengths(64) == (128,)
    assert cache_lengths(512) == (128, 256, 384, 512)
    assert cache_lengths(1000) == (128, 256, 384, 512, 768, 1024)
    assert cache_lengths(4096, 1024) == (1024, 1536, 2048, 3072, 4096)


async def test_a_session_keeps_all_but_the_token_sampled_last(engine: Engine):
    prompt = ids(20)
    for turn in range(4):
        kept = await engine.generate(prompt, Sampling(6, seed=turn), session="kept")
        fresh = await engine.generate(prompt, Sampling(6, seed=turn), session=f"fresh {turn}")
        assert fresh.cached == 0
        assert kept.cached == (len(prompt) - 10 if turn else 0)
        np.testing.assert_array_equal(kept.tokens, fresh.tokens)
        np.testing.assert_allclose(kept.logprobs, fresh.logprobs, atol=1e-5)
        prompt = np.concatenate([prompt, kept.tokens, ids(9, seed=turn)])
