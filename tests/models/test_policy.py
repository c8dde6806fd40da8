"""A model folder's chat template and stop tokens: written and read back, found in each of their places, or refused by name."""

import json

import jax
import pytest

from agentrl_jax.chat.renderer import OURS
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.hf_config import PretrainedError
from agentrl_jax.models.policy import Policy, read_template
from tests.chat.test_template import LLAMA, OF_LLAMA, OF_QWEN, QWEN

CONFIG = ModelConfig(vocab_size=600, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
SPEAKERS = {"ours": (OF_QWEN, OURS), "qwen": (OF_QWEN, QWEN), "llama": (OF_LLAMA, LLAMA)}


@pytest.fixture(params=SPEAKERS)
def speaker(request, tmp_path):
    """A written folder, with the tokenizer and the template in it."""
    tokenizer, template = SPEAKERS[request.param]
    Policy(CONFIG, init_params(CONFIG, jax.random.key(0)), tokenizer, template).write(tmp_path / "policy", context_limit=64)
    return tmp_path / "policy", tokenizer, template


def test_a_template_is_read_back(speaker):
    folder, _, template = speaker
    assert Policy.read(folder).template == template


def test_a_template_may_stand_in_the_tokenizer_s_settings(speaker):
    folder, tokenizer, template = speaker
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for stored in (template.source, [{"name": "default", "template": "-"}, {"name": "tool_use", "template": template.source}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": stored}))
        assert read_template(folder, tokenizer) == template


def test_without_a_template_ours_is_taken_where_the_tokenizer_can_write_it(speaker):
    folder, tokenizer, _ = speaker
    (folder / "chat_template.jinja").unlink()
    if tokenizer.has("<|im_start|>"):
        assert read_template(folder, tokenizer) == OURS
    else:
        with pytest.raises(PretrainedError, match=r"no chat_template.jinja, and tokenizer.json has no <\|im_start\|>"):
            read_template(folder, tokenizer)


def test_stop_tokens_must_be_tokens_of_the_tokenizer(speaker):
    folder, tokenizer, _ = speaker
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    with pytest.raises(PretrainedError, match=r"generation_config.json's eos_token_id must name added tokens"):
        read_template(folder, tokenizer)


def test_a_template_that_no_agent_can_run_with_is_refused_by_file(speaker):
    folder, tokenizer, _ = speaker
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ messages[0].content }}")
    with pytest.raises(PretrainedError, match=r"policy: the chat template writes a message .*; correct chat_template.jinja"):
        read_template(folder, tokenizer)
