"""Hugging Face folders: the numbers of transformers on six tiny models, our own folders read back, and what is refused."""

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentrl_jax.chat import tokenizer
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import Decoder, ModelConfig, init_params, unembed
from agentrl_jax.models.hf_config import PretrainedError
from agentrl_jax.models.rope import Rope
from tests.golden import models

GOLDEN = Path(__file__).parent.parent / "golden" / "hf_models"
FACTS = models.described(GOLDEN.parent)
MODELS = sorted(path.name for path in FACTS)
CONFIG = ModelConfig(vocab_size=600, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48)


SHAPES = pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, tie_embeddings=False, rope=Rope(theta=1e4, variant="linear", factor=2.0)),
        replace(CONFIG, qk_norm=False, attention_bias=True, head_dim=8, rope=Rope(variant="yarn", factor=4.0, original_context=64)),
        replace(CONFIG, qk_norm=False, rope=Rope(variant="llama3", factor=8.0, original_context=64)),
    ],
    ids=["qwen3", "qwen3-untied-linear", "qwen2-yarn", "llama3"],
)


def varied(config: ModelConfig) -> dict:
    """Random weights, scales and biases among them."""
    params = init_params(config, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def chat() -> pretrained.Chat:
    source = tokenizer.train(["read the file, then run the tests"], 300).text
    return pretrained.Chat(source, "{{ messages }}", end="<|im_end|>", padding="<|endoftext|>", context_limit=512)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_those_of_transformers(model):
    """Logits, log-probs, greedy tokens, loss and gradients, and both styles of config.json."""
    (row, lines) = models.judged(GOLDEN / model, FACTS[GOLDEN / model])
    assert not lines
    assert row == [16, 0, 0]


@SHAPES
def test_what_was_written_is_read_back_bit_for_bit(tmp_path, config):
    params = varied(config)
    pretrained.write(tmp_path / "policy", config, params, chat())
    found, read = pretrained.read(tmp_path / "policy")
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, read, params)
    assert jax.tree.structure(read) == jax.tree.structure(params)


def test_weights_may_be_split_into_files_and_read_onto_many_devices(tmp_path):
    params = init_params(CONFIG, jax.random.key(0))
    pretrained.write(tmp_path / "policy", CONFIG, params, chat(), file_size=30_000)
    files = sorted(path.name for path in (tmp_path / "policy").glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def sharding(path, shape):
        return jax.NamedSharding(mesh, jax.P("a", "b") if len(shape) == 2 else jax.P("a"))

    _, read = pretrained.read(tmp_path / "policy", sharding)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    kernel = read["layers_0"]["attention"]["q_proj"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(16, 32)}


def test_a_host_holds_no_more_than_a_tensor(tmp_path):
    config = replace(CONFIG, num_layers=12, hidden_size=256, intermediate_size=1024)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    pretrained.write(tmp_path / "policy", config, jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes), chat())
    size = (tmp_path / "policy" / "model.safetensors").stat().st_size
    tracemalloc.start()
    try:
        pretrained.read(tmp_path / "policy")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4


def test_an_index_that_does_not_fit_its_files_names_both(tmp_path):
    folder = shutil.copytree(GOLDEN / "qwen3_untied_sharded", tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.bias"] = "model-00002-of-00004.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PretrainedError, match=r"model-00002-of-00004\.safetensors: tensor model\.norm\.bias is missing"):
        pretrained.read(folder)


def test_a_written_folder_is_a_chat_model(tmp_path):
    folder = tmp_path / "policy"
    pretrained.write(folder, CONFIG, init_params(CONFIG, jax.random.key(0)), chat())
    end = tokenizer.ChatTokenizer.load(folder / "tokenizer.json").id("<|im_end|>")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [end]
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.real("torch")
@pytest.mark.slow
@SHAPES
def test_transformers_computes_the_same_from_a_written_folder(tmp_path, config):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    params = varied(config)
    pretrained.write(tmp_path / "policy", config, params, chat())
    tokens = np.random.default_rng(0).integers(0, 600, (2, 20), dtype=np.int32)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")(torch.tensor(tokens)).logits.numpy()
    positions = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), (2, 20))
    ours = Decoder(config).apply({"params": params}, jnp.asarray(tokens), positions, jnp.ones_like(positions)) @ unembed(params).T
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<|im_end|>"


def test_bfloat16_weights_are_widened_exactly(tmp_path):
    folder = copy(tmp_path, "qwen3_tied_gqa")
    tensors = {name: jnp.asarray(value, jnp.bfloat16) for name, value in load_file(folder / "model.safetensors").items()}
    save_file({name: np.asarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    _, params = pretrained.read(folder)
    expected = tensors["model.embed_tokens.weight"].astype(jnp.float32)
    np.testing.assert_array_equal(params["embed"]["embedding"], expected)


def copy(tmp_path: Path, model: str) -> Path:
    return Path(shutil.copytree(GOLDEN / model, tmp_path / "model"))


def edit(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma"}, "config.json: model_type 'gemma' is not supported; supported are qwen3, qwen2, llama"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported; supported are default, linear"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_type linear needs a number factor, got None"),
        ({"hidden_size": None}, "config.json: hidden_size must be a positive integer, got None"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"use_sliding_window": True}, "config.json: use_sliding_window=True is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"attention_bias": True}, "config.json: attention_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"intermediate_size": 97}, r"tensor model.layers.0.mlp.gate_proj.weight is \[96, 48\], but by config.json it is \[97, 48\]"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.* has no place in the model"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused_by_name(tmp_path, fields, message):
    folder = copy(tmp_path, "qwen3_tied_gqa")
    edit(folder, **fields)
    with pytest.raises(PretrainedError, match=message):
        pretrained.read(folder)


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(PretrainedError, match=r"config\.json: no such file"):
        pretrained.read(tmp_path)
    folder = copy(tmp_path, "qwen3_untied_sharded")
    shard = folder / "model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(PretrainedError, match=r"model-00003-of-00004\.safetensors: not a whole safetensors file"):
        pretrained.read(folder)
    shard.unlink()
    with pytest.raises(PretrainedError, match=r"model-00003-of-00004\.safetensors: no such file"):
        pretrained.read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(PretrainedError, match=r"config\.json: not valid JSON"):
        pretrained.read(folder)


def test_writing_refuses_what_no_reader_could_use(tmp_path):
    params = init_params(CONFIG, jax.random.key(0))
    with pytest.raises(PretrainedError, match="exists already"):
        pretrained.write(tmp_path, CONFIG, params, chat())
    with pytest.raises(PretrainedError, match="no token <eos>"):
        pretrained.write(tmp_path / "a", CONFIG, params, replace(chat(), end="<eos>"))
    with pytest.raises(PretrainedError, match="vocab_size is 128; raise it"):
        pretrained.write(tmp_path / "a", replace(CONFIG, vocab_size=128), params, chat())
    with pytest.raises(PretrainedError, match="both qk_norm and attention_bias"):
        pretrained.write(tmp_path / "a", replace(CONFIG, attention_bias=True), params, chat())
    assert not (tmp_path / "a").exists()
