"""Tool calls as text: written by `render_call`, read by `parse_call`, checked against the declared tools.

    <tool_call>
    {"name": "edit", "arguments": {"old": "a < b", "new": "a <= b"}}
    </tool_call>

is `TAGGED`, the form of Qwen models and ours. `BARE`, that of Llama 3, is {"name": "edit", "parameters": {...}} and nothing else.

What the policy writes can be anything, so nothing here raises on it: a call that cannot be read is a `ParseError`, which the
policy sees as an observation. `parse_call(render_call(name, arguments), tools)` gives the call back for any valid arguments.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl_jax.chat.tokenizer import CONTROL, TAGS
from agentrl_jax.chat.tools import Tool

_HOLE = "\ue000"  # a private-use character stands for the value of an argument


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    open, close: tags around the JSON object; where `close` is "" the object is the whole turn, and `open` may come before it
    arguments:   key of the arguments
    markup:      what the arguments must not spell: `render_call` escapes it
    """

    open: str
    close: str
    arguments: str
    markup: tuple[str, ...]


_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
TAGGED = CallFormat("<tool_call>", "</tool_call>", "arguments", (*CONTROL, *TAGS))
BARE = CallFormat("<|python_tag|>", "", "parameters", _LLAMA)


@dataclass(frozen=True)
class ToolCall:
    """A call that names a declared tool and has exactly its arguments, of the declared types."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParseError:
    """Why a turn is no tool call, in at most 12 words that the policy reads."""

    message: str


def render_call(name: str, arguments: Mapping[str, Any], form: CallFormat = TAGGED) -> str:
    """The text of a call. Markup inside the arguments is escaped, so it can neither end the call nor become a control token."""
    body = json.dumps({"name": name, form.arguments: dict(arguments)}, ensure_ascii=False)
    for markup in form.markup:
        body = body.replace(markup, "\\u003c" + markup[1:])
    return f"{form.open}\n{body}\n{form.close}" if form.close else body


def call_pieces(tools: Iterable[Tool]) -> tuple[str, ...]:
    """The strings of rendered calls that no argument changes, each once: as added tokens they cost one id apiece."""
    pieces: dict[str, None] = {}
    for tool in tools:
        text = render_call(tool.name, dict.fromkeys(tool.parameters, _HOLE)).removeprefix(TAGGED.open).removesuffix(TAGGED.close)
        for key, kind in tool.parameters.items():
            if kind != "string":
                text = text.replace(f'{json.dumps(key)}: "{_HOLE}"', f"{json.dumps(key)}: {_HOLE}")
        pieces |= dict.fromkeys(text.split(_HOLE))
    return tuple(pieces)


def parse_call(turn: bytes, tools: Iterable[Tool], form: CallFormat = TAGGED) -> ToolCall | ParseError:
    """Read the one tool call of a turn; free text may come before a tagged one, nothing but white space after any.

    turn: the bytes of the sampled ids, however they were split into tokens, without the token that closes the turn
    """
    try:
        return _call(turn.decode("utf-8"), {tool.name: tool for tool in tools}, form)
    except UnicodeDecodeError:
        return ParseError("not UTF-8 text")
    except _UnreadableError as error:
        return ParseError(str(error))


class _UnreadableError(Exception):
    """The message of a ParseError, on its way out."""


def _call(text: str, tools: Mapping[str, Tool], form: CallFormat) -> ToolCall:
    call = _json(_tagged(text, form) if form.close else _bare(text, form))
    key = form.arguments
    if not isinstance(call, dict) or set(call) != {"name", key} or not isinstance(call[key], dict):
        raise _UnreadableError(f'tool call must be {{"name": ..., "{key}": {{...}}}}')
    if not isinstance(call["name"], str) or call["name"] not in tools:
        raise _UnreadableError("no tool of this name")
    parameters = tools[call["name"]].parameters
    arguments = call[key]
    for name, kind in parameters.items():
        if name not in arguments:
            raise _UnreadableError(f"argument {name!r} is missing")
        if not _is(kind, arguments[name]):
            raise _UnreadableError(f"argument {name!r} must be a valid {kind}")
    if len(arguments) > len(parameters):
        raise _UnreadableError("an argument the tool does not have")
    return ToolCall(call["name"], arguments)


def _tagged(text: str, form: CallFormat) -> str:
    if form.open not in text:
        raise _UnreadableError("no tool call")
    if text.count(form.open) > 1 or text.count(form.close) > 1:
        raise _UnreadableError("more than one tool call")
    body, closed, rest = text.partition(form.open)[2].partition(form.close)
    if not closed:
        raise _UnreadableError("tool call is not closed")
    if rest.strip():
        raise _UnreadableError("text after the tool call")
    return body


def _bare(text: str, form: CallFormat) -> str:
    body = text.strip().removeprefix(form.open).strip()
    if not body.startswith("{"):
        raise _UnreadableError("no tool call")
    return body


def _json(body: str) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of opening brackets
        raise _UnreadableError("tool call is not valid JSON") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise _UnreadableError("a key of the tool call is repeated")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is(kind: str, value: Any) -> bool:
    match kind:
        case "string":
            # neither a path nor an argv can hold NUL, nor any file a lone surrogate; refused here so that no tool can fail on them
            return isinstance(value, str) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)))
    raise ValueError(f"tool parameter type {kind!r}: use string, integer, number or boolean")
