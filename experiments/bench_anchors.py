"""Speed of grouping states by similarity, for GiGPO's anchors: 2,000 states of 500 tokens in 8 groups.

    python -m experiments.bench_anchors

Each group has 25 places; a state is the text of its place with some tokens changed, few enough that most visits meet. Timed are

    lcs         `anchor_groups`, the longest common subsequence in batches of rapidfuzz
    pairs       the same rule in a Python loop, one call of rapidfuzz for each pair; it must give the same groups
    difflib     `anchor_groups` with difflib's ratio, the rule of the paper's public code; other groups, by its nature

Ten seconds, one thread.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq

from agentrl_jax.data.anchors import anchor_groups

GROUPS, PLACES, VISITS, TOKENS, VOCABULARY = 8, 25, 10, 500, 5000
THRESHOLD = 0.9


def make(seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """States in the order of a rollout, and the group of each."""
    rng = np.random.default_rng(seed)
    states, group = [], []
    for number in range(GROUPS):
        texts = rng.integers(0, VOCABULARY, (PLACES, TOKENS))
        for place in rng.permutation(np.repeat(np.arange(PLACES), VISITS)):
            changed = rng.random(TOKENS) < rng.uniform(0, 0.08)
            states.append(np.where(changed, rng.integers(0, VOCABULARY, TOKENS), texts[place]).tolist())
            group.append(number)
    return states, group


def pairs(states: list[list[int]], group: list[int]) -> NDArray[np.int32]:
    """The definition: join the first cluster of the group whose first member is similar enough, or found one."""
    clusters: dict[int, list[tuple[int, list[int]]]] = {}
    found: list[int] = []
    count = 0
    for state, label in zip(states, group, strict=True):
        mine = clusters.setdefault(label, [])
        for number, first in mine:
            if 2 * LCSseq.similarity(state, first) > THRESHOLD * (len(state) + len(first)):
                found.append(number)
                break
        else:
            mine.append((count, state))
            found.append(count)
            count += 1
    return np.array(found, np.int32)


def timed(name: str, call: Callable[[], NDArray[np.int32]]) -> tuple[float, NDArray[np.int32]]:
    start = time.perf_counter()
    found = call()
    seconds = time.perf_counter() - start
    print(f"{name:10} {seconds:8.2f} s   {found.max() + 1:5,} groups", flush=True)
    return seconds, found


def main() -> int:
    states, group = make()
    print(f"{len(states):,} states of {TOKENS} tokens in {GROUPS} groups")
    ours, found = timed("lcs", lambda: anchor_groups(states, group, similarity="lcs", threshold=THRESHOLD))
    loop, expected = timed("pairs", lambda: pairs(states, group))
    other, _ = timed("difflib", lambda: anchor_groups(states, group, similarity="difflib", threshold=THRESHOLD))
    print(f"lcs is {loop / ours:.1f} times as fast as the loop over pairs, {other / ours:.1f} times as fast as difflib")
    if (found != expected).any():
        print("lcs and pairs give different groups")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
