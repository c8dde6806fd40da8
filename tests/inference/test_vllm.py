"""How the vLLM client reads answers, good and bad; and what holds on a real server alone."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from agentrl_jax.inference.protocol import InferenceError, Sampler, Sampling
from agentrl_jax.inference.vllm import COMPLETIONS, TOKENS, VLLM, Reference
from agentrl_jax.models.decoder import Params
from tests.inference.conftest import SERVED, Subject, score, weights
from tests.inference.loopback import Loopback, completed

PROMPT = np.arange(1, 6, dtype=np.int32)


def spans(*ends: int) -> list[dict[str, Any]]:
    starts = (0, *ends[:-1])
    return [{"version": str(i), "start": start, "end": end} for i, (start, end) in enumerate(zip(starts, ends, strict=True))]


async def test_versions_change_within_a_completion():
    async def answer(body: Any) -> Any:
        return (200, completed(body, weight_versions=spans(1, 4))) if body else (422, None)

    async with Loopback(**{TOKENS: answer}) as server, VLLM([server.url]) as client:
        done = await client.generate(PROMPT, Sampling(4, seed=0), session="a")
        assert done.versions.tolist() == [0, 1, 1, 1]


async def test_an_aborted_completion_may_be_empty():
    async def answer(body: Any) -> Any:
        changes = {"token_ids": [], "logprobs": None, "weight_versions": None, "finish_reason": "abort"}
        return (200, completed(body, **changes)) if body else (422, None)

    async with Loopback(**{TOKENS: answer}) as server, VLLM([server.url]) as client:
        done = await client.generate(PROMPT, Sampling(4, seed=0), session="a")
        assert (done.finish_reason, done.tokens.shape, done.logprobs.shape, done.versions.shape) == ("abort", (0,), (0,), (0,))


CONTENT = [{"token_id": 5, "logprob": -1.0}] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "not an answer of vLLM"),
        ({"token_ids": [5] * 5, "logprobs": {"content": [*CONTENT, *CONTENT[:1]]}, "weight_versions": spans(5)}, "5 tokens of 4"),
        ({"token_ids": [5] * 3, "logprobs": {"content": CONTENT[:3]}, "weight_versions": spans(3)}, "3 tokens of 4"),
        ({"finish_reason": "stop"}, "stopped at id 5.*generation-config vllm"),
        ({"finish_reason": "error"}, "finish_reason 'error'"),
        ({"logprobs": None}, "log-probs of other tokens"),
        ({"logprobs": {"content": CONTENT[:3]}}, "log-probs of other tokens"),
        ({"logprobs": {"content": [{"token_id": 6, "logprob": -1.0}] * 4}}, "log-probs of other tokens"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": float("nan")}] * 4}}, "not finite"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -9999.0}] * 4}}, "not finite"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": 0.1}] * 4}}, "above 0"),
        ({"weight_versions": None}, "covers 0 of 4"),
        ({"weight_versions": spans(3)}, "covers 3 of 4"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 4}]}, "leaves tokens out"),
    ],
)
async def test_an_answer_that_cannot_be_is_refused(changes: dict[str, Any], message: str):
    async def answer(body: Any) -> Any:
        return (200, completed(body, **changes)) if body else (422, None)

    async with Loopback(**{TOKENS: answer}) as server, VLLM([server.url]) as client:
        with pytest.raises(InferenceError, match=message):
            await client.generate(PROMPT, Sampling(4, seed=0), session="a")
        assert server.asked[TOKENS] == 2, "it is not tried again"


async def test_a_prompt_of_another_length_is_refused():
    async def answer(body: Any) -> Any:
        return (200, completed(body) | {"usage": {"prompt_tokens": 6}}) if body else (422, None)

    async with Loopback(**{TOKENS: answer}) as server, VLLM([server.url]) as client:
        with pytest.raises(InferenceError, match="6 prompt tokens where 5 were sent"):
            await client.generate(PROMPT, Sampling(4, seed=0), session="a")


async def test_requests_leave_nothing_to_defaults():
    async with Loopback() as server, VLLM([server.url]) as client:
        await client.generate(PROMPT, Sampling(99, seed=0, temperature=0.5, stop=(7,)), session="a")
    body = server.bodies[-1]
    sent = body["sampling_params"]
    assert (body["model"], body["token_ids"]) == ("policy", PROMPT.tolist())
    assert (sent["max_tokens"], sent["temperature"], sent["stop_token_ids"]) == (64 - 5, 0.5, [7])
    assert (sent["ignore_eos"], sent["top_p"], sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (True, 1.0, 0, 0.0, 1.0)


async def test_seeds_differ_in_the_bits_that_torch_looks_at():
    async with Loopback() as server, VLLM([server.url]) as client:
        for seed in (0, 2**32, 2**62):
            await client.generate(PROMPT, Sampling(4, seed=seed), session="a")
    assert len({body["sampling_params"]["seed"] % 2**32 for body in server.bodies[-3:]}) == 3


async def test_a_server_without_the_token_endpoint_is_asked_for_completions():
    choice = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "stop"}

    async def answer(body: Any) -> Any:
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 5}}

    async with Loopback(**{TOKENS: (403, None), COMPLETIONS: answer}) as server, VLLM([server.url], version=3) as client:
        done = await client.generate(PROMPT, Sampling(4, seed=0, stop=(6,)), session="a")
    assert (done.tokens.tolist(), done.logprobs.tolist(), done.versions.tolist()) == ([5, 6], [-1.0, -2.0], [3, 3])
    body = server.bodies[-1]
    assert (body["prompt"], body["return_token_ids"], body["stop_token_ids"], body["logprobs"]) == (PROMPT.tolist(), True, [6], 0)


async def test_a_label_that_is_no_version_takes_the_server_out():
    async with Loopback(**{"/weight_info": (200, {"weight_version": "best"})}) as server, VLLM([server.url], deadline=0.2) as client:
        while client.servers[0].well:
            await asyncio.sleep(0.005)
        with pytest.raises(InferenceError, match="out of service"):
            await client.generate(PROMPT, Sampling(4, seed=0), session="a")


@pytest.mark.parametrize("models", [(200, {"data": []}), (200, []), (200, {"data": [{"id": "policy"}]}), (404, None)], ids=str)
async def test_what_is_no_vllm_is_refused_at_the_start(models: Any):
    async with Loopback(**{"/v1/models": models}) as server:
        with pytest.raises(InferenceError, match=server.url):
            async with VLLM([server.url]):
                pass


async def test_a_server_that_is_not_there_is_named_at_the_start():
    async with Loopback() as server:
        pass
    with pytest.raises(InferenceError, match=f"{server.url}: no answer .*start the server"):
        async with VLLM([server.url]):
            pass


@pytest.mark.parametrize("urls", [[], ["http://a", "http://a/"], ["localhost:8000"]], ids=str)
def test_wrong_urls_are_refused(urls: list[str]):
    with pytest.raises(ValueError, match=r"urls must name|begins with http"):
        VLLM(urls)


async def test_a_temperature_that_vllm_would_raise_is_refused():
    async with Loopback() as server, VLLM([server.url]) as client:
        with pytest.raises(ValueError, match=r"0\.001"):
            await client.generate(PROMPT, Sampling(4, seed=0, temperature=0.001), session="a")


async def test_it_samples_only_within_its_block():
    async with Loopback() as server:
        async with VLLM([server.url]) as client:
            assert isinstance(client, Sampler)
        with pytest.raises(InferenceError, match="async with"):
            await client.generate(PROMPT, Sampling(4, seed=0), session="a")


def by_ours(served: Params, temperature_of: dict[float, float]) -> Reference:
    """Our forward, for a temperature other than the one it is asked for."""

    def reference(tokens: NDArray[np.int32], temperature: float) -> NDArray[np.float32]:
        return score(served, tokens, temperature_of[temperature], SERVED)[np.arange(len(tokens) - 1), tokens[1:]]

    return reference


@pytest.mark.slow
@pytest.mark.real("vllm")
class TestRealServer:
    async def test_check_passes_where_the_server_samples_as_we_would(self, over_http: Subject, served: Params):
        await client_of(over_http).check(by_ours(served, {0.5: 0.5, 1.0: 1.0}), tolerance=1e-4)

    async def test_check_tells_raw_logprobs_from_other_weights(self, over_http: Subject, served: Params):
        # To a server of raw log-probs we would be off at 0.5 and right at 1.0.
        with pytest.raises(InferenceError, match="processed_logprobs"):
            await client_of(over_http).check(by_ours(served, {0.5: 2.0, 1.0: 0.5}))
        with pytest.raises(InferenceError, match="other weights"):
            await client_of(over_http).check(by_ours(weights(1, SERVED), {0.5: 0.5, 1.0: 1.0}))

    async def test_a_cached_prompt_gives_what_a_cold_one_gives(self, over_http: Subject, vllm_url: str):
        prompt = over_http.prompt(80, seed=5)
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{vllm_url}/reset_prefix_cache")).status_code == 200
        cold, hit = [await over_http.sampler.generate(prompt, Sampling(16, seed=3), session=f"{i}") for i in range(2)]
        assert (cold.cached, hit.cached) == (0, 64)
        np.testing.assert_array_equal(cold.tokens, hit.tokens)
        np.testing.assert_allclose(cold.logprobs, hit.logprobs, atol=1e-5)

    async def test_the_server_stops_sampling_for_whom_is_cancelled(self, over_http: Subject, vllm_url: str):
        async def running() -> float:
            text = (await http.get(f"{vllm_url}/metrics")).text
            return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))

        async def endless(i: int) -> None:
            while True:
                await over_http.sampler.generate(over_http.prompt(5, seed=i), Sampling(90, seed=i), session=f"{i}")

        async with httpx.AsyncClient() as http:
            tasks = [asyncio.create_task(endless(i)) for i in range(16)]
            while await running() == 0:
                pass
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while await running() > 0:
                await asyncio.sleep(0.01)

    async def test_completions_give_the_same_tokens(self, over_http: Subject):
        sampler, prompt, sampling = client_of(over_http), over_http.prompt(7), Sampling(20, seed=9, temperature=0.7)
        (server,) = sampler.servers
        assert server.path == TOKENS
        expected = await sampler.generate(prompt, sampling, session="a")
        server.path = COMPLETIONS
        done = await sampler.generate(prompt, sampling, session="a")
        np.testing.assert_array_equal(done.tokens, expected.tokens)
        np.testing.assert_allclose(done.logprobs, expected.logprobs, atol=1e-5)
        np.testing.assert_array_equal(done.versions, expected.versions)


def client_of(subject: Subject) -> VLLM:
    assert isinstance(subject.sampler, VLLM)
    return subject.sampler
