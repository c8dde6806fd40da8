"""GGUF files of Llama models, made into the Hugging Face folders that everything else here reads.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised weights become the float32 numbers they stand for. What a file
may ask for beyond a plain Llama decoder with a byte-level BPE is refused with the field's name, never ignored. Needs the package `gguf`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import ModelConfig
from agentrl_jax.models.hf_config import PretrainedError
from agentrl_jax.models.rope import Rope

# How text is cut into words before the merges, by the name that llama.cpp has for it.
_PRE_TOKENIZERS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(source: Path, folder: Path, *, notices: Mapping[str, str] | None = None) -> None:
    """Write the model of a GGUF file as the new folder `folder`: whole, or not at all.

    notices: further texts of the folder by file name, such as the licence

    Raises PretrainedError where the file is damaged, of another architecture, or lacks something, and where `folder` exists.
    """
    if folder.exists():
        raise PretrainedError(f"{folder}: exists already; remove it or write elsewhere")
    fields, tensors = _read(source)
    config = _config(source, fields, tensors)
    params: Any = unflatten_dict(_weights(source, config, tensors))
    tokens: list[str] = _field(source, fields, "tokenizer.ggml.tokens", list)
    names = {part: tokens[_token_id(source, fields, part, len(tokens))] for part in ("bos", "eos", "padding")}
    template = _field(source, fields, "tokenizer.chat_template", str)
    context = _field(source, fields, "llama.context_length", int)
    chat = pretrained.Chat(_tokenizer(source, fields), template, names["eos"], names["padding"], context)

    whole = folder.with_name(folder.name + ".converted")
    pretrained.write(whole, config, params, chat)
    for name, added in (
        ("config.json", {"bos_token_id": tokens.index(names["bos"])}),
        ("generation_config.json", {"bos_token_id": tokens.index(names["bos"])}),
        ("tokenizer_config.json", {"bos_token": names["bos"]}),
    ):
        path = whole / name
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | added, indent=2), "utf-8")
    for name, text in (notices or {}).items():
        (whole / name).write_text(text, "utf-8")
    whole.rename(folder)


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata by name, and tensors by name."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise PretrainedError(f"{source}: reading GGUF files needs the package gguf; pip install gguf") from error
    try:
        reader = GGUFReader(source)
        fields = {name: _contents(field.contents()) for name, field in reader.fields.items()}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except FileNotFoundError as error:
        raise PretrainedError(f"{source}: no such file; name a GGUF file") from error
    except Exception as error:
        raise PretrainedError(f"{source}: not a whole GGUF file ({error}); download it again") from error


def _contents(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _field(source: Path, fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is {value!r}, not {kind.__name__}"
        raise PretrainedError(f"{source}: metadata {name} {found}; convert the model afresh")
    return value


def _config(source: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise PretrainedError(f"{source}: general.architecture {architecture!r} is not supported; only llama is")
    stretched = fields.get("llama.rope.scaling.type", "none")
    if stretched != "none" or "rope_freqs.weight" in tensors:
        raise PretrainedError(f"{source}: a stretched context (llama.rope.scaling.type, rope_freqs.weight) is not supported")

    def number(name: str, kind: type = int) -> Any:
        return _field(source, fields, f"llama.{name}", kind)

    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    if (turned := fields.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise PretrainedError(f"{source}: llama.rope.dimension_count {turned} is not supported; only the head's whole {head_dim} is")
    return ModelConfig(
        vocab_size=len(_field(source, fields, "tokenizer.ggml.tokens", list)),
        hidden_size=hidden,
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=number("feed_forward_length"),
        rope=Rope(theta=number("rope.freq_base", float)),
        # Stored as float32: the shortest decimal that rounds to it is what the model was trained with.
        rms_norm_eps=float(str(np.float32(number("attention.layer_norm_rms_epsilon", float)))),
        tie_embeddings="output.weight" not in tensors,
        qk_norm=False,
    )


def _weights(source: Path, config: ModelConfig, tensors: Mapping[str, Any]) -> dict[tuple[str, ...], NDArray[np.float32]]:
    """f32 weights by their path in the parameters. Each tensor must be there, in its shape, and no other."""
    from gguf import dequantize

    shapes = _shapes(config)
    weights, left = {}, set(tensors)
    for theirs, path in pretrained.tensor_names(config).items():
        name, part = _name(theirs)
        if name not in tensors:
            raise PretrainedError(f"{source}: tensor {name} is missing; convert the model afresh")
        left.discard(name)
        value = np.asarray(dequantize(tensors[name].data, tensors[name].tensor_type), np.float32)
        if value.shape != shapes[part]:
            raise PretrainedError(f"{source}: tensor {name} is {list(value.shape)}, but by the metadata it is {list(shapes[part])}")
        if part in ("attn_q", "attn_k"):
            value = _halves(value, config.head_dim)
        weights[path] = value.T if path[-1] == "kernel" else value
    if left:
        raise PretrainedError(f"{source}: tensor {min(left)} has no place in a plain Llama model; only such models are supported")
    return weights


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """[out, in] of every kind of tensor, by its name there."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        **dict.fromkeys(("token_embd", "output"), (config.vocab_size, hidden)),
        **dict.fromkeys(("output_norm", "attn_norm", "ffn_norm"), (hidden,)),
        **dict.fromkeys(("attn_k", "attn_v"), (kv, hidden)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (wide, hidden)),
        "attn_q": (q, hidden),
        "attn_output": (hidden, q),
        "ffn_down": (hidden, wide),
    }


def _name(theirs: str) -> tuple[str, str]:
    """GGUF name of a Hugging Face tensor, and its kind."""
    stem = theirs.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_TENSORS[stem]}.weight", _TENSORS[stem]
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_TENSORS[part]}.weight", _TENSORS[part]


def _halves(value: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of each head from llama.cpp's order, which turns neighbours (2i, 2i + 1), to ours, which turns (i, i + d/2)."""
    rows, columns = value.shape
    return value.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _token_id(source: Path, fields: Mapping[str, Any], part: str, size: int) -> int:
    name = f"tokenizer.ggml.{part}_token_id"
    index = _field(source, fields, name, int)
    if not 0 <= index < size:
        raise PretrainedError(f"{source}: metadata {name} is {index}, but there are {size} tokens; convert the model afresh")
    return index


def _tokenizer(source: Path, fields: Mapping[str, Any]) -> str:
    """The tokenizer.json: ids in the file's order, control tokens as special added tokens.

    No unknown token: it would be a control token, and text with a byte that the vocabulary lacks could then forge it.
    """
    kind, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or words not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise PretrainedError(
            f"{source}: tokenizer.ggml.model {kind!r} with pre {words!r} is not supported; supported is gpt2 with one of {known}"
        )
    tokens: list[str] = _field(source, fields, "tokenizer.ggml.tokens", list)
    types: list[int] = _field(source, fields, "tokenizer.ggml.token_type", list)
    if len(types) != len(tokens) or not set(types) <= {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED}:
        raise PretrainedError(f"{source}: metadata tokenizer.ggml.token_type does not fit a byte-level BPE of {len(tokens)} tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(source, fields, "tokenizer.ggml.merges", list)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:
        raise PretrainedError(f"{source}: metadata tokenizer.ggml.merges does not fit the tokens ({error})") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[words])
    tokenizer.decoder = decoders.ByteLevel()
    by_type = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text, kind in by_type if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in by_type if kind == _USER_DEFINED])
    return tokenizer.to_str()
