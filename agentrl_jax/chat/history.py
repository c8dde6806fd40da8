"""What a chat template makes of an episode so far: it may drop earlier thoughts, or trim what was sampled.

Ids are compared as text: where the template writes what stands there, the ids that were sampled stay.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.renderer import Piece, Renderer
from agentrl_jax.chat.template import assistant, user
from agentrl_jax.chat.tokenizer import ChatTokenizer

_STAND_IN = 0xF0000  # private-use characters stand for control tokens that a text spells out, so that the text stays text


@dataclass(frozen=True)
class Rewritten:
    """A history that differs from what was sampled. copied: i32[n], all up to the last answer; answer: that one, as it is appended."""

    copied: NDArray[np.int32]
    answer: list[Piece]


class History:
    """A conversation as its template writes it, turn by turn."""

    def __init__(self, renderer: Renderer, prompt: str) -> None:
        self._renderer, self._texts = renderer, _Texts(renderer.tokenizer)
        prompt, task = self._texts.inert(prompt), renderer.layout.task
        self._messages = [user(prompt)]
        self._kept = task.before + task.written(prompt) + task.after

    def answered(self, turn: NDArray[np.int32], text: str) -> Rewritten | None:
        """Add a sampled `turn` i32[n] and the tool's `text`: the new history, None where it is the old one with these appended."""
        layout, closed = self._renderer.layout, self._renderer.closed(turn)
        said = self._texts.of(turn[:-1] if closed else turn)
        text = self._texts.inert(text)
        answer = layout.answer.before[len(layout.end) :] + layout.answer.written(text) + layout.answer.after
        self._messages += [assistant(said), {"role": layout.role, "content": text}]
        rendered = self._renderer.render(self._messages)
        kept, self._kept = self._kept + said + (self._texts.of(turn[-1:]) if closed else layout.end) + answer, rendered
        if rendered == kept:
            return None
        if not rendered.endswith(answer):
            return Rewritten(self._texts.encode(rendered), [])
        end = np.array(self._renderer.stop[:1], np.int32)
        return Rewritten(self._texts.encode(rendered.removesuffix(answer)), self._renderer.answer(self._texts.spelt(text), end))


class _Texts:
    """Text in which control tokens that were sampled are spelt out, and those that others only spelt are stand-ins."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _tokens(self) -> list[str]:
        return sorted(self._tokenizer.added, key=len, reverse=True)

    @cached_property
    def _ids(self) -> dict[int, str]:
        return {self._tokenizer.id(token): token for token in self._tokens}

    @cached_property
    def _spelt(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._tokens)))

    @cached_property
    def _stand_ins(self) -> re.Pattern[str]:
        return re.compile(f"([{chr(_STAND_IN)}-{chr(_STAND_IN + len(self._tokens) - 1)}])")

    def inert(self, text: str) -> str:
        return self._spelt.sub(lambda found: chr(_STAND_IN + self._tokens.index(found[0])), text)

    def spelt(self, text: str) -> str:
        return self._stand_ins.sub(lambda found: self._tokens[ord(found[0]) - _STAND_IN], text)

    def of(self, tokens: NDArray[np.int32]) -> str:
        """Of sampled ids i32[n]."""
        texts, first = [], 0
        for i in [*(i for i, token in enumerate(tokens) if int(token) in self._ids), len(tokens)]:
            texts.append(self.inert(self._tokenizer.decode(tokens[first:i])))
            texts.extend(self._ids[int(token)] for token in tokens[i : i + 1])
            first = i + 1
        return "".join(texts)

    def encode(self, text: str) -> NDArray[np.int32]:
        parts = self._stand_ins.split(text)
        ids = [(self._tokenizer.encode(self.spelt(part)) if i % 2 else self._tokenizer.encode_markup(part)) for i, part in enumerate(parts)]
        return np.concatenate(ids)
