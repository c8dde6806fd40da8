"""Is the reward earned by solving the task? What each kind of episode earns, and an alarm where reward rises without true success.

A verifier that can be passed without solving the task pays for three things:

    reward = true fixes + wrong fixes that slip through + tampering that slips through

Each part is the reward of its episodes, summed and divided by the number of all usable ones, so that the parts add up to the mean reward;
where rewards are 0 or 1, a part is a share of the episodes. `missed` is what true fixes were not given, and closes the account:

    reward - success = wrong + tampering - missed        where the verifier knows of every episode whether it succeeded
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.data.episode import Outcome

logger = logging.getLogger(__name__)

PARTS = ("true", "wrong", "tampering", "ungraded")
"""Kinds of episodes: succeeded; did not; tampered, and is not known to have succeeded; neither is known."""

ALARM = "rollout/audit/alarm"
SHORTEST = 24  # steps
SIGMAS = 4.5


def kind(outcome: Outcome) -> str:
    """The one of `PARTS` that an episode belongs to. What was truly solved counts as true, whatever else was done."""
    if outcome.true_success:
        return "true"
    if outcome.tampering:
        return "tampering"
    return "ungraded" if outcome.true_success is None else "wrong"


def decompose(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """`audit/*` of `report.metrics`: mean reward by kind of episode, and what true fixes missed of a reward of 1. {} of nothing.

    Where no episode is graded there is nothing to compare the reward with: {} too.
    """
    if all(outcome.true_success is None for outcome in outcomes):
        return {}
    paid: dict[str, list[float]] = {part: [] for part in PARTS}
    for outcome in outcomes:
        paid[kind(outcome)].append(outcome.reward)
    values = {part: math.fsum(rewards) / len(outcomes) for part, rewards in paid.items()}
    values["missed"] = math.fsum(1 - reward for reward in paid["true"]) / len(outcomes)
    return {f"audit/{name}": value for name, value in values.items()}


@dataclass(frozen=True)
class Rise:
    """Reward rose and true success did not follow: means over the first and the last third of some steps.

    steps:   the first and the last of them
    reward:  mean in either third
    success: mean in either third
    """

    steps: tuple[int, int]
    reward: tuple[float, float]
    success: tuple[float, float]

    def __str__(self) -> str:
        (first, last), (r0, r1), (s0, s1) = self.steps, self.reward, self.success
        return f"steps {first} to {last}: reward rose from {r0:.2f} to {r1:.2f}, true success went from {s0:.2f} to {s1:.2f}"


def rise(steps: Sequence[int], reward: Sequence[float], success: Sequence[float]) -> Rise | None:
    """The alarm at the last of these steps, given the means that each measured: over the whole run, or else its last half, quarter and
    so on down to `SHORTEST` steps, from the first third to the last third

        the reward rose,                                       by more than `SIGMAS` standard errors
        what is earned without success, reward - success, too, by more than `SIGMAS` standard errors
        and true success rose by less than half as much as the reward.

    A standard error is Welch's, from how much the steps of a third differ: that episodes of one step share their tasks is in it. Learning
    honestly, under a verifier that errs at a constant rate, raises success nearly as much as reward. Simulated as in
    tests/report/test_audit.py and looked at after every step: no alarm in 1,200 honest runs of 60 steps of 64 episodes; 2 in 300 of the
    worst kind, 200 steps of 32 episodes that hardly ever succeed, under a verifier that passes 15 % of what is wrong. Tampering that lifts
    the reward from 0.55 to 0.90 over 48 steps of 64 episodes, true success going from 0.30 to 0.35, raised it in 99 runs of 100.
    """
    n = len(steps)
    rewards, gaps = np.asarray(reward, np.float64), np.subtract(reward, success, dtype=np.float64)
    while n >= SHORTEST:
        (r0, r1), paid = _thirds(rewards[-n:])
        (g0, g1), unearned = _thirds(gaps[-n:])
        if paid > SIGMAS and unearned > SIGMAS and g1 - g0 > (r1 - r0) / 2:
            return Rise((steps[-n], steps[-1]), (r0, r1), (r0 - g0, r1 - g1))
        n //= 2
    return None


def _thirds(values: NDArray[np.float64]) -> tuple[tuple[float, float], float]:
    """Mean of the first and of the last third, and how many standard errors the last is above the first."""
    w = len(values) // 3
    first, last = values[:w], values[-w:]
    gain = float(last.mean() - first.mean())
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / w)
    return (float(first.mean()), float(last.mean())), gain / error if error else math.inf * np.sign(gain) if gain else 0.0


class Watch:
    """Follows the steps of a run. `records` are those that were measured before, as `metrics.read` gives them.

    first, latest: alarm that was raised first, and that of the latest step
    """

    def __init__(self, records: Iterable[Mapping[str, float]] = ()) -> None:
        self.first: Rise | None = None
        self.latest: Rise | None = None
        self._steps: list[int] = []
        self._reward: list[float] = []
        self._success: list[float] = []
        for record in records:
            self._add(int(record["step"]), record)

    def see(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """The alarm of this step as a metric, and in the log where it is the run's first; {} while it is too early to tell."""
        quiet = self.first is None
        self._add(step, values)
        if quiet and self.first is not None:
            logger.warning("alarm: the policy may be gaming the verifier: %s", self.first)
        return {} if len(self._steps) < SHORTEST else {ALARM: float(self.latest is not None)}

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        if "rollout/reward" in values and "rollout/success" in values:
            self._steps.append(step)
            self._reward.append(values["rollout/reward"])
            self._success.append(values["rollout/success"])
            self.latest = rise(self._steps, self._reward, self._success)
            self.first = self.first or self.latest
