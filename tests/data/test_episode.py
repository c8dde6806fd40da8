import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Span, Turn, digest
from tests.data.strategies import OTHERS, episodes, make_episode, observed, sampled

PROMPT = observed([1, 2, 3], author=Author.TASK)
ACTION = sampled([PROMPT], [4, 5])


def i32(*values):
    return np.array(values, np.int32)


def policy(**changes):
    return lambda: replace(ACTION, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: observed([1], turn=-1), "span of turn -1: turns count from 0"),
        (lambda: Span(Author.TASK, 0, np.array([1])), r"tokens must be i32\[n\], got int64\[1\]"),
        (lambda: Span(Author.TASK, 0, i32([1])), r"tokens must be i32\[n\], got int32\[1, 1\]"),
        (lambda: observed([3, -1]), "negative token id"),
        (policy(logprobs=None), "POLICY span of turn 0: logprobs must be given"),
        (policy(versions=None), "POLICY span of turn 0: versions must be given"),
        (policy(author=Author.ENVIRONMENT), "ENVIRONMENT span of turn 0: logprobs must be None"),
        (lambda: Span(Author.COPY, 0, i32(1), versions=i32(0)), "COPY span of turn 0: versions must be None"),
        (lambda: Span(Author.COPY, 0, i32(1), temperature=1.0), "COPY span of turn 0: temperature must be None"),
        (lambda: Span(Author.COPY, 0, i32(1), finish_reason="stop"), "COPY span of turn 0: finish_reason must be None"),
        (lambda: Span(Author.COPY, 0, i32(1), prompt_digest=b"12345678"), "COPY span of turn 0: prompt_digest must be None"),
        (policy(logprobs=np.zeros(3, np.float32)), r"logprobs must be float32\[2\] like its tokens, got float32\[3\]"),
        (policy(logprobs=np.zeros(2)), r"logprobs must be float32\[2\] like its tokens, got float64\[2\]"),
        (policy(versions=i32(1)), r"versions must be int32\[2\] like its tokens, got int32\[1\]"),
        (policy(logprobs=np.array([-1, np.nan], np.float32)), "a log-prob is not finite or above 0; that is an engine failure"),
        (policy(logprobs=np.array([-1, -np.inf], np.float32)), "a log-prob is not finite or above 0; that is an engine failure"),
        (policy(logprobs=np.array([-1, 0.5], np.float32)), "a log-prob is not finite or above 0; that is an engine failure"),
        (policy(versions=i32(0, -1)), "negative weight version"),
        (policy(prompt_digest=None), "POLICY span of turn 0: prompt_digest must be given"),
        (policy(temperature=None), "POLICY span of turn 0: temperature must be given"),
        (policy(finish_reason=None), "POLICY span of turn 0: finish_reason must be given"),
        (policy(temperature=-0.5), "temperature must be finite and at least 0, got -0.5"),
        (policy(temperature=float("nan")), "temperature must be finite and at least 0, got nan"),
        (policy(finish_reason="tired"), "finish_reason must be one of stop, length, abort, got 'tired'"),
        (policy(kv="warm"), "kv must be one of recomputed, stale, got 'warm'"),
        (lambda: Segment(()), "a segment needs at least one token"),
        (lambda: Segment((observed([]),)), "a segment needs at least one token"),
        (lambda: Segment((observed([1], turn=1), observed([2], turn=0))), "turns must not decrease along a segment"),
        (lambda: Segment((sampled([], [4]),)), "a segment cannot start with a policy token: there is nothing to predict it from"),
        (lambda: Segment((observed([]), sampled([], [4]))), "a segment cannot start with a policy token"),
        (lambda: Segment((PROMPT, observed([9]), ACTION)), "the prompt it was sampled from is not the concatenation of the earlier spans"),
        (lambda: Turn(reward=float("nan")), "turn reward must be finite or None, got nan"),
        (lambda: Outcome(float("nan")), "outcome: reward must be finite, got nan; a missing reward is no Outcome at all"),
        (lambda: Outcome(1.0, {"tests": float("inf")}), "outcome: component 'tests' must be finite, got inf"),
    ],
)
def test_a_part_that_is_not_valid_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def segment(turn):
    prompt = observed([1], turn)
    return Segment((prompt, sampled([prompt], [2], turn)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ending": Ending.SANDBOX_FAILED}, "episode e0: ended by sandbox_failed, so it can have no outcome"),
        ({"segments": ()}, "episode e0: no segment"),
        ({"turns": (Turn(),)}, "episode e0: a span of turn 1, but only 1 turns"),
        ({"turns": (), "segments": (segment(0),)}, "episode e0: a policy span, but no turns"),
        (
            {"segments": (segment(1), segment(0))},
            r"episode e0: segments must be in the order they were sampled in, got policy turns \[1, 0\]",
        ),
    ],
)
def test_an_episode_that_is_not_valid_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(make_episode(), **changes)


