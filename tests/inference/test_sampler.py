"""What every `Sampler` does, whatever is behind it."""

import asyncio

import numpy as np
import pytest

from agentrl_jax.inference.protocol import Sampling
from tests.inference.conftest import VERSION, Subject


async def test_completion_has_ids_logprobs_and_versions_of_one_length(subject: Subject):
    done = await subject.sampler.generate(subject.prompt(7), Sampling(max_tokens=11, seed=1), session="a")
    assert (done.tokens.dtype, done.logprobs.dtype, done.versions.dtype) == (np.int32, np.float32, np.int32)
    assert done.tokens.shape == done.logprobs.shape == done.versions.shape == (11,)
    assert done.finish_reason == "length"
    assert set(done.versions) == {VERSION}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_logprobs_are_those_of_the_distribution_sampled_from(subject: Subject, temperature: float):
    prompt = subject.prompt(9)
    done = await subject.sampler.generate(prompt, Sampling(20, seed=5, temperature=temperature), session="a")
    expected = subject.score(np.concatenate([prompt, done.tokens]), temperature)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(done.logprobs, expected[np.arange(20), done.tokens], atol=1e-4)


async def test_temperature_0_is_greedy_with_logprobs_at_temperature_1(subject: Subject):
    prompt = subject.prompt(9)
    done = await subject.sampler.generate(prompt, Sampling(20, seed=5, temperature=0.0), session="a")
    expected = subject.score(np.concatenate([prompt, done.tokens]))[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(done.tokens, expected.argmax(axis=-1))
    np.testing.assert_allclose(done.logprobs, expected.max(axis=-1), atol=1e-4)


async def test_tokens_are_drawn_without_bias(subject: Subject):
    """Pearson's chi-square on the token after a given one; right code passes the bound by chance with 1 seed in 10,000."""
    prompt, n = subject.prompt(1), 1000
    done = await asyncio.gather(*(subject.sampler.generate(prompt, Sampling(1, seed=i), session=str(i)) for i in range(n)))
    counts = np.bincount([d.tokens[0] for d in done], minlength=subject.vocab_size)
    expected = n * np.exp(subject.score(np.append(prompt, np.int32(0)))[len(prompt) - 1])
    # Cells that expect fewer than 5 are put together.
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    freedom = len(expected) - 1
    assert freedom > 10
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    z = (np.cbrt(np.sum((counts - expected) ** 2 / expected) / freedom) - 1 + 2 / (9 * freedom)) / np.sqrt(2 / (9 * freedom))
    assert abs(z) < 3.9


async def test_a_seed_is_reproducible_and_seeds_differ(subject: Subject):
    prompt = subject.prompt(5)

    async def run(seed: int, session: str) -> tuple[int, ...]:
        done = await subject.sampler.generate(prompt, Sampling(12, seed=seed), session=session)
        await subject.sampler.release(session)
        return tuple(done.tokens.tolist())

    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1]
    first = await asyncio.gather(*(run(seed, f"a{seed}") for seed in seeds))
    again = await asyncio.gather(*(run(seed, f"b{seed}") for seed in reversed(seeds)))
    assert first == again[::-1]
    assert len(set(first)) == len(seeds)


async def test_the_sampled_stop_id_ends_the_completion_and_belongs_to_it(subject: Subject):
    prompt = subject.prompt(5)
    free = await subject.sampler.generate(prompt, Sampling(30, seed=4), session="free")
    stop = int(free.tokens[9])
    unused = next(i for i in range(subject.vocab_size) if i not in free.tokens)
    first = int(np.flatnonzero(free.tokens == stop)[0])
    done = await subject.sampler.generate(prompt, Sampling(30, seed=4, stop=(unused, stop)), session="stopped")
    assert done.finish_reason == "stop"
    np.testing.assert_array_equal(done.tokens, free.tokens[: first + 1])
    np.testing.assert_allclose(done.logprobs, free.logprobs[: first + 1], atol=1e-5)


