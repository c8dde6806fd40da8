"""A judge of turns: a tiny model in the real engine, taught to say yes where tests pass and no where they fail."""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import Renderer
from agentrl_jax.config import WarmStart
from agentrl_jax.data.episode import Author, Ending, Episode, Outcome, Segment, Span, Turn, digest
from agentrl_jax.envs.protocol import Observation, Task
from agentrl_jax.inference.engine import Engine
from agentrl_jax.inference.protocol import Completion, InferenceError
from agentrl_jax.learner.warmstart import imitate
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.rollout.agent import run_episode
from agentrl_jax.rollout.judge import LONGEST, Judge
from tests.inference.conftest import score
from tests.rollout.fakes import LIMITS, SUBMIT, add, job, parts

QUESTION = "{task}\n{call}\n{answer}\nDid it help?"
TASK, CALL = Task("t", "Fix clamp.", {}), ("test", {"all": True})
MODEL = ModelConfig(vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
PASS, FAIL = [f"ok: {n} passed" for n in range(2, 10)], [f"FAIL clamp({n}) = {n}, want 0" for n in range(2, 10)]
LIMIT = 160


@pytest.fixture(scope="module")
def renderer():
    texts = [QUESTION.format(task=TASK.prompt, call="test", answer=answer) for answer in PASS + FAIL]
    return Renderer(tokenizer.train([*texts, "Yes.", "no"], MODEL.vocab_size))


@pytest.fixture(scope="module")
def taught(renderer):
    """Weights that answer "Yes." to what passed and "no" to what failed, learned from demonstrations."""

    def demonstration(answer, says):
        text = QUESTION.format(task=TASK.prompt, call='test {"all": true}', answer=answer)
        asked = np.concatenate([piece.tokens for piece in renderer.task(text)])
        said = renderer.tokenizer.encode_markup(f"{says}<|im_end|>")
        zeros = np.zeros(len(said), np.int32)
        policy = Span(Author.POLICY, 0, said, zeros.astype(np.float32), zeros, digest(asked), 1.0, "stop")
        segment = Segment((Span(Author.TASK, 0, asked), policy))
        return Episode(answer, "t", answer, 0, 0, (segment,), (Turn(),), Ending.SUBMITTED, Outcome(1.0))

    episodes = [demonstration(answer, "Yes.") for answer in PASS[:6]] + [demonstration(answer, "no") for answer in FAIL[:6]]
    settings = WarmStart(updates=60, rows=4, learning_rate=1e-2, warmup=5)
    start = init_params(MODEL, jax.random.key(0))
    return imitate(MODEL, start, episodes, settings, row_length=LIMIT, seed=0, progress=lambda done, nll: None)


@pytest.fixture
async def engine(taught):
    async with Engine(MODEL, taught, context_limit=LIMIT, slots=4) as engine:
        yield engine


async def test_it_tells_what_helped(engine, renderer):
    judge = Judge(engine, renderer, QUESTION)
    helped = await asyncio.gather(*(judge(TASK, CALL, Observation(answer)) for answer in PASS))
    failed = await asyncio.gather(*(judge(TASK, CALL, Observation(answer)) for answer in FAIL))
    assert min(helped) > 0.9
    assert max(failed) < 0.1
    scaled = await replace(judge, scale=-0.5)(TASK, CALL, Observation(PASS[0]))
    assert scaled == pytest.approx(-0.5 * helped[0], abs=1e-5)


@pytest.mark.parametrize(("answer", "word", "of_yes"), [(PASS[7], "Yes", True), (FAIL[7], "no", False)])
async def test_the_probability_is_that_of_the_word(engine, renderer, taught, answer, word, of_yes):
    found = await Judge(engine, renderer, QUESTION)(TASK, CALL, Observation(answer))
    text = QUESTION.format(task=TASK.prompt, call='test {"all": true}', answer=answer)
    asked = np.concatenate([piece.tokens for piece in renderer.task(text)])
    said = renderer.tokenizer.encode(word)
    logprobs = score(taught, np.concatenate([asked, said]), config=MODEL)[len(asked) - 1 : -1]
    probability = float(np.exp(logprobs[np.arange(len(said)), said].sum()))
    assert found == pytest.approx(probability if of_yes else 1 - probability, abs=1e-4)


async def test_one_that_does_not_answer_is_broken(renderer):
    async with Engine(MODEL, init_params(MODEL, jax.random.key(1)), context_limit=LIMIT, slots=1) as untaught:
        with pytest.raises(InferenceError, match=r"the judge answers .* instead of yes or no"):
            await Judge(untaught, renderer, QUESTION)(TASK, CALL, Observation(PASS[0]))


class Says:
    """A sampler of one answer; it remembers what it was asked and which sessions it gave back."""

    context_limit = 4096

    def __init__(self, tokens):
        self.tokens, self.asked, self.open = tokens, [], set()

    async def generate(self, prompt, sampling, *, session):
        self.asked.append(prompt)
        assert session not in self.open
        self.open.add(session)
        n = len(self.tokens)
        return Completion(self.tokens, np.full(n, np.log(0.5), np.float32), np.zeros(n, np.int32), "stop")

    async def release(self, session):
        self.open.discard(session)


@pytest.mark.parametrize(("says", "yes"), [("yes", 1), ("no", 0), ("perhaps", None)])
async def test_it_judges_the_turns_of_an_episode(renderer, says, yes):
    """One that does not answer costs the episode, as any fault of inference does."""
    judge = Judge(Says(renderer.tokenizer.encode(says)), renderer)
    episode = await run_episode(job(), replace(parts([add("a"), SUBMIT]), turn_reward=judge), LIMITS)
    if yes is None:
        assert (episode.ending, episode.outcome) == (Ending.INFERENCE_FAILED, None)
    else:
        probability = 0.5 ** len(renderer.tokenizer.encode(says))
        assert [turn.reward for turn in episode.turns] == pytest.approx([probability if yes else 1 - probability] * 2)


@pytest.mark.parametrize(
    ("text", "expected"), [("yes<|im_end|>", 1), (" Yes, it did", 1), ("NO", 0), ("not at all", None), ("yesterday", None), ("", None)]
)
async def test_answers(renderer, text, expected):
    sampler = Says(renderer.tokenizer.encode_markup(text))
    judge = Judge(sampler, renderer, QUESTION)
    if expected is None:
        with pytest.raises(InferenceError, match="instead of yes or no"):
            await judge(TASK, CALL, Observation("x"))
    else:
        n = len(renderer.tokenizer.encode(text.partition(",")[0].removesuffix("<|im_end|>")))
        assert await judge(TASK, CALL, Observation("x")) == pytest.approx(0.5**n if expected else 1 - 0.5**n)
    assert sampler.open == set()


async def test_long_texts_are_clipped_and_braces_stay(renderer):
    sampler = Says(renderer.tokenizer.encode("yes"))
    await Judge(sampler, renderer)(TASK, ("write", {"text": "{answer}"}), Observation("a" * 9000 + "z"))
    asked = renderer.tokenizer.decode(sampler.asked[0])
    assert 'write {"text": "{answer}"}' in asked
    assert "a ... a" in asked
    assert "az\n" in asked
    assert len(asked) < LONGEST + 500


def test_a_question_with_other_fields_is_refused(renderer):
    with pytest.raises(ValueError, match=r"Judge\.question may have \{task\}"):
        Judge(Says(np.zeros(0, np.int32)), renderer, "{prompt}: yes or no?")
