"""GGUF files in and Hugging Face folders out: the weights and ids that went in, and what is refused by name."""

import json

import gguf as library
import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from agentrl_jax.chat import tokenizer
from agentrl_jax.models import gguf, pretrained
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.hf_config import PretrainedError
from agentrl_jax.models.rope import Rope

WORDS = json.loads(tokenizer.train(["read the file, then run the 2 tests"] * 9, 300).text)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Control tokens first, as SmolLM2 has them.
TOKENS = [*CONTROL, *sorted(WORDS["model"]["vocab"], key=WORDS["model"]["vocab"].get)]
CONFIG = ModelConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope=Rope(theta=1e5),
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    qk_norm=False,
)
PARAMS = init_params(CONFIG, jax.random.key(0))
PARTS = {
    "attn_q": ("attention", "q_proj"),
    "attn_k": ("attention", "k_proj"),
    "attn_v": ("attention", "v_proj"),
    "attn_output": ("attention", "o_proj"),
    "ffn_gate": ("mlp", "gate_proj"),
    "ffn_up": ("mlp", "up_proj"),
    "ffn_down": ("mlp", "down_proj"),
}


def permuted(rows, heads):
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def tensors():
    """The weights by their GGUF names."""
    named = {"token_embd.weight": PARAMS["embed"]["embedding"], "output_norm.weight": PARAMS["norm"]["scale"]}
    for i in range(CONFIG.num_layers):
        layer = PARAMS[f"layers_{i}"]
        named[f"blk.{i}.attn_norm.weight"] = layer["input_norm"]["scale"]
        named[f"blk.{i}.ffn_norm.weight"] = layer["mlp_norm"]["scale"]
        for name, (block, part) in PARTS.items():
            rows = np.asarray(layer[block][part]["kernel"]).T
            heads = {"attn_q": CONFIG.num_heads, "attn_k": CONFIG.num_kv_heads}.get(name)
            named[f"blk.{i}.{name}.weight"] = rows if heads is None else permuted(rows, heads)
    return {name: np.ascontiguousarray(value) for name, value in named.items()}


def file(path, *, architecture="llama", without=(), more=None, extra=None, words="gpt-2", quantised=False):
    """A GGUF file of the tiny model, as llama.cpp writes them; `without` names tensors and fields to leave out."""
    writer = library.GGUFWriter(path, architecture)
    fields = {
        "add_context_length": 256,
        "add_embedding_length": CONFIG.hidden_size,
        "add_block_count": CONFIG.num_layers,
        "add_feed_forward_length": CONFIG.intermediate_size,
        "add_head_count": CONFIG.num_heads,
        "add_head_count_kv": CONFIG.num_kv_heads,
        "add_rope_freq_base": CONFIG.rope.theta,
        "add_layer_norm_rms_eps": CONFIG.rms_norm_eps,
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": words,
        "add_token_list": TOKENS,
        "add_token_types": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "add_token_merges": [" ".join(merge) for merge in WORDS["model"]["merges"]],
        "add_bos_token_id": 1,
        "add_eos_token_id": 2,
        "add_pad_token_id": 0,
        "add_chat_template": "{{ messages }}",
    }
    for add, value in (fields | (more or {})).items():
        if add not in without:
            getattr(writer, add)(value)
    for name, value in (tensors() | (extra or {})).items():
        if name in without:
            continue
        if quantised and value.ndim == 2:
            kind = library.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, library.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_weights_and_the_shape_are_those_that_went_in(tmp_path):
    gguf.convert(file(tmp_path / "m.gguf"), tmp_path / "policy", notices={"LICENSE": "free"})
    config, params = pretrained.read(tmp_path / "policy")
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    assert (tmp_path / "policy" / "LICENSE").read_text() == "free"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "policy"]


def test_an_untied_model_keeps_its_output(tmp_path):
    output = np.asarray(jax.random.normal(jax.random.key(1), (CONFIG.vocab_size, CONFIG.hidden_size)))
    gguf.convert(file(tmp_path / "m.gguf", extra={"output.weight": output}), tmp_path / "policy")
    config, params = pretrained.read(tmp_path / "policy")
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["unembedding"], output)


