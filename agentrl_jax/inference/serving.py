"""What a run samples from while it trains: something that is made of a policy, samples from it, and takes the weights of every step.

An experiment names it as `inference=`: `embedded` (the default), or vLLM: `served.Served`, `partial(served.Served, urls=(...))`.
"""

from typing import Protocol, Self

from agentrl_jax.inference.engine import Engine
from agentrl_jax.inference.protocol import Sampler
from agentrl_jax.inference.runner import Stats
from agentrl_jax.models.decoder import Params
from agentrl_jax.models.policy import Policy


class Serving(Sampler, Protocol):
    """A `Sampler` whose weights can be replaced. Used within `async with`."""

    stats: Stats

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def update(self, params: Params, version: int) -> None:
        """From the next token on sample from `params`, which may be donated once this returns. Running requests go on."""
        ...


def embedded(policy: Policy, *, context_limit: int, slots: int) -> Engine:
    """The engine of this process, with a slot for each episode in flight."""
    return Engine(policy.model, policy.params, context_limit=context_limit, slots=slots)
