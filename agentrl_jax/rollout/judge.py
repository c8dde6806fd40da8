"""A model as the judge of turns: a yes/no question about a call and its answer, put to any `Sampler`."""

import itertools
import json
import math
import re
from dataclasses import dataclass, field

import numpy as np

from agentrl_jax.chat.renderer import Renderer
from agentrl_jax.envs.protocol import Call, Observation, Task
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampler, Sampling

QUESTION = """\
Someone works on this task:
{task}

Their next action:
{call}

The answer to it:
{answer}

Did this action help to solve the task? Answer yes or no."""

LONGEST = 2000  # characters of each part that is put into the question
WORDS = 8  # tokens of an answer at most


@dataclass(frozen=True)
class Judge:
    """A `TurnRewardFn`: `scale` times the probability of yes, by the judge's own log-probs.

    sampler:  entered by whoever made it, and open as long as this is used: a server of its own, or the policy's (which then judges itself)
    renderer: of the judge's tokenizer, without tools
    question: with {task}, {call} and {answer} in it
    scale:    of the reward

    The answer is the greedy one. If it begins with yes, the probability is that of the tokens up to the end of the word; if with no, it is
    one minus that. Raises InferenceError for any other answer, which costs the episode an attempt: a judge that cannot answer is broken.

    The text in the question is written by the one who is judged, who may write "answer yes" into it: a judge is a signal to be audited.
    """

    sampler: Sampler
    renderer: Renderer
    question: str = QUESTION
    scale: float = 1.0
    _sessions: "itertools.count[int]" = field(default_factory=itertools.count, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            self.question.format(task="", call="", answer="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"Judge.question may have {{task}}, {{call}} and {{answer}} in it, and no other braces: {error!r}") from error

    async def __call__(self, task: Task, call: Call, observation: Observation) -> float:
        name, arguments = call
        parts = {"task": task.prompt, "call": f"{name} {json.dumps(dict(arguments), ensure_ascii=False)}", "answer": observation.text}
        text = self.question.format(**{key: _clip(part) for key, part in parts.items()})
        prompt = np.concatenate([piece.tokens for piece in self.renderer.task(text)])
        sampling = Sampling(WORDS, seed=0, temperature=0.0, stop=self.renderer.stop)
        session = f"judge-{next(self._sessions)}"
        try:
            answer = await self.sampler.generate(prompt, sampling, session=session)
        finally:
            await self.sampler.release(session)
        return self.scale * self._yes(answer)

    def _yes(self, answer: Completion) -> float:
        texts = [self.renderer.tokenizer.decode(answer.tokens[:n]) for n in range(len(answer.tokens) + 1)]
        found = re.match(r"\s*(yes|no)\b", texts[-1], re.IGNORECASE)
        if found is None:
            raise InferenceError(f"the judge answers {texts[-1]!r} instead of yes or no: it needs a model that follows the question")
        length = next(n for n, text in enumerate(texts) if text.startswith(found[0]))
        probability = min(1.0, math.exp(float(answer.logprobs[:length].sum())))
        return probability if found[1].lower() == "yes" else 1 - probability


def _clip(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"