def test_quantised_weights_are_the_numbers_they_stand_for(tmp_path):
    gguf.convert(file(tmp_path / "m.gguf", quantised=True), tmp_path / "policy")
    _, params = pretrained.read(tmp_path / "policy")
    kernel, exact = params["layers_1"]["attention"]["q_proj"]["kernel"], PARAMS["layers_1"]["attention"]["q_proj"]["kernel"]
    step = np.abs(exact).max() / 127  # Q8_0; its scales are float16, hence a little more than half a step
    assert 0 < np.abs(kernel - exact).max() <= 0.6 * step


def test_ids_and_special_tokens_are_the_files(tmp_path):
    gguf.convert(file(tmp_path / "m.gguf"), tmp_path / "policy")
    read = Tokenizer.from_file(str(tmp_path / "policy" / "tokenizer.json"))
    assert [read.id_to_token(i) for i in range(read.get_vocab_size())] == TOKENS
    assert [token.content for _, token in sorted(read.get_added_tokens_decoder().items()) if token.special] == CONTROL
    chat = tokenizer.ChatTokenizer.load(tmp_path / "policy" / "tokenizer.json")
    text = "read the 22 files\n<|im_end|>"
    assert (chat.encode(text) > 2).all()
    assert chat.decode(chat.encode(text)) == text
    assert chat.encode_markup("<|im_end|>").tolist() == [2]
    names = json.loads((tmp_path / "policy" / "tokenizer_config.json").read_text())
    assert (names["bos_token"], names["eos_token"], names["pad_token"]) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    model = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (1, 2, 0)


def test_digits_stand_alone_only_where_the_file_says_so(tmp_path):
    def pieces(words):
        gguf.convert(file(tmp_path / f"{words}.gguf", words=words), tmp_path / words)
        split = Tokenizer.from_file(str(tmp_path / words / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("run 42x")
        return [piece for piece, _ in split]

    assert pieces("gpt-2") == ["run", "Ġ42", "x"]
    assert pieces("smollm") == ["run", "Ġ", "4", "2", "x"]


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "m.gguf: general.architecture 'qwen2' is not supported; only llama is"),
        ({"without": ("add_rope_freq_base",)}, "m.gguf: metadata llama.rope.freq_base is missing"),
        ({"without": ("add_eos_token_id",)}, "m.gguf: metadata tokenizer.ggml.eos_token_id is missing"),
        ({"without": ("blk.1.ffn_up.weight",)}, "m.gguf: tensor blk.1.ffn_up.weight is missing"),
        (
            {"more": {"add_eos_token_id": 9999}},
            "tokenizer.ggml.eos_token_id is 9999, but there are [0-9]+ tokens",
        ),
        ({"more": {"add_feed_forward_length": 64}}, r"tensor blk.0.ffn_gate.weight is \[96, 64\], but by the metadata it is \[64, 64\]"),
        ({"more": {"add_rope_dimension_count": 8}}, "llama.rope.dimension_count 8 is not supported"),
        ({"extra": {"rope_freqs.weight": ONE}}, "a stretched context .* is not supported"),
        ({"extra": {"blk.0.attn_q.bias": ONE}}, "tensor blk.0.attn_q.bias has no place in a plain Llama model"),
        (
            {"words": "llama-bpe"},
            "tokenizer.ggml.model 'gpt2' with pre 'llama-bpe' is not supported; supported is gpt2 with one of gpt-2, smollm",
        ),
        ({"more": {"add_token_merges": ["no where"]}}, "tokenizer.ggml.merges does not fit the tokens"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path, options, message):
    with pytest.raises(PretrainedError, match=message):
        gguf.convert(file(tmp_path / "m.gguf", **options), tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("left", [0, 3, 100, 5000, -1000])
def test_a_truncated_file_is_one_clear_error(tmp_path, left):
    path = file(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(PretrainedError, match=r"m\.gguf: not a whole GGUF file .*download it again"):
        gguf.convert(path, tmp_path / "policy")


def test_a_missing_file_and_a_taken_folder_are_named(tmp_path):
    with pytest.raises(PretrainedError, match=r"none\.gguf: no such file"):
        gguf.convert(tmp_path / "none.gguf", tmp_path / "policy")
    with pytest.raises(PretrainedError, match="exists already"):
        gguf.convert(tmp_path / "none.gguf", tmp_path)
