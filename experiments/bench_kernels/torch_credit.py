"""Rules of credit in PyTorch, each written from its formula: the arrays of a batch (batch.py) in, advantages or returns out.

Masks are there twice, `mask` as numbers to multiply with and `on` as booleans. Recurrences over tokens are loops over columns, as one
writes them in PyTorch: `LOOPS` of batch.py names the rules that have one.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.bench_kernels.batch import GAMMA, LAM, N_STEPS, TURN_GAMMA

Batch = dict[str, Tensor]


# Means


def token_mean(x: Tensor, d: Batch) -> Tensor:
    return (x * d["mask"]).sum() / d["mask"].sum()


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def whiten(x: Tensor, weight: Tensor) -> Tensor:
    """Over entries that count `weight` times: mean 0, sample variance 1."""
    n = weight.sum()
    mean = (x * weight).sum() / n
    variance = ((x - mean).square() * weight).sum() / (n - 1)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * (weight > 0)


# Groups


def outcome(d: Batch) -> Tensor:
    return (d["reward"] * d["mask"]).sum(1)


def on_tokens(x: Tensor, d: Batch) -> Tensor:
    return x[:, None] * d["mask"]


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    return x.new_zeros(len(x)).index_add_(0, group, x)[group]


def group_mean(x: Tensor, group: Tensor) -> Tensor:
    return group_sum(x, group) / group_sum(torch.ones_like(x), group)


def standardised(x: Tensor, group: Tensor, eps: float = 1e-6) -> Tensor:
    """(x - mean) / (sample std + eps) in each group; 0 where there is one member or none differs."""
    n = group_sum(torch.ones_like(x), group)
    centred = x - group_sum(x, group) / n
    std = (group_sum(centred.square(), group) / (n - 1).clamp(min=1)).sqrt()
    low = x.new_zeros(len(x)).scatter_reduce_(0, group, x, "amin", include_self=False)[group]
    high = x.new_zeros(len(x)).scatter_reduce_(0, group, x, "amax", include_self=False)[group]
    return torch.where(high > low, centred / (std + eps), 0.0)


def grpo(d: Batch) -> Tensor:
    return on_tokens(standardised(outcome(d), d["group"]), d)


def rloo(d: Batch) -> Tensor:
    r, group = outcome(d), d["group"]
    n = group_sum(torch.ones_like(r), group)
    return on_tokens((r - group_sum(r, group) / n) * n / (n - 1).clamp(min=1), d)


def opo(d: Batch) -> Tensor:
    r, length = outcome(d), d["mask"].sum(1)
    return on_tokens(r - group_sum(r * length, d["group"]) / group_sum(length, d["group"]), d)


def pass_at_k(d: Batch) -> Tensor:
    r, group = outcome(d), d["group"]

    def largest(x: Tensor) -> Tensor:
        return x.new_zeros(len(x)).scatter_reduce_(0, group, x, "amax", include_self=False)[group]

    best = r == largest(r)
    alone = best & (group_sum(best.to(r.dtype), group) == 1)
    second = largest(r.masked_fill(best, -torch.inf))
    return on_tokens(torch.where(alone & second.isfinite(), r - second, 0.0), d)


def gdpo(d: Batch) -> Tensor:
    total = sum(standardised(part, d["group"]) for part in d["parts"].T)
    assert isinstance(total, Tensor)
    return on_tokens(whiten(total, d["mask"].sum(1)), d)


def max_rl(d: Batch) -> Tensor:
    r = outcome(d)
    mean = group_mean(r, d["group"])
    return on_tokens(torch.where(mean > 0, (r - mean) / (mean + 1e-6), 0.0), d)


def reinforce_pp_baseline(d: Batch) -> Tensor:
    r = outcome(d)
    return whiten(on_tokens(r - group_mean(r, d["group"]), d), d["mask"])


def gpg(d: Batch) -> Tensor:
    r = outcome(d)
    centred = r - group_mean(r, d["group"])
    low = r.new_zeros(len(r)).scatter_reduce_(0, d["group"], r, "amin", include_self=False)[d["group"]]
    high = r.new_zeros(len(r)).scatter_reduce_(0, d["group"], r, "amax", include_self=False)[d["group"]]
    return on_tokens(centred * len(r) / (high > low).sum().clamp(min=1), d)


# Turns


def by_cell(x: Tensor, cell: Tensor, counted: Tensor) -> Tensor:
    """Relative to the mean of all that are in the same cell, over their sample std."""
    flat = torch.zeros_like(x)
    flat[counted] = standardised(x[counted], torch.unique(cell[counted], return_inverse=True)[1])
    return flat


def spread_turns(x: Tensor, d: Batch) -> Tensor:
    return x.gather(1, d["turn"]) * d["mask"]


def turn_returns(reward: Tensor) -> Tensor:
    found, later = [], torch.zeros_like(reward[:, 0])
    for r in reversed(reward.unbind(1)):
        later = r + TURN_GAMMA * later
        found.append(later)
    return torch.stack(found[::-1], 1)


def gigpo(d: Batch) -> Tensor:
    exists = d["exists"]
    reward = d["turn_reward"] * exists
    episode = standardised(reward.sum(1), d["group"])
    returns = turn_returns(reward)
    step = by_cell(returns.ravel(), d["state"].ravel(), exists.ravel()).reshape(exists.shape)
    return spread_turns((episode[:, None] + step) * exists, d)


def mt_grpo(d: Batch) -> Tensor:
    exists, reward = d["exists"], d["turn_reward"]
    own = torch.stack([standardised(column, d["group"]) for column in reward.T], 1)
    final = standardised(outcome(d), d["group"])[:, None]
    last = exists & (torch.arange(exists.shape[1]) == exists.sum(1, keepdim=True) - 1)
    x = torch.where(last, final, own) * exists
    found, later = [], torch.zeros_like(x[:, 0])
    for column in reversed(x.unbind(1)):
        later = column + 0.5 * later
        found.append(later)
    return spread_turns(torch.stack(found[::-1], 1) * exists, d)


def turn_starts(d: Batch) -> Tensor:
    """First token of each turn: the tokens of a turn that the policy wrote stand together, behind others that it did not write."""
    on = d["on"]
    return on & ~torch.nn.functional.pad(on, (1, -1))


def turn_ends(d: Batch) -> Tensor:
    on = d["on"]
    return on & ~torch.nn.functional.pad(on, (-1, 1))


def turn_table(x: Tensor, d: Batch) -> Tensor:
    return x.new_zeros(d["exists"].shape).scatter_add_(1, d["turn"], x)


def turn_gae(d: Batch) -> Tensor:
    value, reward = turn_table(d["value"] * turn_starts(d), d), d["turn_reward"]
    found, later, next_value = [], torch.zeros_like(value[:, 0]), torch.zeros_like(value[:, 0])
    for k in reversed(range(value.shape[1])):
        here = d["exists"][:, k]
        advantage = reward[:, k] + GAMMA * next_value - value[:, k] + GAMMA * LAM * later
        later, next_value = torch.where(here, advantage, later), torch.where(here, value[:, k], next_value)
        found.append(later)
    return spread_turns(torch.stack(found[::-1], 1) * d["exists"], d)


# Tokens in time


def skipping_gae(reward: Tensor, value: Tensor, on: Tensor, discount: float, lam: float) -> Tensor:
    """From the last column to the first; columns that the policy did not write hand on what comes behind them."""
    found, later, next_value = [], torch.zeros_like(reward[:, 0]), torch.zeros_like(reward[:, 0])
    for r, v, here in zip(*(reversed(x.unbind(1)) for x in (reward, value, on)), strict=True):
        advantage = r + discount * next_value - v + discount * lam * later
        later, next_value = torch.where(here, advantage, later), torch.where(here, v, next_value)
        found.append(later)
    return torch.stack(found[::-1], 1)


def token_gae(d: Batch) -> Tensor:
    return skipping_gae(d["reward"], d["value"], d["on"], GAMMA, LAM) * d["mask"]


def lambda_return(d: Batch) -> Tensor:
    return (skipping_gae(d["reward"], d["value"], d["on"], GAMMA, LAM) + d["value"]) * d["mask"]


def discounted(d: Batch) -> Tensor:
    found, later = [], torch.zeros_like(d["reward"][:, 0])
    for r, here in zip(reversed(d["reward"].unbind(1)), reversed(d["on"].unbind(1)), strict=True):
        later = torch.where(here, r + GAMMA * later, later)
        found.append(later)
    return torch.stack(found[::-1], 1) * d["mask"]


def reinforce_pp(d: Batch) -> Tensor:
    return whiten(discounted(d), d["mask"])


def to_go(d: Batch) -> Tensor:
    return (d["reward"] * d["mask"]).flip(1).cumsum(1).flip(1)


def remax(d: Batch) -> Tensor:
    return (to_go(d) - d["greedy"][:, None]) * d["mask"]


def optimal_token_baseline(d: Batch) -> Tensor:
    mask = d["mask"]
    energy = 1 - 2 * d["old"].exp() + d["sum_pi_squared"]
    returns, weight = to_go(d) * mask, (energy * mask).cumsum(1) * mask
    # The k-th action of every member of a group is one cell.
    cell = (d["group"][:, None] * mask.shape[1] + (mask.cumsum(1).long() - 1).clamp(min=0)).ravel()

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(x.numel()).index_add_(0, cell, x.ravel())[cell].reshape(x.shape)

    divisor = total(weight)
    baseline = torch.where(total(mask) > 1, total(returns * weight) / divisor.clamp(min=1e-30), returns)
    return (returns - baseline) * mask


def bi_level_gae(d: Batch) -> Tensor:
    ends, mask = turn_ends(d), d["mask"]
    value, reward = turn_table(d["value"] * ends, d), turn_table(d["reward"] * mask, d)
    found, later, next_value = [], torch.zeros_like(value[:, 0]), torch.zeros_like(value[:, 0])
    for k in reversed(range(value.shape[1])):
        here = d["exists"][:, k]
        advantage = reward[:, k] + TURN_GAMMA * next_value - value[:, k] + TURN_GAMMA * later
        later, next_value = torch.where(here, advantage, later), torch.where(here, value[:, k], next_value)
        found.append(later + value[:, k])
    target = torch.stack(found[::-1], 1).gather(1, d["turn"])
    tokens, later, next_value = [], torch.zeros_like(value[:, 0]), torch.zeros_like(value[:, 0])
    for g, v, here, end in zip(*(reversed(x.unbind(1)) for x in (target, d["value"], d["on"], ends)), strict=True):
        inside = torch.where(end, g - v, GAMMA * next_value - v + GAMMA * LAM * later)
        later, next_value = torch.where(here, inside, later), torch.where(here, v, next_value)
        tokens.append(later)
    return torch.stack(tokens[::-1], 1) * mask


def v_trace(d: Batch) -> Tensor:
    ratio = (d["old"] - d["rollout"]).clamp(-20, 20).exp()
    clipped = ratio.clamp(max=1)
    found, error, next_value = [], torch.zeros_like(ratio[:, 0]), torch.zeros_like(ratio[:, 0])
    columns = (reversed(x.unbind(1)) for x in (d["reward"], d["value"], clipped, d["on"]))
    for r, v, c, here in zip(*columns, strict=True):
        q = r + GAMMA * (next_value + LAM * error)
        found.append(c * (q - v))
        error = torch.where(here, c * (r + GAMMA * next_value - v) + GAMMA * LAM * c * error, error)
        next_value = torch.where(here, v, next_value)
    return torch.stack(found[::-1], 1) * d["mask"]


def n_step_return(d: Batch) -> Tensor:
    """The steps of a row are moved together, shifted n times, and moved back."""
    on = d["on"]
    order = torch.argsort(~on, dim=1, stable=True)
    count = on.sum(1, keepdim=True)
    reward, value = d["reward"].gather(1, order), d["value"].gather(1, order)
    at = torch.arange(on.shape[1])
    step = at < count
    reward, value = reward * step, value * step
    total, pad = torch.zeros_like(reward), torch.nn.functional.pad
    for i in range(min(N_STEPS, on.shape[1])):
        total += GAMMA**i * pad(reward, (-i, i))
    total += GAMMA**N_STEPS * pad(value, (-N_STEPS, N_STEPS))
    return torch.zeros_like(total).scatter_(1, order, total) * d["mask"]


CREDIT: dict[str, Callable[[Batch], Tensor]] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
    "max_rl": max_rl,
    "gpg": gpg,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "optimal_token_baseline": optimal_token_baseline,
    "gigpo": gigpo,
    "mt_grpo": mt_grpo,
    "token_gae": token_gae,
    "turn_gae": turn_gae,
    "bi_level_gae": bi_level_gae,
    "v_trace": v_trace,
    "n_step_return": n_step_return,
    "lambda_return": lambda_return,
}
