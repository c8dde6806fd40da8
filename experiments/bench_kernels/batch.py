"""The batch that all sides compute on: what a training step has after rollouts and forward passes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

GROUP, TURNS = 8, 16
GAMMA, LAM, TURN_GAMMA, N_STEPS = 0.99, 0.95, 0.9, 5
TOP = 2e-4  # share of tokens that Clip-Cov and KL-Cov single out
HORIZON = 4096

CREDIT = (
    "grpo",
    "rloo",
    "opo",
    "pass_at_k",
    "gdpo",
    "max_rl",
    "gpg",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "optimal_token_baseline",
    "gigpo",
    "mt_grpo",
    "token_gae",
    "turn_gae",
    "bi_level_gae",
    "v_trace",
    "n_step_return",
    "lambda_return",
)
LOSSES = (
    "reinforce",
    "ppo",
    "dual_clip",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "topr",
    "dis",
    "dro",
    "dppo",
    "decoupled_ppo",
    "kl_cov",
    "clip_cov",
    "vespo",
    "tis_token",
    "tis_sequence",
    "tis_geometric",
    "icepop",
    "tis_normalised",
    "opsm",
    "m2po",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "value_loss",
    "mean_of_episodes",
    "mean_of_groups",
    "mean_by_horizon",
    "sum_of_episodes",
)
RULES = CREDIT + LOSSES
USUAL_CREDIT, USUAL_LOSS = "grpo", "ppo"
"""What goes with a rule of the other kind, for each is measured in a whole: credit, loss and gradient."""
LOOPS = {"reinforce_pp", "token_gae", "bi_level_gae", "v_trace", "lambda_return"}
"""Rules whose PyTorch is a loop over tokens."""


def make(rows: int, width: int, seed: int = 0) -> Arrays:
    """Rows are episodes of 3 to TURNS turns, the longest `width` tokens; in each turn an observation and then what the policy wrote.

    Names are those of the arguments in agentrl_jax.kernels; log-probs are those of the sampled tokens under
    new (being trained) | old (before the update) | rollout (what sampled them) | proximal | reference.
    """
    rng = np.random.default_rng(seed)
    shape = rows, width
    mask, turn, exists = np.zeros(shape, bool), np.zeros(shape, np.int32), np.zeros((rows, TURNS), bool)
    for row in range(rows):
        turns = rng.integers(3, TURNS + 1)
        length = width if row == 0 else rng.integers(width // 2, width + 1)
        parts = rng.dirichlet(np.full(2 * turns, 4.0)) * (length - 2 * turns)
        ends = np.cumsum(np.floor(parts).astype(int) + 1)
        exists[row, :turns] = True
        for k in range(turns):
            mask[row, ends[2 * k] : ends[2 * k + 1]] = True
            turn[row, ends[2 * k - 1] if k else 0 : ends[2 * k + 1]] = k
        turn[row, ends[-1] :] = turns - 1
    last = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    reward = np.where(last, rng.choice([0.0, 0.1, 0.2], shape), 0.0)
    final = width - 1 - np.argmax(mask[:, ::-1], 1)
    reward[np.arange(rows), final] += rng.integers(0, 2, rows)
    group = np.arange(rows, dtype=np.int32) // GROUP
    turn_reward = np.zeros((rows, TURNS))
    np.add.at(turn_reward, (np.broadcast_to(np.arange(rows)[:, None], shape)[mask], turn[mask]), reward[mask])
    # A few states per turn are reached by several episodes of a group.
    state = (group[:, None] * TURNS + np.arange(TURNS)) * 3 + rng.integers(0, 3, (rows, TURNS))
    state = np.unique(state, return_inverse=True)[1].reshape(rows, TURNS)
    old = -rng.exponential(0.7, shape) - 1e-3
    drift = rng.normal(0, 0.002, (rows, 1))
    value = rng.normal(0.5, 0.3, shape)

    def near(x: NDArray[Any], spread: float) -> NDArray[Any]:
        return np.minimum(x + drift + rng.normal(0, spread, shape), -1e-4)

    made = {
        "mask": mask,
        "turn": turn,
        "exists": exists,
        "reward": reward,
        "turn_reward": turn_reward,
        "parts": rng.integers(0, 5, (rows, 2)) / 4,
        "greedy": rng.random(rows),
        "group": group,
        "state": state.astype(np.int32),
        "positive": rng.random(rows) > 0.5,
        "old": old,
        "new": near(old, 0.1),
        "rollout": near(old, 0.2),
        "proximal": near(old, 0.05),
        "reference": near(old, 0.3),
        "sum_pi_squared": np.exp(2 * old) + np.square(1 - np.exp(old)) * rng.random(shape),
        "value": value,
        "new_value": value + rng.normal(0, 0.2, shape),
        "target": rng.normal(0.5, 0.5, shape),
    }
    return {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in made.items()}
