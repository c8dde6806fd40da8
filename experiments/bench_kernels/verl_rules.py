"""Functions of verl (https://github.com/volcengine/verl) for the rules that it has, called as its trainer calls them.

Where a function of verl means another rule by the same name, the benchmark says so and does not count it.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from experiments.bench_kernels.batch import GAMMA, LAM, TOP
from experiments.bench_kernels.torch_credit import Batch, token_mean


class Config(SimpleNamespace):
    """What verl reads of its settings, as attributes or by `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def rules() -> dict[str, Callable[..., Tensor]]:
    from verl.trainer.ppo import core_algos as core

    covariance = Config(clip_cov_ratio=TOP, clip_cov_lb=1.0, clip_cov_ub=5.0, kl_cov_ratio=TOP, ppo_kl_coef=1.0)
    settings = {"clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0, "policy_loss": covariance, "global_batch_info": {}}

    def outcome(function: Callable[..., Any], **options: Any) -> Callable[[Batch], Tensor]:
        return lambda d: function(d["reward"], d["mask"], index=d["group"].numpy().astype(np.int64), **options)[0]

    def loss(name: str, clip: float = 0.2, **changed: Any) -> Callable[[Tensor, Batch], Tensor]:
        config = Config(**{**settings, "clip_ratio": clip, **changed})
        return lambda new, d: core.get_policy_loss_fn(name)(d["old"], new, d["advantage"], d["mask"], config=config)[0]

    def divergence(name: str) -> Callable[[Tensor, Batch], Tensor]:
        return lambda new, d: token_mean(core.kl_penalty(new, d["reference"], name), d)

    return {
        "grpo": outcome(core.compute_grpo_outcome_advantage),
        "rloo": outcome(core.compute_rloo_outcome_advantage),
        "opo": outcome(core.compute_opo_outcome_advantage),
        "pass_at_k": outcome(core.compute_grpo_passk_outcome_advantage, config=Config(norm_adv_by_std_in_grpo=False)),
        "reinforce_pp_baseline": outcome(core.compute_reinforce_plus_plus_baseline_outcome_advantage),
        "reinforce_pp": lambda d: core.compute_reinforce_plus_plus_outcome_advantage(d["reward"], d["mask"], config=Config(gamma=GAMMA))[0],
        "remax": lambda d: core.compute_remax_outcome_advantage(d["reward"], d["greedy"], d["mask"])[0],
        "lambda_return": lambda d: core.compute_gae_advantage_return(d["reward"], d["value"], d["mask"], GAMMA, LAM)[1] * d["mask"],
        "dual_clip": loss("vanilla"),
        "gspo": loss("gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
        "gmpo": loss("geo_mean", 0.4),
        "kl_cov": loss("kl_cov"),
        "kl_k1": divergence("kl"),
        "kl_k2": divergence("mse"),
        "kl_k3": divergence("low_var_kl"),
        "value_loss": lambda value, d: core.compute_value_loss(value, d["target"], d["value"], d["mask"], 0.2)[0],
    }
