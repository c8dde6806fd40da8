"""AdamW with a global-norm clip and a schedule over the updates of a run."""

from typing import Any

import jax
import optax

from agentrl_jax.config import Optimizer


def make_optimizer(settings: Optimizer, updates: int) -> optax.GradientTransformation:
    """The optimizer of a run of so many updates. `updates` matters for a decay; a resumed run must pass the same number."""
    rate = schedule(settings, updates)
    adamw = optax.adamw(rate, settings.b1, settings.b2, settings.eps, weight_decay=settings.weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(settings.clip), adamw)


def decays(params: Any) -> Any:
    """Which arrays weight decay shrinks, True or False for each: matrices between hidden states, those of an adapter included.

    Not the scales of norms and biases, as everywhere; nor embeddings, whose rows would shrink in every update that does not see their
    token (OLMo 2 leaves them out too, https://arxiv.org/abs/2501.00656).
    """

    def decays_one(path: tuple[Any, ...], x: jax.Array) -> bool:
        return x.ndim == 2 and not any(getattr(key, "key", None) in ("embed", "unembedding") for key in path)

    return jax.tree_util.tree_map_with_path(decays_one, params)


def schedule(settings: Optimizer, updates: int) -> optax.Schedule:
    """Learning rate by update: a linear rise over the warm-up, then the decay."""
    peak, rest = settings.learning_rate, max(updates - settings.warmup, 1)
    match settings.decay:
        case "constant":
            after = optax.constant_schedule(peak)
        case "linear":
            after = optax.linear_schedule(peak, 0.0, rest)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rest)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, settings.warmup), after], [settings.warmup]) if settings.warmup else after
