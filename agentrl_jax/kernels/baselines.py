"""Rules of credit that are more than a group's baseline and scale (`group.py`): scales of the whole batch, several rewards,
the best of a group, baselines per token, baselines that last."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentrl_jax.kernels.group import Singleton, Std, group_relative, group_statistics
from agentrl_jax.kernels.scan import Steps, cumulative_sum
from agentrl_jax.kernels.whiten import Divisor, EpsIn, whiten


def pass_at_k(
    reward: Float[Array, " N"],
    group: Int[Array, " N"],
    in_stats: Bool[Array, " N"],
    *,
    std: Literal["population", "sample", "none"] = "none",
    eps: float = 0.0,
) -> Float[Array, " N"]:
    """`A_i = max_j R_j - max_{j != i} R_j`, over the group's std if asked (https://arxiv.org/abs/2503.19595): what the best of the
    group owes to i. The best gets its lead over the second, all others 0; a tie for the best, or a group of fewer than two, gives 0."""
    second, leads = _second(reward, group, in_stats)
    lead = jnp.where(leads, reward, 0.0) - jnp.where(leads, second, 0.0)
    if std == "none":
        return lead
    s = group_statistics(reward, group, in_stats, std=std, eps=eps)
    return lead / jnp.where(leads, s.std[group], 1.0)


def _second(value: Float[Array, " N"], group: Int[Array, " N"], counts: Bool[Array, " N"]) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
    """Largest value of each group but for those equal to the largest of all, and who alone has the largest, with somebody behind."""
    n = value.shape[0]
    best = counts & (value == jax.ops.segment_max(jnp.where(counts, value, -jnp.inf), group, n)[group])
    ties = jax.ops.segment_sum(best.astype(jnp.int32), group, n)[group]
    second = jax.ops.segment_max(jnp.where(counts & ~best, value, -jnp.inf), group, n)[group]
    return second, best & (ties == 1) & jnp.isfinite(second)


def max_rl(reward: Float[Array, " N"], group: Int[Array, " N"], in_stats: Bool[Array, " N"], *, eps: float = 0.0) -> Float[Array, " N"]:
    """`(R_i - mean) / (mean + eps)`, 0 where the mean is not positive (MaxRL, https://arxiv.org/abs/2602.02710).

    For rewards of 0 and 1 the mean is the success rate, so hard tasks weigh more.
    """
    mean = group_statistics(reward, group, in_stats).mean[group]
    centred = group_relative(reward, group, in_stats, std="none")
    return jnp.where(mean > 0, centred / jnp.where(mean > 0, mean + eps, 1.0), 0.0)


def gpg_scale(
    reward: Float[Array, " N"],
    group: Int[Array, " N"],
    in_stats: Bool[Array, " N"],
    *,
    informative: Literal["varied", "nonzero"] = "varied",
) -> Float[Array, ""]:
    """Factor for the advantages of a batch in which some members teach nothing: all members / informative ones (at least 1).

    GPG (https://arxiv.org/abs/2504.02546) with `group_relative(std="none")`: "varied" counts members of groups whose rewards are
    not all equal, "nonzero" counts members with a reward other than 0 (verl), which depends on where the reward has its 0.
    """
    s = group_statistics(reward, group, in_stats)
    if informative == "varied":
        teaches = in_stats & (s.high > s.low)[group]
    elif informative == "nonzero":
        teaches = in_stats & (reward != 0)
    else:
        raise ValueError(f"informative {informative!r}: choose varied or nonzero")
    return jnp.sum(in_stats).astype(reward.dtype) / jnp.maximum(jnp.sum(teaches), 1).astype(reward.dtype)


def weighted_sum(
    parts: Float[Array, "N C"], weights: Float[Array, " C"], present: Bool[Array, "N C"]
) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
    """One reward out of several: the weighted sum of those that are present, and whether any is."""
    return jnp.sum(jnp.where(present, parts * weights[None], 0.0), axis=1), jnp.any(present, axis=1)


def gdpo(
    parts: Float[Array, "N C"],
    weights: Float[Array, " C"],
    group: Int[Array, " N"],
    present: Bool[Array, "N C"],
    *,
    std: Std = "population",
    eps: float = 0.0,
    singleton: Singleton = "zero",
    count: Float[Array, " N"] | None = None,
    divisor: Divisor = "population",
    whiten_eps: float = 0.0,
    whiten_eps_in: EpsIn = "std",
) -> Float[Array, " N"]:
    """Several rewards, each made relative to its group before they are added, then whitened over the batch
    (GDPO, https://arxiv.org/abs/2601.05242).

    Added first, rewards of different scales and spreads drown each other; here each has the weight that it is given.

    Args:
        parts: C rewards per member. present: False leaves one out of the statistics of its column and of the sum; a member with
            none is out altogether and gets 0.
        std, eps, singleton: of each column, as in `group_relative`.
        count: whiten over tokens with the number of tokens of each member (the authors' code, verl), over members without
            (TRL, NeMo-RL). The sign of an advantage can depend on it.
        divisor, whiten_eps, whiten_eps_in: as in `whiten`.
    """
    columns = [group_relative(parts[:, c], group, present[:, c], std=std, eps=eps, singleton=singleton) for c in range(parts.shape[1])]
    total, counts = weighted_sum(jnp.stack(columns, axis=1), weights, present)
    return whiten(total, counts, count=count, divisor=divisor, eps=whiten_eps, eps_in=whiten_eps_in)


def cost_penalty(
    reward: Float[Array, " N"],
    costs: Float[Array, "N C"],
    weights: Float[Array, " C"],
    group: Int[Array, " N"],
    in_stats: Bool[Array, " N"],
) -> Float[Array, " N"]:
    """Reward less what it cost compared with the dearest member: `R_i - mean(R) sum_c w_c cost_ic / max_j cost_jc`, in each group.

    Costs are tokens, turns, seconds. Times the mean reward, brevity counts for little until the group succeeds (prime-rl's length
    penalty). Members out of the statistics keep their reward.
    """
    worst = jnp.stack([group_statistics(costs[:, c], group, in_stats).high[group] for c in range(costs.shape[1])], axis=1)
    relative = costs / jnp.where(worst > 0, worst, 1.0)
    mean = group_statistics(reward, group, in_stats).mean[group]
    return jnp.where(in_stats, reward - mean * jnp.sum(relative * weights[None], axis=1), reward)


def running_baseline(
    reward: Float[Array, " N"], role: Int[Array, " N"], in_stats: Bool[Array, " N"], baseline: Float[Array, " P"], *, decay: float
) -> tuple[Float[Array, " N"], Float[Array, " P"]]:
    """Advantage over a baseline per role (agent, side of a game, kind of task) that outlives the batch, and the baseline after it.

    In order, `A_i = R_i - b`, then `b = decay b + (1 - decay) R_i`, with b of the member's role: role-conditioned advantage
    estimation (SPIRAL, https://arxiv.org/abs/2506.24119). The order of members matters.
    """

    def step(b: Float[Array, " P"], member: tuple[Array, Array, Array]) -> tuple[Float[Array, " P"], Float[Array, ""]]:
        r, p, counts = member
        return jnp.where(counts, b.at[p].set(decay * b[p] + (1.0 - decay) * r), b), jnp.where(counts, r - b[p], 0.0)

    after, advantage = jax.lax.scan(step, baseline, (reward, role, in_stats))
    return advantage, after


def remax(reward: Float[Array, "B T"], mask: Bool[Array, "B T"], greedy_reward: Float[Array, " B"]) -> Float[Array, "B T"]:
    """Undiscounted return from each token on, less the reward of the greedy rollout of the same task
    (ReMax, https://arxiv.org/abs/2310.10505). Rewards on tokens out of `mask` do not count."""
    returns = cumulative_sum(jnp.where(mask, reward, 0.0), reverse=True)
    return jnp.where(mask, returns - greedy_reward[:, None], 0.0)


def score_energy(logprob: Float[Array, "B T"], sum_pi_squared: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Squared norm of a token's gradient on the logits, `|e_a - pi|^2 = 1 - 2 pi(a) + sum_v pi(v)^2`: what `optimal_token_baseline`
    takes for the norm of its gradient on the weights. Under importance weights rho, multiply by rho^2."""
    return 1.0 - 2.0 * jnp.exp(logprob) + sum_pi_squared


def optimal_token_baseline(
    returns: Float[Array, "B T"],
    energy: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    group: Int[Array, " B"],
    in_stats: Bool[Array, " B"] | None = None,
    *,
    align: Literal["action", "position"] = "action",
    tail: Literal["zero", "raw", "raw_by_count"] = "zero",
    singleton: Singleton = "zero",
    eps: float = 0.0,
) -> Float[Array, "B T"]:
    """Advantage over the baseline of least variance, per token: `A_it = G_it - sum_j G_jt W_jt / sum_j W_jt`, j over the group.

    W_t sums the energies up to t: the further the gradient of a trajectory has grown, the more its return counts
    (OTB, https://arxiv.org/abs/2602.07078; verl's `optimal_token_baseline` and `tir_optimal_token_baseline`).

    Args:
        returns: return from each token on. energy: `score_energy`. mask: tokens the policy wrote; one row is one member.
        in_stats: False leaves a row out and gives it 0; all count if left out.
        align: which tokens of the group are compared: the k-th action of each ("action"; tool output shifts nothing), or those in the
            same column ("position").
        tail: a token that nobody else has a counterpart of gets 0, or its return ("raw"). "raw_by_count" gives the return to what the
            one longest row has from column (or action) n on, n the number of actions of the second longest: verl's rule, which for
            `align="position"` is meant for rows whose actions are in one piece.
        singleton: what a row without others in its group gets: 0 or its returns.
        eps: added to the divisor.
    """
    rows, width = mask.shape
    in_stats = jnp.ones(rows, bool) if in_stats is None else in_stats
    mask = mask & in_stats[:, None]
    g, energy, acted, steps = jnp.where(mask, returns, 0.0), jnp.where(mask, energy, 0.0), mask, None
    length = jnp.sum(mask, axis=1)
    if align == "action":
        # The k-th actions of all rows into column k.
        steps = Steps.of(mask)
        g, energy = steps.together(g), steps.together(energy)
        acted = jnp.arange(width)[None] < length[:, None]
    weight = jnp.where(acted, cumulative_sum(energy), 0.0)

    def total(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return jax.ops.segment_sum(x, group, rows)[group]

    divisor = total(weight) + eps
    baseline = total(g * weight) / jnp.where(divisor > 0, divisor, 1.0)
    baseline = jnp.where(total(acted.astype(g.dtype)) > 1, baseline, 0.0 if tail == "raw" else g)
    if tail == "raw_by_count":
        second, longest = _second(length.astype(g.dtype), group, in_stats)
        baseline = jnp.where(longest[:, None] & (jnp.arange(width, dtype=g.dtype)[None] >= second[:, None]), 0.0, baseline)
    members = jax.ops.segment_sum(in_stats.astype(jnp.int32), group, rows)[group]
    baseline = jnp.where(members[:, None] > 1, baseline, 0.0 if singleton == "raw" else g)
    return jnp.where(mask, g - baseline if steps is None else steps.apart(g - baseline), 0.0)
