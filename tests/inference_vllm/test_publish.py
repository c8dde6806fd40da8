"""Pushes into a real server: what it says of itself afterwards is what our own forward says of the weights pushed."""

import asyncio
import re
from dataclasses import dataclass, replace

import httpx
import jax
import numpy as np
import pytest
import pytest_asyncio

from agentrl_jax.inference.protocol import InferenceError
from agentrl_jax.inference.publish import Weights, publish, push, tensors_of
from agentrl_jax.inference.vllm_server import MODEL_NAME, call, serve
from tests.inference_vllm.served import CONFIG, score, weights, write
from tests.processes import descendants, until_gone

pytestmark = [pytest.mark.real("vllm"), pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [7, 301, 42, 5, 99]
UNTIED = replace(CONFIG, tie_embeddings=False)


@dataclass
class Sampled:
    """tokens: the prompt too. logprobs and versions of those after it."""

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: list[tuple[str, int, int]]

    def apart(self, config, params, start=0, end=None) -> float:
        """Largest difference from our log-probs of the completion's tokens start .. end."""
        ours = score(config, params, self.tokens)[len(PROMPT) - 1 :]
        return float(np.abs(ours - self.logprobs)[start:end].max())


async def sample(url: str, count: int = 24) -> Sampled:
    sampling = {"max_tokens": count, "temperature": 1.0, "logprobs": 0, "seed": 7, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        request = {"model": MODEL_NAME, "token_ids": PROMPT, "sampling_params": sampling}
        [choice] = (await call(http, f"{url}/inference/v1/generate", request))["choices"]
    return Sampled(
        np.array(PROMPT + choice["token_ids"], np.int32),
        np.array([entry["logprob"] for entry in choice["logprobs"]["content"]]),
        [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory, vllm_venv):
    """A server of the policy with tied embeddings: weights of seed 0, called version 3."""
    folder = write(tmp_path_factory.mktemp("model") / "policy", CONFIG, weights(CONFIG, 0))
    async with serve(folder, venv=vllm_venv, version=3) as server:
        sampled = await sample(server.url)
        assert sampled.spans == [("3", 0, 24)]
        assert sampled.apart(CONFIG, weights(CONFIG, 0)) <= 1e-4
        yield server.url


@pytest.mark.parametrize("through", ["memory", "request"])
async def test_after_a_push_the_log_probs_are_those_of_the_new_weights(url, through):
    for seed in (1, 2):
        await publish([url], CONFIG, weights(CONFIG, seed), seed, through=through)
        sampled = await sample(url)
        assert sampled.spans == [(str(seed), 0, 24)]
        assert sampled.apart(CONFIG, weights(CONFIG, seed)) <= 1e-4
        assert sampled.apart(CONFIG, weights(CONFIG, 0)) > 1


def broken(how: str) -> dict[str, np.ndarray]:
    tensors = {name: tensor.copy() for name, tensor in tensors_of(CONFIG, weights(CONFIG, 9)).items()}
    name = "model.layers.1.mlp.down_proj.weight"
    match how:
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = tensors[name].T
        case "dtype":
            tensors[name] = tensors[name].astype(np.float16)
        case "finite":
            tensors[name][3, 5] = np.nan
        case "unknown":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"tensor model\.layers\.1\.mlp\.down_proj\.weight is missing \(1 of 24 are\)"),
        ("shape", r"down_proj\.weight is \[256, 128\], but the served model's is \[128, 256\]"),
        ("dtype", r"down_proj\.weight is torch\.float16, but the served model is torch\.float32"),
        ("finite", r"down_proj\.weight is not finite"),
        ("unknown", r"tensor lm_head\.weight has no place in the served model"),
    ],
)
async def test_weights_that_do_not_fit_leave_the_old_ones_serving(url, how, message):
    await publish([url], CONFIG, weights(CONFIG, 1), 1)
    with pytest.raises(InferenceError, match=f"version 2 is served nowhere.*{re.escape(url)}.*{message}"):
        await push([url], Weights(broken(how)), 2)
    sampled = await sample(url)
    assert sampled.spans == [("1", 0, 24)]
    assert sampled.apart(CONFIG, weights(CONFIG, 1)) <= 1e-4
    await publish([url], CONFIG, weights(CONFIG, 2), 2)
    assert (await sample(url)).apart(CONFIG, weights(CONFIG, 2)) <= 1e-4


