"""One episode: prompt, sampled turn, tool call, observation, and so on until the policy submits or runs into a limit; then a score.

The loop sees protocols only. What the policy may cause (a turn that does not parse, a failing tool) is an observation and a count, and
the episode goes on. What it cannot cause is classified here, once, into an ending that keeps the episode out of training. Anything
else that is raised is a mistake in the code and stops the run.

The prompt of each turn is the concatenation of all spans of the segment so far: sampled ids are appended as they came. Only where the
policy's template has it otherwise, and the run wants it so, does a turn begin a new segment with the history as the template writes it.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.history import History
from agentrl_jax.chat.renderer import Piece, Renderer
from agentrl_jax.chat.toolcalls import ParseError
from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Span, Turn, digest
from agentrl_jax.data.events import Ended, Event, SpanAdded, Start, TurnDone, Unfinished, advance
from agentrl_jax.envs.protocol import Environment, GraderError, Observation, Task, TurnRewardFn
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampler, Sampling
from agentrl_jax.sandbox.protocol import Backend, Sandbox, SandboxError

logger = logging.getLogger(__name__)

_CONTINUATIONS = 16  # how often one turn may be aborted and continued (an engine pauses for new weights) before the engine is at fault


@dataclass(frozen=True)
class RolloutLimits:
    """What an episode may use. Reaching one is the policy's own ending; the state it left is scored.

    turns:          actions
    turn_tokens:    sampled tokens of one turn
    episode_tokens: sampled tokens of all turns
    context:        tokens that the policy sees at a time; the sampler's own limit holds as well
    seconds:        generation and tools together, queueing not counted; checked between turns
    deadline:       seconds without an answer after which a sampler, a box or a grader counts as failed; far above what commands may take
    """

    turns: int
    turn_tokens: int
    episode_tokens: int
    context: int
    seconds: float = 120.0
    deadline: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"RolloutLimits.{name} must be positive, got {value}")


@dataclass(frozen=True)
class Job:
    """One episode to be run.

    key:     unique within a run; also names the session at the sampler
    spoilt:  how infrastructure ended the attempts before this one
    """

    key: str
    task: Task
    group: str
    seed: int
    step: int
    spoilt: tuple[Ending, ...] = ()

    @property
    def id(self) -> str:
        """Id of the episode: each attempt is an episode of its own."""
        return f"{self.key}~{len(self.spoilt)}" if self.spoilt else self.key


@dataclass(frozen=True)
class Parts:
    """What episodes run on.

    turn_reward: scores each turn that was a tool call; None where only the outcome counts
    rewrites:    the history of each turn is what the policy's chat template writes; otherwise what was sampled
    """

    environment: Environment
    backend: Backend
    sampler: Sampler
    renderer: Renderer
    turn_reward: TurnRewardFn | None = None
    rewrites: bool = False


Sink = Callable[[Event], None]
"""Takes events as they happen."""


def nowhere(event: Event) -> None:
    """The sink of those who keep nothing."""


def turn_seed(episode_seed: int, turn: int, part: int = 0) -> int:
    """63 bits that seed the sampling of a turn; `part` counts the continuations of a turn that was aborted."""
    return int(np.random.SeedSequence([episode_seed, turn, part]).generate_state(1, np.uint64)[0] >> np.uint64(1))


async def run_episode(
    job: Job, parts: Parts, limits: RolloutLimits, *, temperature: float = 1.0, queued: float = 0.0, sink: Sink = nowhere
) -> Episode:
    """Run one episode and score what it left behind.

    queued: seconds the job waited for its place; recorded, never charged to the policy
    sink:   gets each event as it happens, so that an unfinished episode is known up to its last span

    A failure of infrastructure is an ending without an outcome. On cancellation the sink gets the episode as CANCELLED and the
    cancellation goes on. Box and session are given back in every case.
    """
    log = _Log(job, limits.deadline, sink)
    log.timings["queue"] = queued
    log.counters.update(f"retried_{ending.value}" for ending in job.spoilt)
    try:
        ending, outcome = await _attempt(parts, limits, temperature, log)
    except asyncio.CancelledError:
        log.finish(Ending.CANCELLED, None)
        raise
    except (SandboxError, InferenceError, GraderError) as error:
        ending, outcome = _ending_of(error), None
        logger.warning("episode %s: %s: %s", job.id, ending.value, error)
    return log.finish(ending, outcome)


def _ending_of(error: SandboxError | InferenceError | GraderError) -> Ending:
    match error:
        case SandboxError():
            return Ending.SANDBOX_FAILED
        case InferenceError():
            return Ending.INFERENCE_FAILED
        case GraderError():
            return Ending.GRADER_FAILED


class _Log:
    """What has happened so far in an episode, and the turn that is being played."""

    def __init__(self, job: Job, deadline: float, sink: Sink) -> None:
        self.job = job
        self.counters = Counter(parse_errors=0, tool_errors=0, tool_timeouts=0, sampled_tokens=0)
        self.timings: defaultdict[str, float] = defaultdict(float)
        self.turn: Turn | None = None
        self._deadline = deadline
        self._sink = sink
        start = Start(job.id, job.task.id, job.group, job.seed, job.step)
        self._state = Unfinished(start)
        sink(start)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of the newest segment."""
        return self._state.segments[-1] if self._state.segments else ()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """i32[n]: all ids of the newest segment, the prompt of the next sampled span."""
        return np.concatenate([span.tokens for span in self.spans])

    @property
    def policy_seconds(self) -> float:
        return self.timings["generate"] + self.timings["tools"]

    def append(self, span: Span) -> None:
        self._happened(SpanAdded(self.job.id, max(len(self._state.segments) - 1, 0), span))

    def begin(self, turn: int, copied: NDArray[np.int32]) -> None:
        """A new segment, beginning with what was said before."""
        self._happened(SpanAdded(self.job.id, len(self._state.segments), Span(Author.COPY, turn, copied)))

    def extend(self, turn: int, pieces: Sequence[Piece], author: Author) -> None:
        """Append rendered pieces: the glue by the template, the text by its `author`."""
        for piece in pieces:
            self.append(Span(Author.TEMPLATE if piece.template else author, turn, piece.tokens))

    def end_turn(self) -> None:
        """The turn that was being played is over."""
        if self.turn is not None:
            self._happened(TurnDone(self.job.id, self.turn))
        self.turn = None

    @asynccontextmanager
    async def boundary(self, name: str, failure: type[Exception]) -> AsyncIterator[None]:
        """Time what is called inside; no answer by the deadline is a `failure`."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline):
                yield
        except TimeoutError as error:
            raise failure(f"{name}: no answer within {self._deadline:g} s") from error
        finally:
            self.timings[name] += time.monotonic() - begun

    def finish(self, ending: Ending, outcome: Outcome | None) -> Episode:
        if self.spans and self.spans[-1].author is Author.POLICY:
            self.end_turn()  # cut short between its tokens and its answer
        ended = Ended(self.job.id, ending, outcome, dict(self.counters), dict(self.timings))
        episode = advance(self._state, ended)
        assert isinstance(episode, Episode)
        self._sink(ended)
        return episode

    def _happened(self, event: SpanAdded | TurnDone) -> None:
        state = advance(self._state, event)
        assert isinstance(state, Unfinished)
        self._state = state
        self._sink(event)


async def _attempt(parts: Parts, limits: RolloutLimits, temperature: float, log: _Log) -> tuple[Ending, Outcome]:
    """Play in a box of its own and have it scored. Raises SandboxError, InferenceError, GraderError."""
    task = log.job.task
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_give_back, partial(parts.sampler.release, log.job.key), log)
        async with log.boundary("start", SandboxError):
            box = await parts.backend.start(task.files, limits=task.limits, image=task.image)
            stack.push_async_callback(_give_back, box.close, log)
        ending = await _play(parts, limits, temperature, log, box)
        async with log.boundary("score", GraderError):
            outcome = await parts.environment.score(task, box)
        return ending, outcome


async def _give_back(release: Callable[[], Awaitable[None]], log: _Log) -> None:
    """Give something back; a failure to do so does not spoil the episode."""
    try:
        async with log.boundary("close", SandboxError):
            await release()
    except (SandboxError, InferenceError) as error:
        logger.warning("episode %s: %s", log.job.id, error)


async def _play(parts: Parts, limits: RolloutLimits, temperature: float, log: _Log, box: Sandbox) -> Ending:
    """Turn after turn until the policy submits or a limit ends it. An answer that no turn can follow is not recorded."""
    env, task, context = parts.environment, log.job.task, min(limits.context, parts.sampler.context_limit)
    log.extend(0, parts.renderer.task(task.prompt), Author.TASK)
    history = History(parts.renderer, task.prompt) if parts.rewrites else None
    state: str | None = None
    for turn in range(limits.turns):
        room, left = context - len(log.tokens), limits.episode_tokens - log.counters["sampled_tokens"]
        if room < 1:
            return Ending.CONTEXT_LIMIT
        if left < 1:
            return Ending.TOKEN_LIMIT
        if log.policy_seconds >= limits.seconds:
            return Ending.TIME_LIMIT
        if state is None:
            async with log.boundary("state", SandboxError):
                state = await env.state(task, box)
        log.turn = Turn(state=state)
        sampled = await _sample(parts, turn, min(limits.turn_tokens, left, room), temperature, log)
        observation = await _act(parts, sampled, log, box)
        log.end_turn()
        if observation.done:
            return Ending.SUBMITTED
        if turn + 1 < limits.turns:
            rewritten = history and history.answered(sampled, observation.text)
            before = rewritten.copied if rewritten else log.tokens
            answer = rewritten.answer if rewritten else parts.renderer.answer(observation.text, sampled)
            if len(before) + sum(len(piece.tokens) for piece in answer) >= context:
                return Ending.CONTEXT_LIMIT
            if rewritten:
                log.begin(turn, rewritten.copied)
            log.extend(turn, answer, Author.ENVIRONMENT)
        state = observation.state
    return Ending.TURN_LIMIT


async def _sample(parts: Parts, turn: int, budget: int, temperature: float, log: _Log) -> NDArray[np.int32]:
    """Sample one turn of at most `budget` tokens, in as many spans as the engine breaks it into; i32[n] of them all."""
    done: list[NDArray[np.int32]] = []
    for part in range(_CONTINUATIONS):
        left = budget - sum(map(len, done))
        sampling = Sampling(left, turn_seed(log.job.seed, turn, part), temperature, parts.renderer.stop)
        prompt = log.tokens
        async with log.boundary("generate", InferenceError):
            completion = await parts.sampler.generate(prompt, sampling, session=log.job.key)
        log.timings["generate"] -= completion.queued
        log.timings["queue"] += completion.queued
        log.append(_policy_span(turn, completion, prompt, temperature))
        log.counters["sampled_tokens"] += len(completion.tokens)
        done.append(completion.tokens)
        if completion.finish_reason != "abort" or len(completion.tokens) >= left:
            return np.concatenate(done)
    raise InferenceError(f"turn {turn} was aborted {_CONTINUATIONS} times")


async def _act(parts: Parts, sampled: NDArray[np.int32], log: _Log, box: Sandbox) -> Observation:
    """Read the sampled turn and do what it says. A turn that cannot be read changes nothing and is told so."""
    assert log.turn is not None
    call = parts.renderer.parse(sampled, parts.environment.tools)
    if isinstance(call, ParseError):
        log.turn = replace(log.turn, valid=False)
        observation = Observation(f"error: {call.message}", count="parse_errors", state=log.turn.state)
    else:
        async with log.boundary("tools", SandboxError):
            observation = await parts.environment.step(log.job.task, call.name, call.arguments, box)
        if parts.turn_reward is not None:
            async with log.boundary("judge", InferenceError):
                reward = await parts.turn_reward(log.job.task, (call.name, call.arguments), observation)
            log.turn = replace(log.turn, reward=reward)
    if observation.count is not None:
        log.counters[observation.count] += 1
    return observation


def _policy_span(turn: int, completion: Completion, prompt: NDArray[np.int32], temperature: float) -> Span:
    """The record of a completion. One that is no valid record (a NaN log-prob, lengths that differ) is a failure of the engine."""
    try:
        return Span(
            Author.POLICY,
            turn,
            completion.tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
            prompt_digest=digest(prompt),
            temperature=temperature,
            finish_reason=completion.finish_reason,
        )
    except ValueError as error:
        raise InferenceError(f"the sampler returned what is no completion: {error}") from error
