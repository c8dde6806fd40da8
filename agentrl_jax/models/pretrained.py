"""Policies as Hugging Face folders: Qwen3, Qwen2 and Llama in, the same out, weights bit for bit.

What `write` makes, vLLM and transformers load. Read are dense decoders with full attention; whatever else a config.json may ask
for is refused with the field's name, never ignored.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from agentrl_jax.models.decoder import ModelConfig, Params, init_params
from agentrl_jax.models.hf_config import PretrainedError, config_json, load_json, parse_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_SIZE = 5_000_000_000


ShardingFn: TypeAlias = Callable[[tuple[str, ...], tuple[int, ...]], Sharding]
"""(path in the parameters, shape) -> which devices hold which part."""


def on_one_device(path: tuple[str, ...], shape: tuple[int, ...]) -> Sharding:
    """Every weight whole on the first device of this process."""
    del path, shape
    return SingleDeviceSharding(jax.local_devices()[0])


@dataclass(frozen=True)
class Chat:
    """The texts that make a chat model of a folder of weights.

    tokenizer:     content of tokenizer.json
    template:      content of chat_template.jinja
    end:           token that ends a turn; generation stops at it
    padding:       token that fills batches
    context_limit: tokens of prompt and completion together
    stop:          further tokens that generation stops at
    bos:           the `bos_token` that the template writes; "" for none
    """

    tokenizer: str
    template: str
    end: str
    padding: str
    context_limit: int
    stop: tuple[str, ...] = ()
    bos: str = ""


def read(folder: Path, sharding: ShardingFn = on_one_device) -> tuple[ModelConfig, Params]:
    """Shape and f32 weights of the model in `folder`, laid out on devices as `sharding` says.

    Tensor by tensor, and of each only what this process's devices hold: no host ever holds a whole model.

    Raises PretrainedError naming the tensor and the file.
    """
    config = parse_config(folder / "config.json")
    expected: dict[Any, Any] = flatten_dict(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    names, loaded = tensor_names(config), {}
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        for name, path in names.items():
            if name not in tensors:
                raise PretrainedError(f"{folder}: tensor {name} is missing, but config.json asks for it; is the download complete?")
            file, opened = tensors[name]
            shape, stored = expected[path].shape, opened.get_slice(name)
            if stored.get_shape() != (asked := list(shape[::-1] if _is_turned(path) else shape)):
                raise PretrainedError(
                    f"{folder / file}: tensor {name} is {stored.get_shape()}, but by config.json it is {asked}; correct config.json"
                )
            part = partial(_part, stored, turned=_is_turned(path))
            loaded[path] = jax.make_array_from_callback(shape, sharding(path, shape), part)
        # A tied matrix may be repeated, and old Llama files hold the rotary frequencies.
        spare = {name for name in tensors if name not in names and not name.endswith("rotary_emb.inv_freq")}
        if config.tie_embeddings:
            spare.discard("lm_head.weight")
        for name in sorted(spare):
            raise PretrainedError(
                f"{folder / tensors[name][0]}: tensor {name} has no place in the model of config.json; correct its model_type or flags"
            )
    return config, unflatten_dict(loaded)


def _part(stored: Any, index: Any, *, turned: bool) -> NDArray[np.float32]:
    """The part of our array at `index`, out of a tensor in a file."""
    value = stored[index[::-1] if turned else index]
    return (value.T if turned else value).astype(np.float32)


def write(folder: Path, config: ModelConfig, params: Params, chat: Chat, *, file_size: int = FILE_SIZE) -> None:
    """Write a folder that vLLM and transformers load as a chat model: whole, or not at all.

    file_size: bytes of weights that a file may hold; more of them are split into files with an index, and come to the host file by file

    Raises PretrainedError where `folder` exists, the tokenizer lacks a token or has more ids than the model, or no architecture has
    these flags.
    """
    if folder.exists():
        raise PretrainedError(f"{folder}: exists already; remove it or write elsewhere")
    unfinished = folder.with_name(folder.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, text in _texts(config, chat).items():
        (unfinished / name).write_text(text, "utf-8")
    weights: dict[Any, Any] = flatten_dict(params)
    files = _split({name: weights[path].nbytes for name, path in tensor_names(config).items()}, file_size)
    paths = tensor_names(config)
    for file, names in files.items():
        fetched = {name: np.asarray(jax.device_get(weights[paths[name]])) for name in names}
        tensors = {name: np.ascontiguousarray(x.T if _is_turned(paths[name]) else x) for name, x in fetched.items()}
        save_file(tensors, unfinished / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(x.nbytes for x in weights.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (unfinished / INDEX).write_text(json.dumps(index, indent=2))
    unfinished.rename(folder)


def _split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Names of tensors by file, in order, each file of at most `limit` bytes or one tensor."""
    files, room = [], 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def tensor_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Hugging Face name of every tensor, and its path in the parameters."""
    names: dict[str, tuple[str, ...]] = {"model.embed_tokens.weight": ("embed", "embedding"), "model.norm.weight": ("norm", "scale")}
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("unembedding",)
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers_{i}"
        names[f"{theirs}.input_layernorm.weight"] = (ours, "input_norm", "scale")
        names[f"{theirs}.post_attention_layernorm.weight"] = (ours, "mlp_norm", "scale")
        names |= {f"{theirs}.self_attn.{x}_proj.weight": (ours, "attention", f"{x}_proj", "kernel") for x in "qkvo"}
        names |= {f"{theirs}.mlp.{x}_proj.weight": (ours, "mlp", f"{x}_proj", "kernel") for x in ("gate", "up", "down")}
        if config.attention_bias:
            names |= {f"{theirs}.self_attn.{x}_proj.bias": (ours, "attention", f"{x}_proj", "bias") for x in "qkv"}
        if config.qk_norm:
            names |= {f"{theirs}.self_attn.{x}_norm.weight": (ours, "attention", f"{x}_norm", "scale") for x in "qk"}
    return names


def _is_turned(path: tuple[str, ...]) -> bool:
    """Their matrices are [out, in], ours [in, out]."""
    return path[-1] == "kernel"


def _open(folder: Path, stack: ExitStack) -> Mapping[str, tuple[str, Any]]:
    """File of every tensor, by name and opened."""
    listed: Any = {}
    if (folder / INDEX).exists():
        listed = load_json(folder / INDEX).get("weight_map") or {}
        if not listed or not isinstance(listed, dict):
            raise PretrainedError(f"{folder / INDEX}: no weight_map; download the file again")
    tensors: dict[str, tuple[str, Any]] = {}
    for file in sorted(set(listed.values())) or [WEIGHTS]:
        path = folder / file
        if not path.exists():
            raise PretrainedError(f"{path}: no such file; a model folder needs {WEIGHTS}, or {INDEX} and the files it lists")
        try:
            opened = stack.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise PretrainedError(f"{path}: not a whole safetensors file ({error}); download or write it again") from error
        tensors |= dict.fromkeys(opened.keys(), (file, opened))
    for name, file in listed.items():
        if name not in tensors:
            raise PretrainedError(f"{folder / file}: tensor {name} is missing, but {INDEX} says that it is there; download the file again")
    return tensors


def _texts(config: ModelConfig, chat: Chat) -> dict[str, str]:
    tokenizer = Tokenizer.from_str(chat.tokenizer)
    end, padding = tokenizer.token_to_id(chat.end), tokenizer.token_to_id(chat.padding)
    if end is None or padding is None:
        raise PretrainedError(f"tokenizer.json: no token {chat.end if end is None else chat.padding}; name tokens that it has")
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise PretrainedError(
            f"tokenizer.json: {tokenizer.get_vocab_size()} ids, but the model's vocab_size is {config.vocab_size}; raise it"
        )
    model = config_json(config) | {"max_position_embeddings": chat.context_limit, "eos_token_id": end, "pad_token_id": padding}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": chat.end,
        "pad_token": chat.padding,
        "model_max_length": chat.context_limit,
        "clean_up_tokenization_spaces": False,
    }
    if chat.bos:
        tokenizer_config["bos_token"] = chat.bos
    stop = [end, *map(tokenizer.token_to_id, chat.stop)]
    # Servers take their sampling defaults from here: those of the policy itself.
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "eos_token_id": stop, "pad_token_id": padding}
    return {
        "config.json": json.dumps(model, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
        "tokenizer.json": chat.tokenizer,
        "chat_template.jinja": chat.template,
    }
