import numpy as np

from agentrl_jax.chat.toolcalls import ToolCall, parse_call
from agentrl_jax.data.episode import Author, Ending
from agentrl_jax.envs.protocol import Task
from agentrl_jax.rollout.agent import run_episode
from agentrl_jax.rollout.collector import RolloutSettings, plan
from agentrl_jax.rollout.scripted import ScriptedSampler, demonstrate
from tests.rollout.fakes import LIMITS, RENDERER, SUBMIT, TOOLS, Boxes, Notebook, add, job, parts

TASKS = [Task(f"words/{i}", "Write the words.", {}) for i in range(3)]


def echo(task, rng):
    """Adds a random word, then what it is answered."""
    observation = yield "add", {"word": f"{task.id} {rng.randrange(100)}"}
    yield "add", {"word": observation.text}
    yield "submit", {}


async def show(retries=0, backend=None):
    jobs = plan(TASKS, 2, seed=0, step=0, phase="expert")
    settings = RolloutSettings(LIMITS, retries=retries)
    return await demonstrate(jobs, Notebook(), backend or Boxes(), RENDERER, settings, expert=echo)


async def test_the_expert_is_answered_and_its_turns_are_policy_tokens():
    for episode in await show():
        assert episode.ending is Ending.SUBMITTED
        policy = [s for s in episode.segments[0].spans if s.author is Author.POLICY]
        calls = [parse_call(RENDERER.content(s.tokens), TOOLS) for s in policy]
        assert isinstance(calls[0], ToolCall)
        first = calls[0].arguments["word"]
        assert calls == [ToolCall("add", {"word": first}), ToolCall("add", {"word": f"added {first}"}), ToolCall("submit", {})]
        assert all((s.logprobs == 0).all() and (s.versions == 0).all() for s in policy)


async def test_the_random_choices_come_from_the_seeds():
    first, again = await show(), await show()
    assert [e.segments for e in first] == [e.segments for e in again]
    assert len({e.segments[0].tokens.tobytes() for e in first[:2]}) == 2


async def test_a_retried_expert_starts_from_the_beginning():
    assert [e.segments for e in await show(retries=2, backend=Boxes("start", spoilt=2))] == [e.segments for e in await show()]


async def test_the_layout_is_that_of_sampled_turns():
    def script(key):
        yield "add", {"word": "a"}
        yield "add", {"word": "b"}
        yield "submit", {}

    scripted = await run_episode(job(), parts(sampler=ScriptedSampler(RENDERER, script, 1024)), LIMITS)
    sampled = await run_episode(job(), parts([add("a"), add("b"), SUBMIT]), LIMITS)
    assert np.array_equal(scripted.segments[0].tokens, sampled.segments[0].tokens)
    assert np.array_equal(scripted.segments[0].mask, sampled.segments[0].mask)


async def test_a_script_that_ends_too_early_is_no_fault_of_the_policy():
    def script(key):
        yield "add", {"word": "a"}

    episode = await run_episode(job(), parts(sampler=ScriptedSampler(RENDERER, script, 1024)), LIMITS)
    assert episode.ending is Ending.INFERENCE_FAILED


async def test_a_call_that_is_too_long_is_cut():
    def script(key):
        observation = yield "add", {"word": "a" * 200}
        assert observation.text == "error: tool call is not closed"
        yield "submit", {}

    episode = await run_episode(job(), parts(sampler=ScriptedSampler(RENDERER, script, 1024)), LIMITS)
    assert episode.ending is Ending.SUBMITTED
    assert episode.counters["parse_errors"] == 1
