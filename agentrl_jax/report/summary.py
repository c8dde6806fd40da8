"""Episodes to numbers: how they ended, what went wrong in them, what they earned."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from agentrl_jax.data.episode import Ending, Episode
from agentrl_jax.report.audit import decompose

ERRORS = ("parse_errors", "tool_errors", "tool_timeouts")
"""Counters that are reported even where they are 0."""


def wilson(successes: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a success rate, 95 % by default; (0, 1) where nothing was tried.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), see Wilson 1927, doi 10.1080/01621459.1927.10502953.

    >>> wilson(8, 10)
    (0.490..., 0.943...)
    """
    if n == 0:
        return 0.0, 1.0
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(episodes: Sequence[Episode], phase: str = "rollout") -> dict[str, float]:
    """Named metrics of some episodes; `phase` is "rollout" or "eval". What cannot be known is left out, never 0.

    The `ending/*` counts sum to the number of episodes. Reward is taken over the usable episodes, success over those of them
    of which the verifier knows it; lengths, counters and time shares over all. `share/*` sum to 1.
    """
    values: dict[str, float] = {"episodes": len(episodes)}
    endings = Counter(episode.ending for episode in episodes)
    values |= {f"ending/{ending.value}": endings[ending] for ending in Ending}

    counts: defaultdict[str, float] = defaultdict(float, dict.fromkeys(ERRORS, 0.0))
    seconds: defaultdict[str, float] = defaultdict(float)
    for episode in episodes:
        for name, value in episode.counters.items():
            counts[name] += value
        for name, value in episode.timings.items():
            seconds[name] += value
    values |= {f"count/{name}": count for name, count in counts.items()}
    if total := sum(seconds.values()):
        values |= {f"share/{name}": value / total for name, value in seconds.items()}

    outcomes = [episode.outcome for episode in episodes if episode.usable and episode.outcome is not None]
    successes = [outcome.true_success for outcome in outcomes if outcome.true_success is not None]
    values |= {"usable": len(outcomes), "graded": len(successes), "tampered": sum(bool(o.tampering) for o in outcomes)}
    if successes:
        values["success"] = float(np.mean(successes))
    if outcomes:
        rewards = np.array([outcome.reward for outcome in outcomes])
        values |= {"reward": float(rewards.mean()), "reward_std": float(rewards.std()), **decompose(outcomes)}
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.components):
        values[f"component/{name}"] = float(np.mean([o.components[name] for o in outcomes if name in o.components]))

    if episodes:
        values["turns"] = float(np.mean([len(e.turns) for e in episodes]))
        values["tokens"] = float(np.mean([sum(map(len, e.segments)) for e in episodes]))
        values["sampled_tokens"] = float(np.mean([e.policy_tokens for e in episodes]))
    if turns := [turn for episode in episodes for turn in episode.turns]:
        values["invalid_turns"] = float(np.mean([not turn.valid for turn in turns]))
    return {f"{phase}/{name}": float(value) for name, value in values.items()}
