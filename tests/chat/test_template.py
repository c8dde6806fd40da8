"""Chat templates of other models. The two here are short ones that behave as those of Qwen3 and Llama 3.2 do."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from agentrl_jax.chat import tokenizer
from agentrl_jax.chat.renderer import OURS, Renderer
from agentrl_jax.chat.template import ChatTemplate, TemplateError
from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.chat.toolcalls import BARE, TAGGED, ParseError, ToolCall, parse_call, render_call
from agentrl_jax.chat.tools import Tool

TOOLS = (Tool("look", "Look.", {"path": "string"}), Tool("test", "Run the tests."))

# Earlier thoughts go where a user asks again; those since the last question are kept, with line ends of the template's own.
THINKING = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought, answer = '', message.content %}
        {%- if '</think>' in answer %}
            {%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- answer }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Texts are trimmed, what tools say is JSON, tools and the first question share a message, and the head tells the date.
HEADERS = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and message.role == 'user' and loop.first %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = ChatTemplate(THINKING, ("<|im_end|>", "<|endoftext|>"))
LLAMA = ChatTemplate(HEADERS, ("<|eot_id|>", "<|eom_id|>"), "<|begin_of_text|>")
CONTROL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
OF_QWEN = tokenizer.train(["def f(x):\n    return x\n"] * 9, 300)


def _of_llama() -> ChatTokenizer:
    source = Tokenizer.from_str(json.dumps(json.loads(OF_QWEN.text) | {"added_tokens": []}))
    source.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    return ChatTokenizer(source.to_str())


OF_LLAMA = _of_llama()
FAMILIES = pytest.mark.parametrize(
    "renderer", [Renderer(OF_QWEN, QWEN, tools=TOOLS), Renderer(OF_LLAMA, LLAMA, tools=TOOLS)], ids=["qwen", "llama"]
)
texts = st.lists(st.text(st.characters(codec="utf-8")) | st.sampled_from([*CONTROL, "<|im_end|>", "</tool_call>", '"', "\\"])).map("".join)


def ids(pieces):
    return np.concatenate([piece.tokens for piece in pieces])


@FAMILIES
@pytest.mark.parametrize("answer", ["FAILED", 'say "no"\n', ""])
def test_a_history_of_pieces_is_what_the_template_renders(renderer, answer):
    history, messages = [ids(renderer.task("Fix f."))], [{"role": "user", "content": "Fix f."}]
    for path in ("a.py", "b.py"):
        turn = renderer.call("look", {"path": path})
        history += [turn, ids(renderer.answer(answer, turn))]
        call = {"type": "function", "function": {"name": "look", "arguments": {"path": path}}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": answer}]
        assert renderer.tokenizer.decode(np.concatenate(history)) == renderer.template.render(messages, TOOLS)
        assert renderer.answered(history[-1], turn) == answer


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_template_that_knows_no_tools_has_them_in_its_system_message(system):
    plain = ChatTemplate(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\\n' }}",
        ("<|im_end|>",),
    )
    assert QWEN.tells(TOOLS)
    assert not plain.tells(TOOLS)
    head = OF_QWEN.decode(ids(Renderer(OF_QWEN, plain, system=system, tools=TOOLS).task("Fix f.")))
    begins = "<|im_start|>system\n" + ("" if system is None else f"{system}\n\n") + "# Tools"
    assert head.startswith(begins)
    assert all(json.dumps(tool.schema()) in head for tool in TOOLS)
    assert head.endswith("<|im_end|>\n<|im_start|>user\nFix f.<|im_end|>\n<|im_start|>assistant\n")


@FAMILIES
@given(texts)
def test_no_text_can_forge_markup(renderer, evil):
    turn = renderer.call("test", {})
    (content,) = [piece for piece in renderer.answer(evil, turn) if not piece.template]
    control = {renderer.tokenizer.id(token) for token in (*CONTROL, "<|im_start|>", "<|im_end|>") if renderer.tokenizer.has(token)}
    assert control.isdisjoint(content.tokens.tolist())
    assert renderer.answered(ids(renderer.answer(evil, turn)), turn) == evil
    assert control.isdisjoint(renderer.task(evil)[1].tokens.tolist())


@FAMILIES
def test_any_stop_token_closes_a_turn(renderer):
    whole = renderer.call("test", {})
    other = np.append(whole[:-1], np.int32(renderer.stop[1]))
    assert renderer.parse(other, TOOLS) == renderer.parse(whole, TOOLS) == renderer.parse(whole[:-1], TOOLS) == ToolCall("test", {})
    assert ids(renderer.answer("x", other)).tolist() == ids(renderer.answer("x", whole)).tolist()
    assert ids(renderer.answer("x", whole[:-1])).tolist() == [renderer.stop[0], *ids(renderer.answer("x", whole))]


@pytest.mark.parametrize("form", [TAGGED, BARE], ids=["tagged", "bare"])
@given(texts.filter(lambda text: "\0" not in text))
def test_a_rendered_call_is_read_back(form, path):
    text = render_call("look", {"path": path}, form)
    assert parse_call(text.encode(), TOOLS, form) == ToolCall("look", {"path": path})
    assert sum(text.count(markup) for markup in form.markup) == (2 if form is TAGGED else 0)


def test_each_template_tells_its_form_of_calls():
    assert [template.calls for template in (OURS, QWEN, LLAMA)] == [TAGGED, TAGGED, BARE]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("I look.", "no tool call"),
        ('I look. {"name": "test", "parameters": {}}', "no tool call"),
        ('{"name": "test", "parameters": {}} done', "tool call is not valid JSON"),
        ('{"name": "test", "parameters": {}}; {"name": "test", "parameters": {}}', "tool call is not valid JSON"),
        ('{"name": "test", "arguments": {}}', 'tool call must be {"name": ..., "parameters": {...}}'),
        ('{"name": "rest", "parameters": {}}', "no tool of this name"),
        ('{"name": "look", "parameters": {}}', "argument 'path' is missing"),
        ('{"name": "test", "name": "test", "parameters": {}}', "a key of the tool call is repeated"),
    ],
)
def test_bare_calls_are_read_strictly(turn, message):
    assert parse_call(turn.encode(), TOOLS, BARE) == ParseError(message)


def test_a_bare_call_may_follow_its_tag():
    assert parse_call(b'<|python_tag|>{"name": "test", "parameters": {}}\n', TOOLS, BARE) == ToolCall("test", {})


def test_what_templates_rewrite_is_told_in_words():
    assert OURS.breaks == ()
    assert [found.what for found in QWEN.breaks] == [
        "a think block without line ends, then a tool's answer",
        "a think block, then a new question",
    ]
    assert [found.what for found in LLAMA.breaks] == ["white space around a turn", "today's date, which stays 26 Jul 2024"]
    dropped = QWEN.breaks[1]
    assert "<think>" in dropped.kept
    assert "<think>" not in dropped.rendered


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[", "not a chat template"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "2 times"),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", "ends a turn with '</s>"),
        ("nothing of the messages", "0 times"),
    ],
)
def test_templates_without_pieces_are_refused(source, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source, ("<|im_end|>",)).layout()


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"no token <\|eot_id\|>"):
        Renderer(OF_QWEN, LLAMA)
