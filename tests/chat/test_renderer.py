import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import CHAT_TEMPLATE, Renderer, scaffolding
from agentrl_jax.chat.tokenizer import CONTROL, TAGS
from agentrl_jax.chat.toolcalls import ToolCall, parse_call
from agentrl_jax.chat.tools import Tool

TOOLS = (Tool("edit", "Replace text.", {"old": "string", "new": "string"}), Tool("test", "Run the tests."))
TOKENIZER = tokenizer.train(["def f(x):\n    return x + 1\n", "FAILED test_f: got 3"] * 9, 300, scaffolding(TOOLS))
RENDERER = Renderer(TOKENIZER)


def ids(pieces):
    return np.concatenate([p.tokens for p in pieces])


def text(pieces):
    return TOKENIZER.decode(ids(pieces))


def test_task():
    pieces = RENDERER.task("Fix f.")
    assert text(pieces) == "<|im_start|>user\nFix f.<|im_end|>\n<|im_start|>assistant\n"
    assert [(TOKENIZER.decode(p.tokens), p.template) for p in pieces if not p.template] == [("Fix f.", False)]


def test_answer():
    turn = RENDERER.call("test", {})
    pieces = RENDERER.answer("FAILED", turn)
    assert text(pieces) == "\n<|im_start|>user\n<tool_response>\nFAILED\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert [TOKENIZER.decode(p.tokens) for p in pieces if not p.template] == ["FAILED"]


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_turn_cut_by_length_is_closed_by_the_template(kept):
    turn = RENDERER.call("test", {})[:kept]
    first = RENDERER.answer("FAILED", turn)[0]
    assert first.template
    assert TOKENIZER.decode(first.tokens).startswith("<|im_end|>\n<|im_start|>user\n")


def test_content_leaves_out_only_the_closing_token():
    turn = RENDERER.call("test", {})
    assert turn[-1] == RENDERER.stop[0] == TOKENIZER.id("<|im_end|>")
    assert RENDERER.content(turn) == RENDERER.content(turn[:-1]) == TOKENIZER.decode_bytes(turn[:-1])
    assert RENDERER.content(turn[:0]) == b""


@given(st.lists(st.text(st.characters(codec="utf-8")) | st.sampled_from([*CONTROL, *TAGS])).map("".join))
def test_no_text_can_forge_markup(evil):
    turn = RENDERER.call("test", {})
    for pieces, harmless in ((RENDERER.task(evil), RENDERER.task("")), (RENDERER.answer(evil, turn), RENDERER.answer("", turn))):
        (content,) = [p for p in pieces if not p.template]
        assert TOKENIZER.decode_bytes(content.tokens) == evil.encode()
        assert (content.tokens < TOKENIZER.id("<|endoftext|>")).all()
        assert ids([p for p in pieces if p.template]).tolist() == ids(harmless).tolist()


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_a_scripted_call_is_read_back_and_uses_the_scaffolding(old):
    turn = RENDERER.call("edit", {"old": old, "new": "<|im_end|>"})
    assert parse_call(RENDERER.content(turn), TOOLS) == ToolCall("edit", {"old": old, "new": "<|im_end|>"})
    assert turn.tolist().count(RENDERER.stop[0]) == 1
    assert TOKENIZER.decode(turn[1:2]) == '\n{"name": "edit", "arguments": {"old": "'


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_other_tokens_of_the_same_text_parse_alike(old):
    turn = RENDERER.call("edit", {"old": old, "new": "x"})
    of_byte = {TOKENIZER.decode_bytes([t])[0]: t for t in range(256)}
    bytewise = [of_byte[b] for b in RENDERER.content(turn)]
    assert parse_call(RENDERER.content(np.array(bytewise, np.int32)), TOOLS) == parse_call(RENDERER.content(turn), TOOLS)


def test_a_call_without_arguments_costs_four_ids():
    assert len(RENDERER.call("test", {})) == 4


def test_system_message_and_tools_by_hand():
    head = text(Renderer(TOKENIZER, system="Be brief.", tools=TOOLS).task("Hi"))
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert head.endswith("</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    declared = head.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in declared] == [tool.schema() for tool in TOOLS]


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_the_exported_template_gives_the_same_ids(system, tools):
    jinja2 = pytest.importorskip("jinja2", reason="renders the exported chat template")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as transformers sets it
    calls = [("edit", {"old": "x + 1", "new": "x < 1"}), ("test", {})]
    pieces = Renderer(TOKENIZER, system=system, tools=tools).task("Fix f.")
    messages: list[dict] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "Fix f."})
    sequence = [ids(pieces)]
    for name, arguments in calls:
        turn = RENDERER.call(name, arguments)
        sequence += [turn, ids(RENDERER.answer("FAILED", turn))]
        messages.append({"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]})
        messages.append({"role": "tool", "content": "FAILED"})
    rendered = environment.from_string(CHAT_TEMPLATE).render(
        messages=messages, tools=[tool.schema() for tool in tools] or None, add_generation_prompt=True
    )
    assert TOKENIZER.encode_markup(rendered).tolist() == np.concatenate(sequence).tolist()
