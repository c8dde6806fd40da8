import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.chat.history import History
from agentrl_jax.chat.renderer import Renderer
from tests.chat.test_renderer import RENDERER as OURS
from tests.chat.test_template import CONTROL, LLAMA, OF_LLAMA, OF_QWEN, QWEN, TOOLS, ids

RENDERERS = {"ours": OURS, "qwen": Renderer(OF_QWEN, QWEN, tools=TOOLS), "llama": Renderer(OF_LLAMA, LLAMA, tools=TOOLS)}
FAMILIES = pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS.keys())
texts = st.lists(
    st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Z"]), max_size=5)
    | st.sampled_from([*CONTROL, "<|im_end|>", "<think>", "</think>", "\n", " "]),
    max_size=6,
).map("".join)


class Kept:
    """The ids of the newest segment, as an episode keeps them."""

    def __init__(self, renderer, prompt):
        self.renderer, self.history = renderer, History(renderer, prompt)
        self.tokens, self.segments = ids(renderer.task(prompt)), 1

    def turn(self, sampled, text):
        rewritten = self.history.answered(sampled, text)
        answer = rewritten.answer if rewritten else self.renderer.answer(text, sampled)
        before = rewritten.copied if rewritten else np.concatenate([self.tokens, sampled])
        self.tokens = np.concatenate([before, *(piece.tokens for piece in answer)])
        self.segments += rewritten is not None
        return rewritten


@FAMILIES
@given(st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=4), texts)
def test_the_history_reads_as_the_template_writes_it(renderer, turns, prompt):
    kept, tokenizer = Kept(renderer, prompt), renderer.tokenizer
    messages = [{"role": "user", "content": prompt}]
    for said, text, whole in turns:
        end = [renderer.stop[0]] if whole else []
        kept.turn(np.concatenate([tokenizer.encode(said), np.array(end, np.int32)]), text)
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": text}]
        assert tokenizer.decode(kept.tokens) == renderer.render(messages)
    # What others spelt is text: as many control tokens as in a conversation without them.
    plain = [{**message, "content": "x"} for message in messages]
    control = {tokenizer.id(token) for token in (*CONTROL, "<|im_start|>", "<|im_end|>") if tokenizer.has(token)}
    count = sum(int(token) in control for token in kept.tokens)
    assert count == sum(int(token) in control for token in tokenizer.encode_markup(renderer.render(plain)))


@given(st.lists(st.lists(st.integers(0, 310), max_size=12), min_size=1, max_size=4))
def test_our_own_template_keeps_whatever_was_sampled(turns):
    kept = Kept(OURS, "Fix f.")
    assert [kept.turn(np.array(turn, np.int32), "done") for turn in turns] == [None] * len(turns)


def test_thoughts_in_another_form_begin_a_segment_and_those_in_the_templates_do_not():
    renderer = RENDERERS["qwen"]
    kept, call = Kept(renderer, "Fix f."), '<tool_call>\n{"name": "test", "arguments": {}}\n</tool_call>'

    def said(text):
        return renderer.tokenizer.encode_markup(text + "<|im_end|>")

    assert kept.turn(said(f"<think>\na\n</think>\n\n{call}"), "FAILED") is None
    rewritten = kept.turn(said(f"<think>b</think>{call}"), "FAILED <|im_end|>")
    assert rewritten is not None
    assert renderer.tokenizer.decode(rewritten.copied).endswith(f"<think>\nb\n</think>\n\n{call}<|im_end|>")
    assert [piece.template for piece in rewritten.answer] == [True, False, True]
    assert kept.turn(said(call), "ok") is None, "the history goes on from the one that was rewritten"
    assert kept.segments == 2
