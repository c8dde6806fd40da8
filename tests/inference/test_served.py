"""vLLM as what a run samples from: weights go in, and what comes out was sampled from them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from agentrl_jax.chat import tokenizer
from agentrl_jax.inference.protocol import InferenceError, Sampling
from agentrl_jax.inference.served import Served
from agentrl_jax.models.decoder import init_params
from agentrl_jax.models.policy import Policy
from tests.inference.conftest import LIMIT, SERVED, score, weights


def policy(config=SERVED) -> Policy:
    return Policy(config, init_params(config, jax.random.key(0)), tokenizer.train(["two words"], SERVED.vocab_size))


async def test_heads_that_it_cannot_compute_are_refused_before_anything_starts():
    with pytest.raises(InferenceError, match=r"model\.head_dim=24"):
        await Served(policy(replace(SERVED, head_dim=24)), context_limit=LIMIT, slots=4).__aenter__()


@pytest.mark.slow
@pytest.mark.real("vllm")
async def test_every_update_is_what_is_sampled_from(vllm_venv):
    prompt = np.arange(5, dtype=np.int32)
    async with Served(policy(), context_limit=LIMIT, slots=4, venv=vllm_venv) as served:
        assert served.context_limit == LIMIT
        for version in (1, 2):
            params = weights(version, SERVED)
            await served.update(params, version)
            done = await served.generate(prompt, Sampling(12, seed=version), session="s")
            assert done.versions.tolist() == [version] * len(done.tokens)
            whole = np.concatenate([prompt, done.tokens])
            ours = score(params, whole, config=SERVED)[len(prompt) - 1 : -1]
            np.testing.assert_allclose(done.logprobs, ours[np.arange(len(done.tokens)), done.tokens], atol=1e-4)
        await served.release("s")
        assert served.stats.sampled == 24
        assert served.stats.seconds > 0
