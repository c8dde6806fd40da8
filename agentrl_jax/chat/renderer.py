r"""The ids around the sampled turns: a builder that only appends, for any chat template whose pieces `template` finds.

Ours is ChatML, as Qwen models know it:

    <|im_start|>system\n...<|im_end|>\n                                          only with a system message or declared tools
    <|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n               the task
    {sampled ids, normally ending in <|im_end|>}                                 never rendered, never encoded again
    \n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n

A history is the concatenation of these pieces, so the prompt of each turn extends the one before it token by token. Each piece is
encoded by itself: encoding the whole string at once can split it differently where pieces meet, at white space, or where a vocabulary
joins punctuation to the line end after it, as Qwen's does. The text is the same, and sampling and training see the same ids.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.template import ChatTemplate, Layout, Messages, Slot, beginning
from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.chat.toolcalls import ParseError, ToolCall, call_pieces, parse_call, render_call
from agentrl_jax.chat.tools import Tool

_TOOLS_HEAD = "# Tools\n\nAct by calling one tool a turn. The tools, as JSON Schema:\n<tools>\n"
_TOOLS_TAIL = (
    "\n</tools>\n\nWrite a call as one JSON object between tags, after any thoughts:\n"
    '<tool_call>\n{"name": <tool name>, "arguments": <object>}\n</tool_call>'
)


def scaffolding(tools: Iterable[Tool]) -> tuple[str, ...]:
    """The fixed strings of the layout and of rendered calls; given to `tokenizer.train`, each costs one id."""
    return ("user\n", "assistant\n", *call_pieces(tools))


# Also the chat_template.jinja of an exported checkpoint, for those who serve it.
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
OURS = ChatTemplate(CHAT_TEMPLATE, stop=("<|im_end|>",))


@dataclass(frozen=True)
class Piece:
    """Ids to append. `template` is True for the glue of the layout, False for the text of a task or a tool."""

    tokens: NDArray[np.int32]
    template: bool


@dataclass(frozen=True)
class Renderer:
    """Makes the ids around the sampled turns.

    template: of the policy
    system:   system message; None for none
    tools:    declared to the model as the template does it, in the system message where it does not; leave empty for a policy that was
              trained on its tools

    Raises ValueError where the template has no pieces to append, or the tokenizer lacks a token that ends turns.
    """

    tokenizer: ChatTokenizer
    template: ChatTemplate = OURS
    system: str | None = None
    tools: tuple[Tool, ...] = ()

    def __post_init__(self) -> None:
        missing = [token for token in (*self.template.stop, self.layout.end) if not self.tokenizer.has(token)]
        if missing:
            raise ValueError(
                f"tokenizer.json: no token {missing[0]}, which ends a turn of the chat template; they belong to different models"
            )

    @cached_property
    def stop(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return tuple(self.tokenizer.id(token) for token in self.template.stop)

    def task(self, prompt: str) -> list[Piece]:
        """How an episode begins."""
        slot = self.layout.task
        return [self._glue(slot.before), self._text(slot, prompt), self._glue(slot.after)]

    def answer(self, text: str, turn: NDArray[np.int32]) -> list[Piece]:
        """What follows a sampled `turn` i32[n]: the tool's `text`, and the token that closes a turn where one cut by length lacks it."""
        slot = self.layout.answer
        before = slot.before[len(self.layout.end) :] if self.closed(turn) else slot.before
        return [self._glue(before), self._text(slot, text), self._glue(slot.after)]

    def answered(self, tokens: NDArray[np.int32], turn: NDArray[np.int32]) -> str:
        """The text in `tokens` i32[n], which `answer` gave for `turn`."""
        before, _, after = (len(piece.tokens) for piece in self.answer("", turn))
        return self.layout.answer.read(self.tokenizer.decode(tokens[before : len(tokens) - after]))

    def content(self, turn: NDArray[np.int32]) -> bytes:
        """The bytes of a sampled `turn` i32[n] without the token that closes it."""
        return self.tokenizer.decode_bytes(turn[:-1] if self.closed(turn) else turn)

    def parse(self, turn: NDArray[np.int32], tools: Iterable[Tool]) -> ToolCall | ParseError:
        """The call that a sampled `turn` i32[n] makes, in the form of the template."""
        return parse_call(self.content(turn), tools, self.template.calls)

    def call(self, name: str, arguments: Mapping[str, object]) -> NDArray[np.int32]:
        """i32[n]: a whole turn that makes this call, as a scripted policy writes it."""
        return self.tokenizer.encode_markup(render_call(name, arguments, self.template.calls) + self.layout.end)

    def closed(self, turn: NDArray[np.int32]) -> bool:
        """Whether a sampled `turn` i32[n] ends with a token that closes it; one cut by length does not."""
        return len(turn) > 0 and int(turn[-1]) in self.stop

    def _glue(self, text: str) -> Piece:
        return Piece(self.tokenizer.encode_markup(text), template=True)

    def _text(self, slot: Slot, text: str) -> Piece:
        return Piece(self.tokenizer.encode(slot.written(text)), template=False)

    @cached_property
    def layout(self) -> Layout:
        """The pieces around sampled turns."""
        system, tools = self._declared
        return self.template.layout(system, tools)

    def render(self, messages: Messages) -> str:
        """What the template writes of a conversation, tools declared."""
        system, tools = self._declared
        return self.template.render([*beginning(system), *messages], tools)

    @cached_property
    def _declared(self) -> tuple[str | None, tuple[Tool, ...]]:
        """The system message, and the tools that the template declares itself."""
        if not self.tools or self.template.tells(self.tools):
            return self.system, self.tools
        declared = _TOOLS_HEAD + "\n".join(json.dumps(tool.schema(), ensure_ascii=False) for tool in self.tools) + _TOOLS_TAIL
        return (declared if self.system is None else f"{self.system}\n\n{declared}"), ()
