"""AdamW with a global-norm clip and a schedule over the updates of a run."""

import optax

from agentrl_jax.config import Optimizer


def make_optimizer(settings: Optimizer, updates: int) -> optax.GradientTransformation:
    """The optimizer of a run of so many updates. `updates` matters for a decay; a resumed run must pass the same number."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule(settings, updates), b1=settings.b1, b2=settings.b2, eps=settings.eps, weight_decay=settings.weight_decay),
    )


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
