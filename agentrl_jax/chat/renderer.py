r"""The chat layout (ChatML, as Qwen models know it), as a builder that only appends.

    <|im_start|>system\n...<|im_end|>\n                                          only with a system message or declared tools
    <|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n               the task
    {sampled ids, normally ending in <|im_end|>}                                 never rendered, never encoded again
    \n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n

A history is the concatenation of these pieces, so the prompt of each turn extends the one before it token by token. Each piece is
encoded by itself: where a text begins or ends in white space, encoding the whole string at once could split it differently.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.chat.toolcalls import call_pieces, render_call
from agentrl_jax.chat.tools import Tool

_TOOLS_HEAD = "# Tools\n\nAct by calling one tool a turn. The tools, as JSON Schema:\n<tools>\n"
_TOOLS_TAIL = (
    "\n</tools>\n\nWrite a call as one JSON object between tags, after any thoughts:\n"
    '<tool_call>\n{"name": <tool name>, "arguments": <object>}\n</tool_call>'
)


def scaffolding(tools: Iterable[Tool]) -> tuple[str, ...]:
    """The fixed strings of the layout and of rendered calls; given to `tokenizer.train`, each costs one id."""
    return ("user\n", "assistant\n", *call_pieces(tools))


@dataclass(frozen=True)
class Piece:
    """Ids to append. `template` is True for the glue of the layout, False for the text of a task or a tool."""

    tokens: NDArray[np.int32]
    template: bool


@dataclass(frozen=True)
class Renderer:
    """Makes the ids around the sampled turns.

    system: system message; None for none
    tools:  declared to the model in the system message; leave empty for a policy that was trained on its tools
    """

    tokenizer: ChatTokenizer
    system: str | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return (self._end,)

    def task(self, prompt: str) -> list[Piece]:
        """How an episode begins."""
        return [self._glue(self._head), Piece(self.tokenizer.encode(prompt), template=False), self._glue(_ASK)]

    def answer(self, text: str, turn: NDArray[np.int32]) -> list[Piece]:
        """What follows a sampled `turn` i32[n]: the tool's `text`, and the `<|im_end|>` that a turn cut by length lacks."""
        closing = "" if self._closed(turn) else "<|im_end|>"
        return [self._glue(closing + _ANSWER), Piece(self.tokenizer.encode(text), template=False), self._glue(_ANSWER_END)]

    def answered(self, tokens: NDArray[np.int32], turn: NDArray[np.int32]) -> str:
        """The text in `tokens` i32[n], which `answer` gave for `turn`."""
        before, _, after = (len(piece.tokens) for piece in self.answer("", turn))
        return self.tokenizer.decode(tokens[before : len(tokens) - after])

    def content(self, turn: NDArray[np.int32]) -> bytes:
        """The bytes of a sampled `turn` i32[n] without its closing `<|im_end|>`, for `parse_call`."""
        return self.tokenizer.decode_bytes(turn[:-1] if self._closed(turn) else turn)

    def call(self, name: str, arguments: Mapping[str, object]) -> NDArray[np.int32]:
        """i32[n]: a whole turn that makes this call, as a scripted policy writes it."""
        return self.tokenizer.encode_markup(render_call(name, arguments) + "<|im_end|>")

    def _closed(self, turn: NDArray[np.int32]) -> bool:
        return len(turn) > 0 and int(turn[-1]) == self._end

    def _glue(self, text: str) -> Piece:
        return Piece(self.tokenizer.encode_markup(text), template=True)

    @cached_property
    def _end(self) -> int:
        return self.tokenizer.id("<|im_end|>")

    @cached_property
    def _head(self) -> str:
        parts = [self.system] if self.system is not None else []
        if self.tools:
            parts.append(_TOOLS_HEAD + "\n".join(json.dumps(t.schema(), ensure_ascii=False) for t in self.tools) + _TOOLS_TAIL)
        system = "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n" if parts else ""
        return system + "<|im_start|>user\n"


_ASK = "<|im_end|>\n<|im_start|>assistant\n"
_ANSWER = "\n<|im_start|>user\n<tool_response>\n"
_ANSWER_END = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"

# The same layout for tools that serve or read an exported checkpoint (chat_template.jinja of a Hugging Face folder).
CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- if system is not none or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if system is not none %}{{- system }}{%- endif %}
    {%- if system is not none and tools %}{{- '\\n\\n' }}{%- endif %}
    {%- if tools %}
        {{- HEAD }}
        {%- for tool in tools %}
            {{- tool | tojson }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}
        {%- endfor %}
        {{- TAIL }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".replace("HEAD", json.dumps(_TOOLS_HEAD)).replace("TAIL", json.dumps(_TOOLS_TAIL))
