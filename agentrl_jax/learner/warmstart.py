"""Supervised learning on somebody else's episodes, by the same update that reinforcement learning uses."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax import credit, objective
from agentrl_jax.config import Optimizer, WarmStart
from agentrl_jax.data.collate import collate
from agentrl_jax.data.episode import Episode
from agentrl_jax.learner.optimizer import make_optimizer
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import FLOAT32, Compute, ModelConfig, Params
from agentrl_jax.models.lora import Trained, whole
from agentrl_jax.models.sharding import rows_mesh


def imitate(
    model: ModelConfig,
    start: Trained,
    episodes: Sequence[Episode],
    settings: WarmStart,
    *,
    row_length: int,
    seed: int,
    compute: Compute = FLOAT32,
    accumulate: int = 1,
    progress: Callable[[int, float], None],
    base: Params | None = None,
) -> Params:
    """`settings.updates` updates on the tokens that the demonstrator wrote, in rows drawn without replacement, pass after pass.

    start:      all weights, or an adapter of the weights `base`
    accumulate: pieces that the rows of an update are computed in, or as many of them as divide the rows
    progress:   called now and then with the updates done and the latest mean negative log-likelihood, nats per token
    """
    mesh = rows_mesh(math.gcd(settings.rows, jax.local_device_count()))
    schedule = Optimizer(learning_rate=settings.learning_rate, decay="cosine", warmup=settings.warmup, weight_decay=0.01)
    learner = Learner(
        model,
        make_optimizer(schedule, settings.updates),
        credit.grpo,
        objective.supervised,
        accumulate=math.gcd(settings.rows // mesh.size, accumulate),
        compute=compute,
        mesh=mesh,
    )
    host, _ = collate(episodes, row_length=row_length, row_multiple=mesh.size)
    batch, signals = learner.place((host, objective.Signals(jnp.zeros(host.tokens.ids.shape))))
    state = learner.init(start)
    base = None if base is None else learner.place(base)
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(np.asarray(host.tokens.mask).any(1)).astype(np.int32)
    waiting = rows[:0]
    for done in range(1, settings.updates + 1):
        while len(waiting) < settings.rows:
            waiting = np.concatenate([waiting, rng.permutation(rows)])
        drawn, waiting = waiting[: settings.rows], waiting[settings.rows :]
        state, metrics = learner.update(state, batch, signals, learner.place(drawn), base)
        if done % 10 == 0 or done == settings.updates:
            progress(done, float(metrics["loss"]))
    return whole(state.params, base)
