"""vLLM as what a run samples from: a server for the policy, the client, and every update pushed into it.

A server that fails costs time, not episodes: one of our own is started again, one of others is waited for, requests are sent again or
elsewhere, and whatever comes back is given the present weights before it gets requests. `fleet` and `vllm` do that.
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from agentrl_jax.inference.protocol import Completion, InferenceError, Sampling
from agentrl_jax.inference.publish import Through, Weights, push, tensors_of
from agentrl_jax.inference.runner import Stats
from agentrl_jax.inference.vllm import VLLM, Reference
from agentrl_jax.inference.vllm_server import Restartable, serve
from agentrl_jax.models.decoder import Decoder, Params, unembed
from agentrl_jax.models.policy import Policy

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM has attention for on CPUs (v1/attention/backends/cpu_attn.py); with another its engine dies at the first request."""

_PUSH = 60.0  # seconds that a step of a push may take at one server


class Served:
    """vLLM: a server on this machine's CPUs that lives as long as this, or servers that run elsewhere.

    venv:     environment that vLLM is installed in (`make vllm`)
    urls:     servers that already run, started for a model folder of this policy's shape (docs/weights.md); they are given its weights
    through:  how weights reach the servers, see `publish.push`
    patience: seconds that an answer to a health check may take; a server that takes longer twice in a row counts as dead

    Entering raises InferenceError where a server does not start or answer, or where its log-probs are not those of our own forward.
    `own` is the server that was started here, if one was.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        context_limit: int,
        slots: int,
        venv: str = ".venv-vllm",
        urls: tuple[str, ...] = (),
        through: Through = "memory",
        patience: float = 20.0,
    ) -> None:
        self.stats = Stats()
        self.own: Restartable | None = None
        self._policy, self._context, self._slots, self._venv, self._urls = policy, context_limit, slots, Path(venv), urls
        self._through: Through = through
        self._patience = patience
        self._stack = AsyncExitStack()
        self._running, self._since = 0, 0.0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._urls:
                self._client = await stack.enter_async_context(VLLM(self._urls, concurrency=self._slots, patience=self._patience))
                await self.update(self._policy.params, 0)  # they have others, perhaps
            else:
                self.own = own = await stack.enter_async_context(self._ours(stack))
                client = VLLM([own.url], concurrency=self._slots, patience=self._patience, restart=lambda url: own.restart())
                self._client = await stack.enter_async_context(client)
            await self._client.check(reference(self._policy))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def context_limit(self) -> int:
        return min(self._context, self._client.context_limit)

    async def update(self, params: Params, version: int) -> None:
        """See `Serving.update`. One host copy is kept, for servers that come back. Raises InferenceError where none takes the weights."""
        weights = await asyncio.to_thread(lambda: Weights(tensors_of(self._policy.model, params)))
        await self._client.update(lambda url: push([url], weights, version, through=self._through, deadline=_PUSH), version)

    async def generate(self, prompt: NDArray[np.int32], sampling: Sampling, *, session: str) -> Completion:
        self._running += 1
        if self._running == 1:
            self._since = time.perf_counter()
        try:
            done = await self._client.generate(prompt, sampling, session=session)
        finally:
            self._running -= 1
            if self._running == 0:
                self.stats.seconds += time.perf_counter() - self._since
        self.stats.calls += 1
        self.stats.sampled += len(done.tokens)
        self.stats.cached += done.cached
        self.stats.prefilled += len(prompt) - done.cached
        return done

    async def release(self, session: str) -> None:
        await self._client.release(session)

    def _ours(self, stack: AsyncExitStack) -> Restartable:
        """A server of the policy, whose folder lies in a temporary one as long as the stack."""
        if self._policy.model.head_dim not in CPU_HEADS:
            raise InferenceError(f"vLLM on CPUs has no heads of model.head_dim={self._policy.model.head_dim}: one of {CPU_HEADS}")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="policy-"))) / "policy"
        self._policy.write(folder, context_limit=self._context)
        return Restartable(lambda port: serve(folder, venv=self._venv, port=port, context_limit=self._context, slots=self._slots))


def reference(policy: Policy) -> Reference:
    """Log-probs by the trainer's model, for `VLLM.check`."""

    @jax.jit
    def forward(params: Params, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
        at, one = jnp.arange(len(tokens))[None], jnp.ones((1, len(tokens)), jnp.int32)
        hidden = Decoder(policy.model).apply({"params": params}, tokens[None], at, one)
        logprobs = jax.nn.log_softmax(hidden[0, :-1] @ unembed(params).T / temperature)  # pyright: ignore[reportCallIssue,reportArgumentType]
        return jnp.take_along_axis(logprobs, tokens[1:, None], axis=1)[:, 0]

    return lambda tokens, temperature: np.asarray(forward(policy.params, jnp.asarray(tokens), jnp.asarray(temperature, jnp.float32)))
