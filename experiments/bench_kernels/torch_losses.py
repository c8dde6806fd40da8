"""Losses and corrections in PyTorch, each written from its formula: the log-probs of the tokens (of `value_loss` the critic's values)
and the arrays of a batch in, the loss out.
"""

# pyright: reportMissingImports=false

import math
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.bench_kernels.batch import TOP
from experiments.bench_kernels.torch_credit import Batch, group_sum, row_mean, token_mean


def episode_mean(x: Tensor, d: Batch) -> Tensor:
    return row_mean(x, d["mask"]).mean()


def log_ratio(new: Tensor, old: Tensor, d: Batch) -> Tensor:
    return ((new - old) * d["mask"]).clamp(-20, 20)


def clipped_surrogate(ratio: Tensor, d: Batch, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-d["advantage"] * ratio, -d["advantage"] * ratio.clamp(1 - low, 1 + high))


def ppo_tokens(new: Tensor, d: Batch) -> Tensor:
    return clipped_surrogate(log_ratio(new, d["old"], d).exp(), d)


def scored(new: Tensor, weight: Tensor, d: Batch) -> Tensor:
    return token_mean(-weight.detach() * d["advantage"] * new, d)


def reinforce(new: Tensor, d: Batch) -> Tensor:
    return token_mean(-d["advantage"] * new, d)


def ppo(new: Tensor, d: Batch) -> Tensor:
    return token_mean(ppo_tokens(new, d), d)


def dual_clip(new: Tensor, d: Batch) -> Tensor:
    a, loss = d["advantage"], ppo_tokens(new, d)
    return token_mean(torch.where(a < 0, torch.minimum(loss, -3 * a), loss), d)


def gspo(new: Tensor, d: Batch) -> Tensor:
    ratio = row_mean(log_ratio(new, d["old"], d), d["mask"]).clamp(-20, 20).exp()
    return episode_mean(clipped_surrogate(ratio, d, 3e-4, 4e-4), d)


def gmpo(new: Tensor, d: Batch) -> Tensor:
    x, a, mask = log_ratio(new, d["old"], d), d["advantage"], d["mask"]
    x = torch.where(a > 0, x.clamp(max=0.4), torch.where(a < 0, x.clamp(min=-0.4), 0.0))
    return (-row_mean(a, mask) * row_mean(x, mask).exp()).mean()


def cispo(new: Tensor, d: Batch) -> Tensor:
    return scored(new, log_ratio(new, d["old"], d).exp().clamp(max=1.28), d)


def sapo(new: Tensor, d: Batch) -> Tensor:
    tau = torch.where(d["advantage"] > 0, 1.0, 1.05)
    return token_mean(-d["advantage"] * torch.sigmoid(tau * (log_ratio(new, d["old"], d).exp() - 1)) * 4 / tau, d)


def topr(new: Tensor, d: Batch) -> Tensor:
    ratio = log_ratio(new, d["old"], d).sum(1, keepdim=True).clamp(-20, 20).exp()
    return scored(new, torch.where(d["positive"][:, None], 1.0, ratio.clamp(0, 1)), d)


def dis(new: Tensor, d: Batch) -> Tensor:
    ratio = log_ratio(new, d["old"], d).exp()
    return scored(new, ratio * ((ratio > 0.8) & (ratio < 1.28)), d)


def dro(new: Tensor, d: Batch) -> Tensor:
    return token_mean(-d["advantage"] * new + 0.05 * log_ratio(new, d["old"], d).square(), d)


def dppo(new: Tensor, d: Batch) -> Tensor:
    p, q = new.detach().exp(), d["old"].exp()
    away = torch.where(d["advantage"] > 0, p - q, q - p)
    return scored(new, log_ratio(new, d["old"], d).exp() * (away <= 0.1), d)


def decoupled_ppo(new: Tensor, d: Batch) -> Tensor:
    loss = clipped_surrogate(log_ratio(new, d["proximal"], d).exp(), d)
    return token_mean(loss * log_ratio(d["proximal"], d["rollout"], d).exp().clamp(max=5), d)


def covariance(new: Tensor, d: Batch) -> Tensor:
    new, a = new.detach(), d["advantage"]
    return (new - token_mean(new, d)) * (a - token_mean(a, d))


def kl_cov(new: Tensor, d: Batch) -> Tensor:
    n = max(int(d["mask"].sum().item() * TOP), 1)
    top = covariance(new, d).masked_fill(~d["on"], -torch.inf).ravel().topk(n).indices
    x = log_ratio(new, d["old"], d)
    pulled = torch.zeros_like(x, dtype=torch.bool)
    pulled.view(-1)[top] = True
    return token_mean(torch.where(pulled, x.abs(), 0.0) - d["advantage"] * x.exp(), d)


