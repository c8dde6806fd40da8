"""Valid episodes for tests: `make_episode` for one of a given make, `episodes()` and `batches()` for any (hypothesis)."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Span, Turn, digest

OTHERS = [author for author in Author if author is not Author.POLICY]


def observed(tokens, turn=0, author=Author.ENVIRONMENT) -> Span:
    """A span that the policy did not write."""
    return Span(author, turn, np.asarray(tokens, np.int32))


def sampled(
    before: Sequence[Span], tokens, turn=0, *, logprobs=None, versions=0, temperature=1.0, finish_reason="stop", kv="recomputed"
) -> Span:
    """A policy span that was sampled after the spans `before` of its segment."""
    tokens = np.asarray(tokens, np.int32)
    n = len(tokens)
    prompt = np.concatenate([span.tokens for span in before]) if before else np.zeros(0, np.int32)
    return Span(
        Author.POLICY,
        turn,
        tokens,
        logprobs=np.full(n, -0.5, np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        versions=np.broadcast_to(np.asarray(versions, np.int32), n),
        prompt_digest=digest(prompt),
        temperature=temperature,
        finish_reason=finish_reason,
        kv=kv,
    )


def make_episode(
    episode_id="e0",
    *,
    group="g0",
    reward: float | None = 1.0,
    turns=2,
    prompt=5,
    action=3,
    observation=4,
    segments=1,
    ending=Ending.SUBMITTED,
    states: Sequence[str | None] = (),
    turn_rewards: Sequence[float | None] = (),
    components=None,
    version=0,
    temperature=1.0,
    step=0,
    seed=0,
    vocabulary=50,
) -> Episode:
    """An episode of `turns` turns, dealt evenly over `segments` segments; random ids and log-probs by `seed`.

    Each turn is `action` policy tokens, answered by `observation` tokens but in the last turn of a segment. Each segment begins with
    `prompt` tokens: the task, later a copy of it. `reward` None means no outcome.
    """
    rng = np.random.default_rng(seed)

    def ids(n):
        return rng.integers(0, vocabulary, n, dtype=np.int32)

    made = []
    for s, members in enumerate(np.array_split(np.arange(turns), segments)):
        first = int(members[0]) if len(members) else 0
        spans = [observed(ids(prompt), first, Author.COPY if s else Author.TASK)]
        for turn in members.tolist():
            logprobs = -rng.exponential(1.0, action).astype(np.float32)
            spans.append(sampled(spans, ids(action), turn, logprobs=logprobs, versions=version, temperature=temperature))
            if turn != members[-1]:
                spans.append(observed(ids(observation), turn))
        made.append(Segment(tuple(spans)))
    per_turn = [Turn(turn_rewards[k] if k < len(turn_rewards) else None, states[k] if k < len(states) else None) for k in range(turns)]
    return Episode(
        id=episode_id,
        task=f"task-{group}",
        group=group,
        seed=seed,
        step=step,
        segments=tuple(made),
        turns=tuple(per_turn),
        ending=ending,
        outcome=None if reward is None or ending.infrastructure else Outcome(reward, components or {}),
    )


finite = st.floats(-1e6, 1e6, width=32)


@st.composite
def _segment(draw, first, last):
    """A segment of turns first..last, starting with something the policy did not write."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    turns = sorted(draw(st.lists(st.integers(first, last), max_size=5)))
    spans = [observed(rng.integers(0, 2**31 - 1, draw(st.integers(1, 6)), dtype=np.int32), first, draw(st.sampled_from(OTHERS)))]
    for turn in turns:
        n = draw(st.integers(0, 5))
        tokens = rng.integers(0, 2**31 - 1, n, dtype=np.int32)
        if draw(st.booleans()):
            spans.append(
                sampled(
                    spans,
                    tokens,
                    turn,
                    logprobs=-rng.exponential(1.0, n),
                    versions=rng.integers(0, 5, n),
                    temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
                    finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                    kv=draw(st.sampled_from(["recomputed", "stale"])),
                )
            )
        else:
            spans.append(observed(tokens, turn, draw(st.sampled_from(OTHERS))))
    return Segment(tuple(spans))


@st.composite
def episodes(draw, episode_id="e0", groups=("g0", "g1"), max_step=5):
    """Any valid episode: any ending, with or without reward, any authors, empty spans, several segments, turns without tokens."""
    names = st.text(max_size=8)
    ending = draw(st.sampled_from(Ending))
    turns = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, turns - 1), max_size=2)))
    bounds = [0, *cuts, turns - 1]
    segments = tuple(draw(_segment(a, b)) for a, b in pairwise(bounds))
    outcome = st.builds(
        Outcome,
        reward=finite,
        components=st.dictionaries(names, finite, max_size=2),
        true_success=st.sampled_from([None, True, False]),
        tampering=st.lists(names, max_size=2).map(tuple),
    )
    return Episode(
        id=episode_id,
        task=draw(names),
        group=draw(st.sampled_from(groups)),
        seed=draw(st.integers(0, 2**63 - 1)),
        step=draw(st.integers(0, max_step)),
        segments=() if ending.infrastructure and draw(st.booleans()) else segments,
        turns=tuple(
            draw(st.builds(Turn, reward=st.none() | finite, state=st.sampled_from([None, "s", "t", "u"]), valid=st.booleans()))
            for _ in range(turns)
        ),
        ending=ending,
        outcome=None if ending.infrastructure else draw(st.none() | outcome),
        counters=draw(st.dictionaries(names, st.integers(0, 2**40), max_size=2)),
        timings=draw(st.dictionaries(names, finite, max_size=2)),
    )


@st.composite
def batches(draw, max_size=6):
    """A list of valid episodes with ids of their own."""
    return [draw(episodes(f"e{i}")) for i in range(draw(st.integers(0, max_size)))]