def test_an_infrastructure_failure_may_come_before_the_first_token():
    episode = replace(make_episode(), ending=Ending.SANDBOX_FAILED, outcome=None, segments=(), turns=())
    assert not episode.usable
    waiting = replace(episode, segments=(Segment((PROMPT,)),))
    assert not waiting.usable


def test_rounded_up_logprobs_of_certain_tokens_are_data():
    assert policy(logprobs=np.array([0, 5e-5], np.float32))().logprobs is not None


@given(episodes())
def test_token_in_token_out(episode):
    """The prompt of each policy span is exactly what its segment held before: a changed, dropped or moved token is refused."""
    for part in episode.segments:
        before = np.zeros(0, np.int32)
        for i, span in enumerate(part.spans):
            if span.author is Author.POLICY:
                assert span.prompt_digest == digest(before)
                earlier = part.spans[:i]
                for k, other in enumerate(earlier):
                    if other.author is not Author.POLICY and len(other.tokens):
                        tokens = other.tokens.copy()
                        tokens[-1] ^= 1
                        changed = (*part.spans[:k], replace(other, tokens=tokens), *part.spans[k + 1 :])
                        with pytest.raises(ValueError, match="not the concatenation of the earlier spans"):
                            Segment(changed)
            before = np.concatenate([before, span.tokens])
        assert part.tokens.tolist() == before.tolist()
        assert len(part) == len(part.tokens) == len(part.mask)


@given(episodes())
def test_the_mask_is_who_wrote_it(episode):
    for part in episode.segments:
        written = [span.author is Author.POLICY for span in part.spans for _ in span.tokens]
        assert part.mask.tolist() == written
    assert episode.policy_tokens == sum(int(part.mask.sum()) for part in episode.segments)


@given(episodes())
def test_usable_is_the_policys_own_ending_with_a_reward_and_a_token(episode):
    assert episode.usable == (episode.outcome is not None and not episode.ending.infrastructure and episode.policy_tokens > 0)
    assert episode.reward == (None if episode.outcome is None else episode.outcome.reward)


def test_endings_are_the_policys_or_the_infrastructures():
    limits = {Ending.CONTEXT_LIMIT, Ending.TURN_LIMIT, Ending.TOKEN_LIMIT, Ending.TIME_LIMIT}
    infrastructure = {Ending.SANDBOX_FAILED, Ending.INFERENCE_FAILED, Ending.GRADER_FAILED, Ending.CANCELLED}
    assert {e for e in Ending if e.limit} == limits
    assert {e for e in Ending if e.infrastructure} == infrastructure
    assert set(Ending) == limits | infrastructure | {Ending.SUBMITTED}


def test_a_copied_summary_is_not_trained_again():
    prompt = observed([1, 2], author=Author.TASK)
    summary = sampled([prompt], [7, 8, 9])
    first = Segment((prompt, summary))
    copied = observed(summary.tokens, turn=1, author=Author.COPY)
    second = Segment((copied, sampled([copied], [3], turn=1)))
    episode = Episode("e", "t", "g", 0, 0, (first, second), (Turn(), Turn()), Ending.SUBMITTED, Outcome(1.0))
    assert [s.mask.tolist() for s in episode.segments] == [[False] * 2 + [True] * 3, [False] * 3 + [True]]
    assert episode.policy_tokens == 4


def test_a_record_owns_its_arrays():
    buffer = i32(1, 2, 3, 4)
    span = Span(Author.TASK, 0, buffer[:3])
    buffer[:] = 9
    assert span.tokens.tolist() == [1, 2, 3]
    buffer[0] = 5  # the caller's buffer is still the caller's
    part = Segment((span, sampled([span], [4])))
    policy_span = part.spans[1]
    for array in (span.tokens, policy_span.tokens, policy_span.logprobs, policy_span.versions, part.tokens, part.mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@given(episodes())
def test_episodes_are_equal_by_value_and_survive_pickling(episode):
    again = pickle.loads(pickle.dumps(episode))
    assert again == episode
    assert [hash(s) for part in again.segments for s in part.spans] == [hash(s) for part in episode.segments for s in part.spans]


@given(st.sampled_from(OTHERS))
def test_spans_differ_by_any_bit(author):
    assert observed([1], author=author) == observed([1], author=author)
    assert observed([1], author=author) != observed([2], author=author)
    assert observed([1], author=author) != observed([1, 1], author=author)
    assert replace(ACTION, kv="stale") != ACTION
    assert replace(ACTION, logprobs=np.nextafter(ACTION.logprobs, np.float32(-1))) != ACTION
    assert ACTION != "span"