def clip_cov(new: Tensor, d: Batch) -> Tensor:
    """The first candidates, not random ones, so that both sides draw the same."""
    a, ratio, value = d["advantage"], log_ratio(new, d["old"], d).exp(), covariance(new, d)
    clipped = ((ratio > 1.2) & (a > 0)) | ((ratio < 0.8) & (a < 0))
    n = max(int(d["mask"].sum().item() * TOP), 1)
    drawn = (d["on"] & (value > 1) & (value < 5) & ~clipped).view(-1).nonzero()[:n, 0]
    dropped = torch.zeros_like(ratio, dtype=torch.bool)
    dropped.view(-1)[drawn] = True
    return token_mean(torch.where(dropped, 0.0, clipped_surrogate(ratio, d)), d)


def vespo(new: Tensor, d: Batch) -> Tensor:
    log_w = log_ratio(new, d["old"], d).sum(1, keepdim=True).clamp(math.log(1e-8), 20)
    positive = d["advantage"] >= 0
    k, rate = torch.where(positive, 2.0, 3.0), torch.where(positive, 3.0, 2.0)
    return scored(new, (k * log_w + rate * (1 - log_w.exp())).exp(), d)


# Corrections, on PPO


def corrected(new: Tensor, weight: Tensor, d: Batch) -> Tensor:
    return token_mean(ppo_tokens(new, d) * weight, d)


def off_policy(d: Batch) -> Tensor:
    return (d["old"] - d["rollout"]) * d["mask"]


def tis_token(new: Tensor, d: Batch) -> Tensor:
    return corrected(new, off_policy(d).clamp(-20, 20).exp().clamp(max=2), d)


def tis_sequence(new: Tensor, d: Batch) -> Tensor:
    return corrected(new, off_policy(d).sum(1, keepdim=True).clamp(-20, 20).exp().clamp(max=2), d)


def tis_geometric(new: Tensor, d: Batch) -> Tensor:
    return corrected(new, row_mean(off_policy(d), d["mask"]).clamp(-20, 20).exp().clamp(max=2), d)


def icepop(new: Tensor, d: Batch) -> Tensor:
    ratio = off_policy(d).clamp(-20, 20).exp()
    return corrected(new, torch.where((ratio >= 0.5) & (ratio <= 2), ratio, 0.0), d)


def tis_normalised(new: Tensor, d: Batch) -> Tensor:
    ratio = off_policy(d).clamp(-20, 20).exp().clamp(max=2)
    return corrected(new, ratio / token_mean(ratio, d), d)


def opsm(new: Tensor, d: Batch) -> Tensor:
    return corrected(new, (d["advantage"] >= 0) | (row_mean(-off_policy(d), d["mask"]) <= 0.001), d)


def m2po(new: Tensor, d: Batch) -> Tensor:
    where = d["on"].view(-1).nonzero()[:, 0]
    squares, order = off_policy(d).view(-1)[where].square().sort(stable=True)
    means = squares.cumsum(0, dtype=torch.float64) / torch.arange(1, len(squares) + 1)
    kept = max(int((means < 0.04).sum().item()), 1)
    keep = torch.zeros_like(new)
    keep.view(-1)[where[order[:kept]]] = 1
    return corrected(new, keep, d)


# KL, values, reductions


def kl_k1(new: Tensor, d: Batch) -> Tensor:
    return token_mean(new - d["reference"], d)


def kl_k2(new: Tensor, d: Batch) -> Tensor:
    return token_mean(0.5 * (new - d["reference"]).square(), d)


def kl_k3(new: Tensor, d: Batch) -> Tensor:
    x = log_ratio(new, d["reference"], d)
    return token_mean((-x).exp() + x - 1, d)


def value_loss(value: Tensor, d: Batch) -> Tensor:
    old, target = d["value"], d["target"]
    near = old + (value - old).clamp(-0.2, 0.2)
    return token_mean(0.5 * torch.maximum((value - target).square(), (near - target).square()), d)


def mean_of_episodes(new: Tensor, d: Batch) -> Tensor:
    return episode_mean(ppo_tokens(new, d), d)


def mean_of_groups(new: Tensor, d: Batch) -> Tensor:
    lengths = d["mask"].sum(1)
    groups = len(torch.unique(d["group"]))
    return ((ppo_tokens(new, d) * d["mask"]).sum(1) / group_sum(lengths, d["group"])).sum() / groups


def mean_by_horizon(new: Tensor, d: Batch) -> Tensor:
    return (ppo_tokens(new, d) * d["mask"]).sum() / (len(new) * 4096)


def sum_of_episodes(new: Tensor, d: Batch) -> Tensor:
    return (ppo_tokens(new, d) * d["mask"]).sum(1).mean()


LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    rule.__name__: rule
    for rule in (
        *(reinforce, ppo, dual_clip, gspo, gmpo, cispo, sapo, topr, dis, dro, dppo, decoupled_ppo, kl_cov, clip_cov, vespo),
        *(tis_token, tis_sequence, tis_geometric, icepop, tis_normalised, opsm, m2po),
        *(kl_k1, kl_k2, kl_k3, value_loss, mean_of_episodes, mean_of_groups, mean_by_horizon, sum_of_episodes),
    )
}
