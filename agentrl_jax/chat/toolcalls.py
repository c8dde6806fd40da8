"""Tool calls as text: written by `render_call`, read by `parse_call`, checked against the declared tools.

    <tool_call>
    {"name": "edit", "arguments": {"old": "a < b", "new": "a <= b"}}
    </tool_call>

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

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HOLE = "\ue000"  # a private-use character stands for the value of an argument


@dataclass(frozen=True)
class ToolCall:
    """A call that names a declared tool and has exactly its arguments, of the declared types."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParseError:
    """Why a turn is no tool call, in at most 12 words that the policy reads."""

    message: str


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call. Markup inside the arguments is escaped, so it can neither end the call nor become a control token."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    for markup in (*CONTROL, *TAGS):
        body = body.replace(markup, "\\u003c" + markup[1:])
    return f"{_OPEN}\n{body}\n{_CLOSE}"


def call_pieces(tools: Iterable[Tool]) -> tuple[str, ...]:
    """The strings of rendered calls that no argument changes, each once: as added tokens they cost one id apiece."""
    pieces: dict[str, None] = {}
    for tool in tools:
        text = render_call(tool.name, dict.fromkeys(tool.parameters, _HOLE)).removeprefix(_OPEN).removesuffix(_CLOSE)
        for key, kind in tool.parameters.items():
            if kind != "string":
                text = text.replace(f'{json.dumps(key)}: "{_HOLE}"', f"{json.dumps(key)}: {_HOLE}")
        pieces |= dict.fromkeys(text.split(_HOLE))
    return tuple(pieces)


def parse_call(turn: bytes, tools: Iterable[Tool]) -> ToolCall | ParseError:
    """Read the one tool call of a turn; free text may come before it, nothing but white space after it.

    turn: the bytes of the sampled ids, however they were split into tokens, without the closing `<|im_end|>`
    """
    try:
        return _call(turn.decode("utf-8"), {tool.name: tool for tool in tools})
    except UnicodeDecodeError:
        return ParseError("not UTF-8 text")
    except _UnreadableError as error:
        return ParseError(str(error))


class _UnreadableError(Exception):
    """The message of a ParseError, on its way out."""


def _call(text: str, tools: Mapping[str, Tool]) -> ToolCall:
    if _OPEN not in text:
        raise _UnreadableError("no tool call")
    if text.count(_OPEN) > 1 or text.count(_CLOSE) > 1:
        raise _UnreadableError("more than one tool call")
    body, closed, rest = text.partition(_OPEN)[2].partition(_CLOSE)
    if not closed:
        raise _UnreadableError("tool call is not closed")
    if rest.strip():
        raise _UnreadableError("text after the tool call")
    call = _json(body)
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        raise _UnreadableError('tool call must be {"name": ..., "arguments": {...}}')
    if not isinstance(call["name"], str) or call["name"] not in tools:
        raise _UnreadableError("no tool of this name")
    parameters = tools[call["name"]].parameters
    arguments = call["arguments"]
    for name, kind in parameters.items():
        if name not in arguments:
            raise _UnreadableError(f"argument {name!r} is missing")
        if not _is(kind, arguments[name]):
            raise _UnreadableError(f"argument {name!r} must be a valid {kind}")
    if len(arguments) > len(parameters):
        raise _UnreadableError("an argument the tool does not have")
    return ToolCall(call["name"], arguments)


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
