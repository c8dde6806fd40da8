"""The policy that a KL is measured from: the one that the run started from, and three places for its weights."""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import jax
from jaxtyping import Array, Float

from agentrl_jax.data.batch import Tokens
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import Params

Reference: TypeAlias = Callable[[Tokens], Float[Array, "B T"]]
"""Log-prob of every token under the reference policy."""


def reference_of(
    learner: Learner, start: Params, how: Literal["none", "held", "offloaded"], base: Params | None = None
) -> Reference | None:
    """What gives the reference's log-probs; None where none are asked for.

    start: the weights that the run started from, which stay the caller's
    how:   "held": a copy stays on the devices; "offloaded": in the memory of the host, copied to the devices for each use
    base:  these weights as placed by the learner, where adapters are trained: they do not change, and no copy is made either way
    """
    if how == "none":
        return None
    if base is not None:
        return partial(learner.logprobs, base)
    if how == "held":
        return partial(learner.logprobs, learner.place(start))
    host = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), learner.place(start))
    return lambda tokens: learner.logprobs(learner.place(host), tokens)