async def test_weights_damaged_on_their_way_are_refused(url):
    await publish([url], CONFIG, weights(CONFIG, 1), 1)
    async with httpx.AsyncClient(trust_env=False) as http:
        await call(http, f"{url}/start_weight_update", {})
        await call(http, f"{url}/update_weights", {"update_info": {"sha256": "0", "data": "AAAA"}})

        async def staged() -> None:
            while await call(http, f"{url}/collective_rpc", {"method": "weights_staged"}) == {"results": [{"staged": False}]}:
                pass

        damaged = r"HTTP 500: .*the weights changed on their way: SHA-256"
        with pytest.raises(InferenceError, match=damaged):
            await staged()
        with pytest.raises(InferenceError, match=damaged):
            await call(http, f"{url}/finish_weight_update", {})
        await call(http, f"{url}/collective_rpc", {"method": "abort_weight_update"})
    assert (await sample(url)).apart(CONFIG, weights(CONFIG, 1)) <= 1e-4


async def test_an_update_that_a_dead_trainer_began_is_no_obstacle(url):
    async with httpx.AsyncClient(trust_env=False) as http:
        await call(http, f"{url}/pause?mode=keep", {})
        await call(http, f"{url}/start_weight_update", {})
    await publish([url], CONFIG, weights(CONFIG, 2), 2)
    assert (await sample(url)).apart(CONFIG, weights(CONFIG, 2)) <= 1e-4


async def test_one_server_that_is_gone_changes_none(url):
    await publish([url], CONFIG, weights(CONFIG, 1), 1)
    with pytest.raises(InferenceError, match=r"version 2 is served nowhere.*http://127\.0\.0\.1:9/.*no answer"):
        await publish([url, "http://127.0.0.1:9"], CONFIG, weights(CONFIG, 2), 2)
    assert (await sample(url)).apart(CONFIG, weights(CONFIG, 1)) <= 1e-4


async def sampling(url: str, tokens: float) -> None:
    """Return once the server has sampled so many tokens more."""

    async def count() -> float:
        async with httpx.AsyncClient(trust_env=False) as http:
            metrics = (await http.get(f"{url}/metrics")).text
        return sum(map(float, re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", metrics, re.MULTILINE)))

    goal = await count() + tokens
    while await count() < goal:
        await asyncio.sleep(0.01)


async def test_a_completion_in_flight_goes_on_under_the_new_weights(url):
    old, new = weights(CONFIG, 1), weights(CONFIG, 2)
    await publish([url], CONFIG, old, 1)
    request = asyncio.create_task(sample(url, 900))
    await sampling(url, 50)
    await publish([url], CONFIG, new, 2)
    sampled = await request
    [(first, start, split), (second, begin, end)] = sampled.spans
    assert (first, start, second, end) == ("1", 0, "2", 900)
    assert split == begin
    assert 50 <= split < 900
    # Every token is scored by the weights that its version names, after its whole past under those.
    assert sampled.apart(CONFIG, old, 0, split) <= 1e-4
    assert sampled.apart(CONFIG, new, split) <= 1e-4
    assert sampled.apart(CONFIG, old, split, split + 20) > 0.1


async def test_a_push_whose_caller_is_cancelled_leaves_no_server_paused(url):
    await publish([url], CONFIG, weights(CONFIG, 1), 1)
    caller = asyncio.create_task(publish([url], CONFIG, weights(CONFIG, 2), 2))
    async with httpx.AsyncClient(trust_env=False) as http:
        while not (await call(http, f"{url}/is_paused"))["is_paused"] and not caller.done():
            await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert await call(http, f"{url}/is_paused") == {"is_paused": False}
        assert await call(http, f"{url}/weight_info") == {"weight_version": "2"}
    assert (await sample(url)).apart(CONFIG, weights(CONFIG, 2)) <= 1e-4


async def test_an_untied_policy_is_pushed_too_and_its_server_leaves_nothing(tmp_path, vllm_venv):
    folder = write(tmp_path / "policy", UNTIED, weights(UNTIED, 0))
    async with serve(folder, venv=vllm_venv, context_limit=256, log=tmp_path / "log") as server:
        new = jax.tree.map(lambda x: x + 0.01, weights(UNTIED, 1))
        await publish([server.url], UNTIED, new, 1)
        assert (await sample(server.url)).apart(UNTIED, new) <= 1e-4
        processes = {server.pid, *descendants(server.pid)}
    assert not until_gone(processes)
    assert "vLLM" in (tmp_path / "log").read_text()


async def test_a_version_is_an_int32(url):
    with pytest.raises(ValueError, match="version must be in 0"):
        await push([url], Weights({}), 2**31)
