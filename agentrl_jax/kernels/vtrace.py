"""Returns of a policy from the steps of another: V-trace and its kin, Retrace and its kin. Time is the last axis.

Steps, ends and truncation are those of `kernels/gae.py`: tokens outside `mask` are passed over.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentrl_jax.kernels.gae import OffStep, on_steps
from agentrl_jax.kernels.policy_loss import MAX_LOG_RATIO, masked_log_ratio
from agentrl_jax.kernels.scan import BehindCut, Cut, Factor, cuts, discounted_sum, filled, following, shifted


class Vtrace(NamedTuple):
    """All 0 where not `mask`.

    errors:     v_t - V_t; the critic's target is `value + errors`
    advantages: for the policy gradient, `min(rho, clip_pg) (q - V)`
    q:          estimate of Q at the action taken
    """

    errors: Float[Array, "*B T"]
    advantages: Float[Array, "*B T"]
    q: Float[Array, "*B T"]


def vtrace(
    log_ratio: Float[Array, "*B T"],
    reward: Float[Array, "*B T"],
    value: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    *,
    discount: Factor = 1.0,
    lam: Factor = 1.0,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg: float | None = 1.0,
    leak: float = 0.0,
    truncated: Cut | None = None,
    bootstrap_value: BehindCut | None = None,
    off_step: OffStep = "anchor",
    steps: Bool[Array, "*B T"] | None = None,
    next_value: Float[Array, "*B T"] | None = None,
    max_log_ratio: float | None = MAX_LOG_RATIO,
) -> Vtrace:
    """V-trace (https://arxiv.org/abs/1802.01561, section 4.1, Eq. 1):

        e_t = rho_t (r_t + discount_t V_next - V_t) + discount_t lam_t c_t e_next,    rho_t = min(ratio, clip_rho), c_t = min(ratio, clip_c)
        q_t = r_t + discount_t (V_next + lam_t e_next)

    On policy it is GAE: e is its advantage. With all clips None, e is the importance-corrected TD error (per-decision importance
    sampling). `leak` > 0 lets through part of what is clipped, `(1 - leak) min(ratio, clip) + leak ratio` (leaky V-trace, there
    alpha is `1 - leak`).

    Args:
        log_ratio: log(train / behaviour) of the action taken, clamped to +-`max_log_ratio` before its exp.
        clip_rho, clip_c, clip_pg: None for no clip. A clip_rho below clip_c is not forbidden.
        next_value: value of the state behind each step, if it is not that at the next step (then `bootstrap_value` is not read).
        discount, lam, truncated, bootstrap_value, off_step, steps: as in `gae.gae`.

    No gradient should flow through it.
    """
    step = mask if steps is None else steps
    given = mask | step
    value = jnp.where(given, value, 0.0)
    reward = on_steps(reward, given, off_step)
    gamma, lam = filled(discount, reward), filled(lam, reward)
    cut, behind = cuts(reward, truncated, bootstrap_value)
    if next_value is None:
        next_value = jnp.where(cut, behind, following(jnp.where(step, value, behind), step | cut))
    next_value = jnp.where(given, next_value, 0.0)
    ratio = jnp.exp(masked_log_ratio(log_ratio, jnp.zeros_like(log_ratio), given, clamp=max_log_ratio))

    def clipped(limit: float | None) -> Float[Array, "*B T"]:
        return ratio if limit is None else (1.0 - leak) * jnp.minimum(ratio, limit) + leak * ratio

    delta = jnp.where(step, clipped(clip_rho) * (reward + gamma * next_value - value), 0.0)
    decay = jnp.where(step, gamma * lam * clipped(clip_c), 1.0)
    errors = discounted_sum(delta, jnp.where(cut, 0.0, decay))
    q = reward + gamma * (next_value + lam * jnp.where(cut, 0.0, shifted(errors)))
    advantages = clipped(clip_pg) * (q - value)
    return Vtrace(*(jnp.where(mask, x, 0.0) for x in (errors, advantages, q)))


def off_policy_return(
    reward: Float[Array, "*B T"],
    q: Float[Array, "*B T"],
    value: Float[Array, "*B T"],
    trace: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    *,
    discount: Factor = 1.0,
    truncated: Cut | None = None,
    bootstrap_value: BehindCut | None = None,
    off_step: OffStep = "anchor",
) -> Float[Array, "*B T"]:
    """Target of Q at the action taken: `G_t = r_t + discount_t (V_next + c_next (G_next - Q_next))`; 0 where not `mask`.

    `trace` c at the action taken (https://arxiv.org/abs/1606.02647): `lam min(1, ratio)` is Retrace, `lam pi(a)` tree backup,
    `lam` Q(lambda), `ratio` importance sampling, 0 the one-step target.

    Args:
        q: critic's value of the action taken.
        value: the policy's expectation of Q before the action; `bootstrap_value` is the same at a cut.
        others: as in `gae.gae`.
    """
    gamma = filled(discount, reward)
    cut, behind = cuts(reward, truncated, bootstrap_value)
    stop = mask | cut

    def next_step(x: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
        return jnp.where(cut, 0.0, following(jnp.where(mask, x, 0.0), stop))

    next_trace = next_step(trace)
    next_value = jnp.where(cut, behind, following(jnp.where(mask, value, behind), stop))
    x = on_steps(reward, mask, off_step) + gamma * (next_value - next_trace * next_step(q))
    returns = discounted_sum(jnp.where(mask, x, 0.0), jnp.where(mask, gamma * next_trace, 1.0))
    return jnp.where(mask, returns, 0.0)
