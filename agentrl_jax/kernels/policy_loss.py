"""Per-token policy losses, to be minimised. Reduction is somebody else's job (`kernels/reduce.py`).

Arguments, the same in every loss:
    log_ratio: log(train / behaviour) at the sampled tokens, from `masked_log_ratio`; or one of a whole sequence, from
               `sequence_loss.sequence_log_ratio`
    logprob:   log-prob of the sampled tokens under the weights being trained; only losses of the score-function kind take it
    advantage: constants
Masked tokens of all three are set to 0 before they come in (`jnp.where(mask, x, 0.0)`), so that nothing that stands under the
mask, NaN and inf included, reaches an `exp` or its gradient.

Two kinds of losses have the same gradient where nothing is clipped, and different values:
    ratio:          -A r        gradient -A r, through the ratio
    score function: -sg(w) A log pi    gradient -A w; w, here and below, is held constant by a stop-gradient sg
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0

Divergence = Literal["tv", "kl"]


def masked_log_ratio(
    new: Float[Array, "*S"], old: Float[Array, "*S"], mask: Bool[Array, "*S"], *, clamp: float | None = MAX_LOG_RATIO
) -> Float[Array, "*S"]:
    """log(new / old), 0 where not `mask`, clamped to +-`clamp` so that its `exp` is finite; beyond it passes no gradient.

    `clamp=None` leaves it as it is: `exp` overflows in float32 from 88 on.
    """
    difference = jnp.where(mask, new, 0.0) - jnp.where(mask, old, 0.0)
    return difference if clamp is None else jnp.clip(difference, -clamp, clamp)


def weighted(loss: Float[Array, "*S"], weight: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """`sg(w) * loss`: importance weights from outside (`kernels/correction.py`), applied after any clipping."""
    return jax.lax.stop_gradient(weight) * loss


def reinforce(
    logprob: Float[Array, "*S"], advantage: Float[Array, "*S"], *, weight: Float[Array, "*S"] | None = None
) -> Float[Array, "*S"]:
    """`-sg(w) A log pi` (REINFORCE, Williams 1992). GPG (https://arxiv.org/abs/2504.02546) is this without a weight."""
    loss = -advantage * logprob
    return loss if weight is None else weighted(loss, weight)


def ppo_clip(
    log_ratio: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    max_ratio: float | None = None,
) -> Float[Array, "*S"]:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` (PPO, https://arxiv.org/abs/1707.06347, Eq. 7).

    Clip-higher of DAPO (https://arxiv.org/abs/2503.14476, Eq. 10) is `clip_high > clip_low`.

    Args:
        dual_clip: bound c > 1 on the loss of A < 0: at most `-A c` (dual clip, https://arxiv.org/abs/1912.09729). 3 in
            verl, always on; 1 + 2 * clip in ROLL. None: off.
        max_ratio: cap on the unclipped ratio before the maximum (`delta` of TRL). For A < 0 it ends in the same bound as
            `dual_clip`, so give one of them. None: off.

    Example:
        >>> ppo_clip(jnp.log(jnp.array([0.5, 1.5, 4.0])), -jnp.ones(3), dual_clip=3.0)  # doctest: +SKIP
        Array([0.8, 1.5, 3. ])
    """
    ratio = jnp.exp(log_ratio)
    free = ratio if max_ratio is None else jnp.minimum(ratio, max_ratio)
    loss = jnp.maximum(-advantage * free, -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is None:
        return loss
    return jnp.where(advantage < 0, jnp.minimum(loss, -advantage * dual_clip), loss)


def clipped(
    log_ratio: Float[Array, "*S"], advantage: Float[Array, "*S"], *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Bool[Array, "*S"]:
    """Where the clip range of `ppo_clip` passes no gradient to the ratio. Never where A = 0."""
    ratio = jnp.exp(log_ratio)
    return ((ratio > 1.0 + clip_high) & (advantage > 0)) | ((ratio < 1.0 - clip_low) & (advantage < 0))


def dual_clipped(log_ratio: Float[Array, "*S"], advantage: Float[Array, "*S"], *, dual_clip: float) -> Bool[Array, "*S"]:
    """Where the dual clip of `ppo_clip` passes no gradient to the ratio."""
    return (jnp.exp(log_ratio) > dual_clip) & (advantage < 0)


def outside(log_ratio: Float[Array, "*S"], *, min_ratio: float, max_ratio: float) -> Bool[Array, "*S"]:
    """Where the ratio is below `min_ratio` or above `max_ratio`: the weight of `cispo` is clipped there."""
    ratio = jnp.exp(log_ratio)
    return (ratio < min_ratio) | (ratio > max_ratio)


def decoupled_ppo(
    log_ratio: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    behaviour_weight: Float[Array, "*S"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Float[Array, "*S"]:
    """`sg(w) PPO(pi / prox)` with `w = prox / behaviour` (https://arxiv.org/abs/2110.00641; AReaL,
    https://arxiv.org/abs/2505.24298): clipped around the proximal policy, corrected for the one that sampled.

    Args:
        log_ratio: log(train / proximal), unlike elsewhere.
        behaviour_weight: proximal / behaviour, truncated or masked as one likes (`kernels/correction.py`); 0 drops the token.
    """
    loss = ppo_clip(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return weighted(loss, behaviour_weight)


def sapo(
    log_ratio: Float[Array, "*S"], advantage: Float[Array, "*S"], *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Float[Array, "*S"]:
    """`-A 4/tau sigmoid(tau (r - 1))`: a soft gate instead of the clip (SAPO, https://arxiv.org/abs/2511.20347).

    tau is `tau_positive` where A > 0, else `tau_negative`. At r = 1 the value is -2 A / tau and the gradient -A.
    """
    tau = jnp.where(advantage > 0, jnp.asarray(tau_positive, log_ratio.dtype), tau_negative)
    return -advantage * (4.0 / tau) * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0))


def cispo(
    logprob: Float[Array, "*S"],
    log_ratio: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    *,
    min_ratio: float = 0.0,
    max_ratio: float = 1.28,
    drop_clipped: bool = False,
) -> Float[Array, "*S"]:
    """`-sg(clip(r, min_ratio, max_ratio)) A log pi`: no token loses its gradient (CISPO, https://arxiv.org/abs/2506.13585).

    Args:
        min_ratio, max_ratio: values of the ratio, not distances from 1: verl's clip_ratio 0.2 is 0.8 and 1.2, TRL's epsilon_high
            5.0 is 0 and 5.0. The paper has no lower bound (0). 0 and 1 truncate as in TIS.
        drop_clipped: weight 0 where PPO of the same bounds would clip (A > 0 above, A < 0 below): the paper's unified form.
    """
    ratio = jnp.exp(log_ratio)
    weight = jnp.clip(ratio, min_ratio, max_ratio)
    if drop_clipped:
        dropped = ((ratio > max_ratio) & (advantage > 0)) | ((ratio < min_ratio) & (advantage < 0))
        weight = jnp.where(dropped, 0.0, weight)
    return reinforce(logprob, advantage, weight=weight)


def dis(
    logprob: Float[Array, "*S"],
    log_ratio: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    *,
    min_ratio: float = 0.8,
    max_ratio: float = 1.28,
) -> Float[Array, "*S"]:
    """`-sg(f(r)) A log pi`, f(r) = r strictly between the bounds, else 0 (double-sided mask, GLM-5, https://arxiv.org/abs/2602.15763,
    section 4.1.2; DIS, https://arxiv.org/abs/2607.07508).

    Whatever the sign of A, unlike PPO. The bounds are values of the ratio: 1 - eps_l and 1 + eps_h. Without the stop-gradient
    the gradient would be f (1 + log pi), of the wrong sign where log pi < -1.
    """
    ratio = jnp.exp(log_ratio)
    inside = (ratio > min_ratio) & (ratio < max_ratio)
    return reinforce(logprob, advantage, weight=jnp.where(inside, ratio, 0.0))


def topr(
    logprob: Float[Array, "*S"],
    log_ratio: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    positive: Bool[Array, "*S"],
    *,
    min_ratio: float = 0.0,
    max_ratio: float = 1.0,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> Float[Array, "*S"]:
    """`-A log pi` for positive trajectories, `-sg(clip(r, min_ratio, max_ratio)) A log pi` for the others (tapered off-policy
    REINFORCE, https://arxiv.org/abs/2503.14286), each with its own weight.

    Args:
        log_ratio: the paper's ratio is that of the whole trajectory: `sequence_log_ratio(..., average=False)`; ROLL's is the token's.
        positive: sign of the trajectory's reward (not of the advantage), on all its tokens.
    """
    tapered = negative_weight * jnp.clip(jnp.exp(log_ratio), min_ratio, max_ratio)
    return reinforce(logprob, advantage, weight=jnp.where(positive, positive_weight, tapered))


def dro(logprob: Float[Array, "*S"], log_ratio: Float[Array, "*S"], advantage: Float[Array, "*S"], *, beta: float) -> Float[Array, "*S"]:
    """`-A log pi + beta/2 log_ratio^2`: a quadratic pull to the behaviour policy instead of a ratio (DRO,
    https://arxiv.org/abs/2405.19107; Kimi k1.5, https://arxiv.org/abs/2501.12599, where beta is called tau)."""
    return reinforce(logprob, advantage) + 0.5 * beta * jnp.square(log_ratio)


def in_trust_region(
    logprob: Float[Array, "*S"],
    old_logprob: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    *,
    low: float,
    high: float,
    divergence: Divergence = "tv",
    two_sided: bool = False,
    eps: float = 0.0,
) -> Bool[Array, "*S"]:
    """Where a token is near enough to the behaviour policy to be trained on (DPPO, https://arxiv.org/abs/2602.04879).

    With p, q the probabilities of the sampled token now and when it was sampled, "tv" measures |p - q| and "kl" the KL divergence of
    (q, 1 - q) from (p, 1 - p). A token is out where A > 0, p > q and the divergence exceeds `high`, or where A <= 0, p < q and it
    exceeds `low`: where the gradient would lead further away.

    Args:
        two_sided: out wherever p > q by more than `high` or p < q by more than `low`, whatever the sign of A (IPO of prime-rl).
        eps: added inside both logarithms of "kl" (verl: 1e-8). With 0, a probability of exactly 1 has the divergence its limit has.
    """
    p, q = jnp.exp(jax.lax.stop_gradient(logprob)), jnp.exp(old_logprob)
    if divergence == "tv":
        distance = jnp.abs(p - q)
    elif divergence == "kl":
        distance = _binary_kl(q, p, eps)
    else:
        raise ValueError(f"divergence {divergence!r}: choose tv or kl")
    above, below = (p > q) & (distance > high), (p < q) & (distance > low)
    return ~(above | below) if two_sided else ~jnp.where(advantage > 0, above, below)


def _binary_kl(q: Float[Array, "*S"], p: Float[Array, "*S"], eps: float) -> Float[Array, "*S"]:
    def part(a: Float[Array, "*S"], b: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """a log(a / b), with 0 log 0 = 0."""
        tiny = jnp.finfo(a.dtype).tiny
        return a * (jnp.log(jnp.maximum(a + eps, tiny)) - jnp.log(jnp.maximum(b + eps, tiny)))

    return part(q, p) + part(1.0 - q, 1.0 - p)


def dppo(
    logprob: Float[Array, "*S"],
    log_ratio: Float[Array, "*S"],
    advantage: Float[Array, "*S"],
    keep: Bool[Array, "*S"],
    *,
    max_ratio: float | None = None,
    through: Literal["logprob", "ratio"] = "logprob",
    penalty: float = 0.0,
) -> Float[Array, "*S"]:
    """Policy gradient on the tokens of `keep`, from `in_trust_region` (DPPO, https://arxiv.org/abs/2602.04879).

    Args:
        max_ratio: cap on the ratio (verl: clip_ratio_c).
        through: "logprob": `-sg(min(r, max_ratio)) A log pi`, as in verl; "ratio": `-A min(r, max_ratio)`, as in prime-rl. Same gradient
            below the cap; beyond it "ratio" has none.
        penalty: times log_ratio^2, added on *all* tokens (prime-rl: 1e-3).
    """
    ratio = jnp.exp(log_ratio)
    capped = ratio if max_ratio is None else jnp.minimum(ratio, max_ratio)
    if through == "logprob":
        loss = reinforce(logprob, advantage, weight=jnp.where(keep, capped, 0.0))
    elif through == "ratio":
        loss = -advantage * jnp.where(keep, capped, 0.0)
    else:
        raise ValueError(f"through {through!r}: choose logprob or ratio")
    return loss + penalty * jnp.square(log_ratio) if penalty else loss