async def test_the_context_limit_cuts_the_completion(subject: Subject):
    limit = subject.sampler.context_limit
    done = await subject.sampler.generate(subject.prompt(limit - 3), Sampling(50, seed=0), session="a")
    assert (len(done.tokens), done.finish_reason) == (3, "length")
    done = await subject.sampler.generate(subject.prompt(limit - 1), Sampling(50, seed=0), session="b")
    assert (len(done.tokens), done.finish_reason) == (1, "length")


async def test_a_prompt_without_room_is_refused(subject: Subject):
    for n in (0, subject.sampler.context_limit, subject.sampler.context_limit + 1):
        with pytest.raises(ValueError, match=f"{n} tokens"):
            await subject.sampler.generate(subject.prompt(n), Sampling(5, seed=0), session="a")


async def test_turns_of_a_session_reuse_its_cache_and_change_nothing(subject: Subject):
    rng, prompt = np.random.default_rng(0), subject.prompt(40)
    for turn in range(4):
        done = await subject.sampler.generate(prompt, Sampling(6, seed=turn), session="a")
        # All but the token sampled last, whose keys and values nobody needed yet, and what was added after it; in blocks of 32 at most.
        assert done.cached >= ((len(prompt) - 10) // 32 * 32 if turn else 0)
        whole = np.concatenate([prompt, done.tokens])
        expected = subject.score(whole)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(done.logprobs, expected[np.arange(6), done.tokens], atol=1e-4)
        prompt = np.concatenate([whole, rng.integers(0, subject.vocab_size, 9).astype(np.int32)])


async def test_a_session_may_go_another_way(subject: Subject):
    """A rewritten history: only the common prefix is reused."""
    prompt = subject.prompt(30)
    await subject.sampler.generate(prompt, Sampling(5, seed=0), session="a")
    edited = prompt.copy()
    edited[12] = (edited[12] + 1) % subject.vocab_size
    for other in (edited, edited[:20], subject.prompt(8, seed=9)):
        reused = await subject.sampler.generate(other, Sampling(5, seed=0), session="a")
        fresh = await subject.sampler.generate(other, Sampling(5, seed=0), session=f"fresh {len(other)}")
        np.testing.assert_array_equal(reused.tokens, fresh.tokens)
        np.testing.assert_allclose(reused.logprobs, fresh.logprobs, atol=1e-5)
        await subject.sampler.release("a")
        await subject.sampler.generate(prompt, Sampling(5, seed=0), session="a")


async def test_a_cancelled_call_frees_its_row(subject: Subject):
    async def one(i: int) -> None:
        await subject.sampler.generate(subject.prompt(5, seed=i), Sampling(80, seed=i), session=str(i))

    tasks = [asyncio.create_task(one(i)) for i in range(40)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
    done = await subject.sampler.generate(subject.prompt(5), Sampling(80, seed=0), session="after")
    assert len(done.tokens) == 80


async def test_many_more_sessions_than_the_cache_holds(subject: Subject):
    async def episode(i: int) -> None:
        rng, prompt = np.random.default_rng(i), subject.prompt(5, seed=i)
        for turn in range(3):
            done = await subject.sampler.generate(prompt, Sampling(int(rng.integers(1, 9)), seed=turn), session=str(i))
            await asyncio.sleep(rng.random() / 100)
            prompt = np.concatenate([prompt, done.tokens, subject.prompt(4, seed=turn)])
        await subject.sampler.release(str(i))

    await asyncio.gather(*(episode(i) for i in range(50)))


async def test_release_of_an_unknown_session_is_ignored(subject: Subject):
    await subject.sampler.release("nobody")


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": np.inf}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_sampling_refuses_what_has_no_meaning(wrong: dict, name: str):
    with pytest.raises(ValueError, match=name):
        Sampling(**{"max_tokens": 1, "seed": 0} | wrong)
