import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.chat.tokenizer import CONTROL, TAGS
from agentrl_jax.chat.toolcalls import ParseError, ToolCall, call_pieces, parse_call, render_call
from agentrl_jax.chat.tools import Tool

EDIT = Tool("edit", "Replace text.", {"function": "string", "old": "string", "new": "string"})
VIEW = Tool("view", "Show lines.", {"line": "integer", "all": "boolean", "scale": "number"})
TEST = Tool("test", "Run the tests.")
TOOLS = (EDIT, VIEW, TEST)

strings = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from([*CONTROL, *TAGS, "\\", '"'])).map(
    "".join
)
calls = st.one_of(
    st.fixed_dictionaries({"function": strings, "old": strings, "new": strings}).map(lambda a: ("edit", a)),
    st.fixed_dictionaries(
        {"line": st.integers(), "all": st.booleans(), "scale": st.floats(allow_nan=False, allow_infinity=False) | st.integers()}
    ).map(lambda a: ("view", a)),
    st.just(("test", {})),
)


@given(calls)
def test_a_rendered_call_parses_to_itself(call):
    text = render_call(*call)
    assert parse_call(text.encode(), TOOLS) == ToolCall(*call)
    assert sum(text.count(markup) for markup in (*CONTROL, *TAGS)) == 2


@given(calls, st.text(st.characters(codec="utf-8")))
def test_thoughts_may_come_first(call, thoughts):
    assert parse_call((thoughts + render_call(*call) + "\n ").encode(), TOOLS) == ToolCall(*call)


@given(st.binary())
def test_nothing_the_policy_writes_raises(data):
    assert isinstance(parse_call(data, TOOLS), ParseError)
    assert isinstance(parse_call(b"<tool_call>" + data + b"</tool_call>", TOOLS), ParseError)


def call(name, arguments):
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


GOOD = call("test", "{}")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (b"\xff" + GOOD.encode(), "not UTF-8 text"),
        ("", "no tool call"),
        ("I am done.", "no tool call"),
        (GOOD + GOOD, "more than one tool call"),
        ("</tool_call>" + GOOD, "more than one tool call"),
        (GOOD.removesuffix("</tool_call>"), "tool call is not closed"),
        (GOOD + " and then", "text after the tool call"),
        ("<tool_call>{</tool_call>", "tool call is not valid JSON"),
        ("<tool_call></tool_call>", "tool call is not valid JSON"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "tool call is not valid JSON"),
        (f"<tool_call>{'9' * 5000}</tool_call>", "tool call is not valid JSON"),
        (call("view", '{"line": 1, "all": true, "scale": NaN}'), "tool call is not valid JSON"),
        ("<tool_call>[]</tool_call>", 'tool call must be {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "test"}</tool_call>', 'tool call must be {"name": ..., "arguments": {...}}'),
        (call("test", "[]"), 'tool call must be {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "test", "name": "test", "arguments": {}}</tool_call>', "a key of the tool call is repeated"),
        (call("rm", "{}"), "no tool of this name"),
        (call(["test"], "{}"), "no tool of this name"),
        (call("test", '{"x": 1}'), "an argument the tool does not have"),
        (call("edit", '{"function": "f", "old": "x"}'), "argument 'new' is missing"),
        (call("edit", '{"function": "f", "old": "x", "new": 1}'), "argument 'new' must be a valid string"),
        (call("edit", '{"function": "f", "old": "x", "new": "\\u0000"}'), "argument 'new' must be a valid string"),
        (call("edit", '{"function": "f", "old": "x", "new": "\\ud800"}'), "argument 'new' must be a valid string"),
        (call("view", '{"line": true, "all": true, "scale": 1}'), "argument 'line' must be a valid integer"),
        (call("view", '{"line": 1.0, "all": true, "scale": 1}'), "argument 'line' must be a valid integer"),
        (call("view", '{"line": 1, "all": 0, "scale": 1}'), "argument 'all' must be a valid boolean"),
        (call("view", '{"line": 1, "all": true, "scale": 1e999}'), "argument 'scale' must be a valid number"),
        (call("view", '{"line": 1, "all": true, "scale": null}'), "argument 'scale' must be a valid number"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_few_words(turn, message):
    turn = turn if isinstance(turn, bytes) else turn.encode()
    assert parse_call(turn, TOOLS) == ParseError(message)
    assert len(message.split()) <= 12


def test_a_huge_integer_is_a_number():
    assert isinstance(parse_call(call("view", f'{{"line": 1, "all": true, "scale": {"9" * 400}}}').encode(), TOOLS), ToolCall)


def test_a_tool_with_an_unknown_type_is_a_mistake_of_the_environment():
    with pytest.raises(ValueError, match="tool parameter type 'list'"):
        parse_call(call("t", '{"x": []}').encode(), [Tool("t", "", {"x": "list"})])


@given(calls)
def test_pieces_are_what_no_argument_changes(call):
    tool = next(t for t in TOOLS if t.name == call[0])
    pieces = call_pieces([tool])
    text = render_call(tool.name, {name: call[1][name] for name in tool.parameters})
    assert re.fullmatch("<tool_call>" + ".*".join(map(re.escape, pieces)) + "</tool_call>", text, re.DOTALL)


def test_pieces_by_hand():
    assert call_pieces([EDIT, TEST]) == (
        '\n{"name": "edit", "arguments": {"function": "',
        '", "old": "',
        '", "new": "',
        '"}}\n',
        '\n{"name": "test", "arguments": {}}\n',
    )
    assert call_pieces([VIEW])[1:3] == (', "all": ', ', "scale": ')
