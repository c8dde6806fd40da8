"""vLLM as what a run samples from: weights go in, and what comes out was sampled from them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import pytest_asyncio

from agentrl_jax import config
from agentrl_jax.chat import tokenizer
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampling
from agentrl_jax.inference.served import Served
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.policy import Policy
from tests.inference.conftest import LIMIT, SERVED, score, weights
from tests.processes import descendants, until_gone


def policy(config: ModelConfig = SERVED) -> Policy:
    return Policy(config, init_params(config, jax.random.key(0)), tokenizer.train(["two words"], SERVED.vocab_size))


async def test_heads_that_it_cannot_compute_are_refused_before_anything_starts():
    with pytest.raises(InferenceError, match=r"model\.head_dim=24"):
        await Served(policy(replace(SERVED, head_dim=24)), context_limit=LIMIT, slots=4).__aenter__()


def test_an_override_names_the_servers_and_the_environment():
    experiment = config.load("experiments/bugfix_vllm.py")
    urls, venv = "inference.urls=http://127.0.0.1:1,http://127.0.0.1:2", "inference.venv=elsewhere"
    changed = config.override(experiment, [urls, venv]).inference
    assert isinstance(changed, partial)
    assert changed.func is Served
    assert changed.keywords == {"urls": ("http://127.0.0.1:1", "http://127.0.0.1:2"), "venv": "elsewhere"}


PROMPT = np.arange(5, dtype=np.int32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(vllm_venv: Path) -> AsyncIterator[Served]:
    async with Served(policy(), context_limit=LIMIT, slots=4, venv=str(vllm_venv)) as served:
        yield served


def apart(done: Completion, version: int) -> float:
    """Largest difference from our log-probs under the weights of a version."""
    whole = np.concatenate([PROMPT, done.tokens])
    ours = score(weights(version, SERVED), whole, config=SERVED)[len(PROMPT) - 1 : -1]
    return float(np.max(np.abs(done.logprobs - ours[np.arange(len(done.tokens)), done.tokens])))


@pytest.mark.slow
@pytest.mark.real("vllm")
@pytest.mark.asyncio(loop_scope="module")
class TestRealServer:
    async def test_every_update_is_what_is_sampled_from(self, served: Served):
        assert served.context_limit == LIMIT
        for version in (1, 2):
            await served.update(weights(version, SERVED), version)
            done = await served.generate(PROMPT, Sampling(12, seed=version), session="s")
            assert done.versions.tolist() == [version] * len(done.tokens)
            assert apart(done, version) <= 1e-4
        await served.release("s")
        assert served.stats.sampled == 24
        assert served.stats.seconds > 0

    async def test_a_server_whose_engine_dies_is_replaced_and_has_the_present_weights(self, served: Served):
        assert served.own is not None
        before = served.own.server
        assert before is not None
        await served.update(weights(3, SERVED), 3)
        processes = {before.pid, *descendants(before.pid)}
        calls = [asyncio.create_task(served.generate(PROMPT, Sampling(80, seed=i), session=f"{i}")) for i in range(8)]
        await asyncio.sleep(0.05)
        [engine] = [process for process in processes if b"VLLM::Engine" in Path(f"/proc/{process}/comm").read_bytes()]
        os.kill(engine, signal.SIGKILL)
        for done in await asyncio.gather(*calls):
            assert done.versions.tolist() == [3] * len(done.tokens)
            assert apart(done, 3) <= 1e-4
        assert not until_gone(processes)
        assert served.own.server is not None
        assert served.own.server.url == before.url
