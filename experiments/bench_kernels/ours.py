"""The half of the benchmark that is this package: the kernels on the same arrays, jitted.

python -m experiments.bench_kernels.ours ARRAYS.npz
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from agentrl_jax.kernels import (
    baselines,
    correction,
    covariance,
    gae,
    group,
    kl,
    policy_loss,
    reduce,
    returns,
    sequence_loss,
    turns,
    value_loss,
    vtrace,
    whiten,
)
from experiments.bench_kernels.batch import GAMMA, HORIZON, LAM, N_STEPS, TOP, TURN_GAMMA, USUAL_CREDIT, USUAL_LOSS, Arrays
from experiments.bench_kernels.serve import serve

Batch = dict[str, Array]
D = SimpleNamespace


# Credit


def outcome(d: D) -> Array:
    return jnp.sum(jnp.where(d.mask, d.reward, 0.0), 1)


def on_tokens(x: Array, d: D) -> Array:
    return jnp.where(d.mask, x[:, None], 0.0)


def relative(reward: Array, d: D, **options: Any) -> Array:
    return group.group_relative(reward, d.group, everyone(d), **options)


def length(d: D) -> Array:
    return jnp.sum(d.mask, 1, dtype=jnp.float32)


def spread_turns(x: Array, d: D) -> Array:
    return turns.to_tokens(x, d.mask, units_of_rows(d), d.turn)


def units_of_rows(d: D) -> Array:
    return jnp.broadcast_to(jnp.arange(d.mask.shape[0], dtype=jnp.int32)[:, None], d.mask.shape)


def everyone(d: D) -> Array:
    return jnp.ones(d.group.shape, bool)


SAMPLE: dict[str, Any] = {"std": "sample", "eps": 1e-6}
WHITE: dict[str, Any] = {"divisor": "sample", "eps": 1e-8, "eps_in": "variance"}


def gdpo(d: D) -> Array:
    present = jnp.ones(d.parts.shape, bool)
    white = {"divisor": "sample", "whiten_eps": 1e-8, "whiten_eps_in": "variance"}
    return on_tokens(baselines.gdpo(d.parts, jnp.ones(2), d.group, present, **SAMPLE, count=length(d), **white), d)


def reinforce_pp(d: D) -> Array:
    found = returns.discounted_return(d.reward, d.mask, discount=GAMMA, off_step="drop")
    return whiten.whiten(found, d.mask, **WHITE)


def reinforce_pp_baseline(d: D) -> Array:
    centred = relative(outcome(d), d, std="none")
    return on_tokens(whiten.whiten(centred, everyone(d), count=length(d), **WHITE), d)


def optimal_token_baseline(d: D) -> Array:
    to_go = returns.discounted_return(d.reward, d.mask, off_step="drop")
    return baselines.optimal_token_baseline(to_go, baselines.score_energy(d.old, d.sum_pi_squared), d.mask, d.group)


def gigpo(d: D) -> Array:
    reward = jnp.where(d.exists, d.turn_reward, 0.0)
    to_go = group.turn_returns(reward, d.exists, gamma=TURN_GAMMA)
    return spread_turns(group.gigpo(jnp.sum(reward, 1), to_go, d.group, d.state, d.exists, everyone(d), **SAMPLE), d)


def mt_grpo(d: D) -> Array:
    own = jax.vmap(lambda r: relative(r, d, **SAMPLE), 1, 1)(d.turn_reward)
    return spread_turns(turns.mt_grpo(own, relative(outcome(d), d, **SAMPLE), d.exists, weight=0.5), d)


def turn_gae(d: D) -> Array:
    value = turns.to_turns(d.value, d.mask, units_of_rows(d), d.turn, shape=d.exists.shape, take="first")
    found = gae.gae(d.turn_reward, value, d.exists, discount=GAMMA, lam=LAM, off_step="drop")
    return spread_turns(found.advantages, d)


def bi_level_gae(d: D) -> Array:
    return turns.bi_level_gae(
        d.reward, d.value, d.mask, d.turn, discount=GAMMA, lam=LAM, turn_discount=TURN_GAMMA, turn_lam=1.0, value_at="last"
    ).advantages


def v_trace(d: D) -> Array:
    ratio = policy_loss.masked_log_ratio(d.old, d.rollout, d.mask)
    return vtrace.vtrace(ratio, d.reward, d.value, d.mask, discount=GAMMA, lam=LAM, off_step="drop").advantages


TIMED: dict[str, Any] = {"discount": GAMMA, "off_step": "drop"}

CREDIT: dict[str, Callable[[D], Array]] = {
    "grpo": lambda d: on_tokens(relative(outcome(d), d, **SAMPLE), d),
    "rloo": lambda d: on_tokens(relative(outcome(d), d, baseline="leave_one_out", std="none"), d),
    "opo": lambda d: on_tokens(relative(outcome(d), d, baseline="length", length=length(d), std="none"), d),
    "pass_at_k": lambda d: on_tokens(baselines.pass_at_k(outcome(d), d.group, everyone(d)), d),
    "gdpo": gdpo,
    "max_rl": lambda d: on_tokens(baselines.max_rl(outcome(d), d.group, everyone(d), eps=1e-6), d),
    "gpg": lambda d: on_tokens(relative(outcome(d), d, std="none") * baselines.gpg_scale(outcome(d), d.group, everyone(d)), d),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": lambda d: on_tokens(
        whiten.whiten(relative(outcome(d), d, std="none"), everyone(d), count=length(d), **WHITE), d
    ),
    "remax": lambda d: baselines.remax(d.reward, d.mask, d.greedy),
    "optimal_token_baseline": optimal_token_baseline,
    "gigpo": gigpo,
    "mt_grpo": mt_grpo,
    "token_gae": lambda d: gae.gae(d.reward, d.value, d.mask, lam=LAM, **TIMED).advantages,
    "turn_gae": turn_gae,
    "bi_level_gae": bi_level_gae,
    "v_trace": v_trace,
    "n_step_return": lambda d: returns.n_step_return(d.reward, d.value, d.mask, n=N_STEPS, **TIMED),
    "lambda_return": lambda d: returns.lambda_return(d.reward, d.value, d.mask, lam=LAM, **TIMED),
}


# Losses


def hidden(x: Array, d: D) -> Array:
    return jnp.where(d.mask, x, 0.0)


def ratio(new: Array, old: Array, d: D) -> Array:
    return policy_loss.masked_log_ratio(new, old, d.mask)


def reduced(loss: Array, d: D, **options: Any) -> Array:
    return reduce.weighted_sum(loss, reduce.token_weights(d.mask, **options))


def ppo(new: Array, d: D, **options: Any) -> Array:
    return policy_loss.ppo_clip(ratio(new, d.old, d), d.advantage, **options)


def gspo(new: Array, d: D) -> Array:
    return reduced(sequence_loss.gspo(ratio(new, d.old, d), d.advantage, d.mask, None), d, reduction="episode")


def gmpo(new: Array, d: D) -> Array:
    return reduced(sequence_loss.gmpo(ratio(new, d.old, d), d.advantage, d.mask, None), d, reduction="episode")


def topr(new: Array, d: D) -> Array:
    of = sequence_loss.sequence_log_ratio(ratio(new, d.old, d), d.mask, None, average=False, clamp=(-20.0, 20.0))
    return reduced(policy_loss.topr(hidden(new, d), of, d.advantage, jnp.broadcast_to(d.positive[:, None], d.mask.shape)), d)


def dppo(new: Array, d: D) -> Array:
    new = hidden(new, d)
    keep = policy_loss.in_trust_region(new, hidden(d.old, d), d.advantage, low=0.1, high=0.1)
    return reduced(policy_loss.dppo(new, ratio(new, d.old, d), d.advantage, keep), d)


def decoupled_ppo(new: Array, d: D) -> Array:
    weight = correction.importance_weight(ratio(d.proximal, d.rollout, d), d.mask, upper=5.0)
    return reduced(policy_loss.decoupled_ppo(ratio(new, d.proximal, d), d.advantage, weight), d)


def kl_cov(new: Array, d: D) -> Array:
    value = covariance.covariance(new, d.advantage, d.mask)
    top = covariance.most_covariant(value, d.mask, covariance.share(d.mask, TOP))
    return reduced(covariance.kl_cov(ratio(new, d.old, d), d.advantage, top), d)


def clip_cov(new: Array, d: D) -> Array:
    log_ratio = ratio(new, d.old, d)
    candidates = covariance.clip_cov_candidates(log_ratio, new, d.advantage, d.mask)
    return reduced(covariance.clip_cov(log_ratio, d.advantage, covariance.choose(candidates, covariance.share(d.mask, TOP))), d)


def vespo(new: Array, d: D) -> Array:
    return reduced(sequence_loss.vespo(hidden(new, d), ratio(new, d.old, d), d.advantage, d.mask, None), d)


def off_policy(d: D) -> Array:
    return policy_loss.masked_log_ratio(d.old, d.rollout, d.mask, clamp=None)


def corrected(new: Array, weight: Array, d: D) -> Array:
    return reduced(policy_loss.weighted(ppo(new, d), weight), d)


def weight(d: D, **options: Any) -> Array:
    return correction.importance_weight(off_policy(d), d.mask, **options)


def kept(new: Array, keep: Array, d: D) -> Array:
    return reduced(ppo(new, d), d, keep=keep)


def kl_term(new: Array, d: D, estimator: kl.Estimator) -> Array:
    return reduced(kl.kl(ratio(new, d.reference, d), estimator=estimator), d)


LOSSES: dict[str, Callable[[Array, D], Array]] = {
    "reinforce": lambda new, d: reduced(policy_loss.reinforce(hidden(new, d), d.advantage), d),
    "ppo": lambda new, d: reduced(ppo(new, d), d),
    "dual_clip": lambda new, d: reduced(ppo(new, d, dual_clip=3.0), d),
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": lambda new, d: reduced(policy_loss.cispo(hidden(new, d), ratio(new, d.old, d), d.advantage), d),
    "sapo": lambda new, d: reduced(policy_loss.sapo(ratio(new, d.old, d), d.advantage), d),
    "topr": topr,
    "dis": lambda new, d: reduced(policy_loss.dis(hidden(new, d), ratio(new, d.old, d), d.advantage), d),
    "dro": lambda new, d: reduced(policy_loss.dro(hidden(new, d), ratio(new, d.old, d), d.advantage, beta=0.1), d),
    "dppo": dppo,
    "decoupled_ppo": decoupled_ppo,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
    "vespo": vespo,
    "tis_token": lambda new, d: corrected(new, weight(d, upper=2.0), d),
    "tis_sequence": lambda new, d: corrected(new, weight(d, level="sum", upper=2.0), d),
    "tis_geometric": lambda new, d: corrected(new, weight(d, level="mean", upper=2.0), d),
    "icepop": lambda new, d: corrected(new, weight(d, mode="mask", lower=0.5, upper=2.0), d),
    "tis_normalised": lambda new, d: corrected(new, correction.normalised(weight(d, upper=2.0), d.mask), d),
    "opsm": lambda new, d: kept(new, correction.opsm(off_policy(d), d.advantage, d.mask, delta=0.001), d),
    "m2po": lambda new, d: kept(new, correction.m2po(off_policy(d), d.mask), d),
    "kl_k1": lambda new, d: kl_term(new, d, "k1"),
    "kl_k2": lambda new, d: kl_term(new, d, "k2"),
    "kl_k3": lambda new, d: kl_term(new, d, "k3"),
    "value_loss": lambda value, d: reduced(value_loss.value_loss(value, d.target, d.mask, old=d.value, clip=0.2), d),
    "mean_of_episodes": lambda new, d: reduced(ppo(new, d), d, reduction="episode"),
    "mean_of_groups": lambda new, d: reduced(ppo(new, d), d, reduction="group", group=d.group),
    "mean_by_horizon": lambda new, d: reduced(ppo(new, d), d, reduction="constant", horizon=float(HORIZON)),
    "sum_of_episodes": lambda new, d: reduced(ppo(new, d), d, reduction="episode_sum"),
}


def load(arrays: Arrays) -> Batch:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def rule(name: str, batch: Batch) -> Callable[[], list[Array]]:
    """A function without arguments that gives the advantages, the loss and its gradient, and waits for them."""
    credit, loss = CREDIT.get(name, CREDIT[USUAL_CREDIT]), LOSSES.get(name, LOSSES[USUAL_LOSS])

    @jax.jit
    def run(d: Batch) -> list[Array]:
        advantage = credit(D(**d))
        x = d["new_value" if name == "value_loss" else "new"]
        return [advantage, *jax.value_and_grad(loss)(x, D(**d, advantage=advantage))]

    return lambda: jax.block_until_ready(run(batch))


def to_numpy(outputs: list[Array]) -> list[NDArray[Any]]:
    return [np.asarray(x) for x in outputs]


if __name__ == "__main__":
    serve(sys.argv[1], load, rule, to_numpy)
