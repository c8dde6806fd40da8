"""config.json of Hugging Face model folders, in the style of transformers 5 and in that of the hub (version 4)."""

import json
import re
from pathlib import Path
from typing import Any

from agentrl_jax.models.decoder import ModelConfig
from agentrl_jax.models.rope import Rope


class PretrainedError(ValueError):
    """A model folder cannot be used. The message names the file, the field or tensor, and what would do."""


_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
# Values of fields that would change the model in ways that the decoder does not know; anything else is refused.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
}
_REQUIRED_ROPE: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0, None),
    "mrope_section": (None,),
    "mscale": (None,),
    "mscale_all_dim": (None,),
    "truncate": (True,),
}
# Fields of other architectures that change the numbers, as parts of names: mixtures of experts, windows, scales and caps of logits,
# embeddings, residuals or scores, further norms and biases, parts of a rotation. One that says nothing may be there all the same.
_TELLING = re.compile(
    "expert|moe_|sparse|sliding|window|chunk_size$|softcap|scal|multipl|residual|bias|norm|rotary|rope|alibi|clip|sink|latent|lora|nextn|quant"
)
_KNOWN = {
    "attention_bias",
    "max_window_layers",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
}
_FACTOR = re.compile("scal|multipl|rotary")


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises PretrainedError."""
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise PretrainedError(f"{path}: no such file; name the folder that holds it") from error
    except ValueError as error:
        raise PretrainedError(f"{path}: not valid JSON ({error}); download or write it again") from error
    if not isinstance(loaded, dict):
        raise PretrainedError(f"{path}: must hold a JSON object")
    return loaded


def parse_config(path: Path) -> ModelConfig:
    """The shape that a config.json describes. Raises PretrainedError."""
    fields = load_json(path)
    kind = fields.get("model_type")
    if kind not in _ARCHITECTURES:
        raise PretrainedError(f"{path}: model_type {kind!r} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    _refuse_others(path, fields)
    if kind != "qwen2":
        _refuse(path, fields, {"attention_bias": (False,)})
    if kind == "llama" and "use_sliding_window" not in fields:
        _refuse(path, fields, {"sliding_window": (None,)})
    classes = fields.get("architectures") or [_ARCHITECTURES[kind]]
    if _ARCHITECTURES[kind] not in classes:
        raise PretrainedError(
            f"{path}: architectures holds {', '.join(classes)}; of model_type {kind} only {_ARCHITECTURES[kind]} is supported"
        )
    for name in fields.get("layer_types") or ():
        if name != "full_attention":
            raise PretrainedError(f"{path}: layer_types holds {name!r}; only full_attention is supported")
    hidden, heads = _integer(path, fields, "hidden_size"), _integer(path, fields, "num_attention_heads")
    fields = {"num_key_value_heads": heads, "head_dim": 128 if kind == "qwen3" else hidden // heads} | {
        name: value for name, value in fields.items() if value is not None
    }
    kv_heads = _integer(path, fields, "num_key_value_heads")
    if heads % kv_heads:
        raise PretrainedError(f"{path}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
    return ModelConfig(
        vocab_size=_integer(path, fields, "vocab_size"),
        hidden_size=hidden,
        num_layers=_integer(path, fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_integer(path, fields, "head_dim"),
        intermediate_size=_integer(path, fields, "intermediate_size"),
        rope=_rope(path, fields),
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        attention_bias=kind == "qwen2",
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a shape, in the style that versions 4 and 5 both read. Raises PretrainedError."""
    kind = {(True, False): "qwen3", (False, True): "qwen2", (False, False): "llama"}.get((config.qk_norm, config.attention_bias))
    if kind is None:
        raise PretrainedError("config.json: no architecture has both qk_norm and attention_bias; switch one off")
    if kind == "qwen2" and config.head_dim * config.num_heads != config.hidden_size:
        raise PretrainedError(
            f"config.json: Qwen2 needs head_dim = hidden_size / num_heads, got {config.head_dim}, {config.hidden_size}, {config.num_heads}"
        )
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "torch_dtype": "float32",
    }


def _refuse(path: Path, fields: dict[str, Any], required: dict[str, tuple[Any, ...]]) -> None:
    for name, supported in required.items():
        if name in fields and fields[name] not in supported:
            raise PretrainedError(f"{path}: {name}={fields[name]!r} is not supported; only {supported[0]!r} is")


def _refuse_others(path: Path, fields: dict[str, Any]) -> None:
    """Refuse what makes the model another one, by fields that we know and by fields that sound like it."""
    _refuse(path, fields, _REQUIRED)
    for name, value in fields.items():
        if _TELLING.search(name) and name not in _KNOWN | set(_REQUIRED) and not _says_nothing(name, value):
            raise PretrainedError(f"{path}: {name}={value!r} is not supported, as it may change the numbers; only models without it are")


def _says_nothing(name: str, value: Any) -> bool:
    """Absent, off, none of them, or a factor of 1."""
    return not value or (not isinstance(value, bool) and value == 1 and _FACTOR.search(name) is not None)


def _integer(path: Path, fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PretrainedError(f"{path}: {name} must be a positive integer, got {value!r}")
    return value


def _rope(path: Path, fields: dict[str, Any]) -> Rope:
    """Version 5 keeps everything in `rope_parameters`; version 4 has `rope_theta`, and `rope_scaling` where it is not the default."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    for name, value in rope.items():
        if isinstance(value, dict):
            raise PretrainedError(f"{path}: a rotation for {name} alone is not supported; only one for all layers is")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_FIELDS:
        raise PretrainedError(f"{path}: rope_type {kind!r} is not supported; supported are {', '.join(_ROPE_FIELDS)}")
    _refuse(path, rope, _REQUIRED_ROPE)
    for name in _ROPE_FIELDS[kind]:
        if not isinstance(rope.get(name), int | float):
            raise PretrainedError(f"{path}: rope_type {kind} needs a number {name}, got {rope.get(name)!r}")
    original = rope.get("original_max_position_embeddings") or fields.get("max_position_embeddings") or 0
    if kind == "yarn" and not original:
        raise PretrainedError(f"{path}: rope_type yarn needs original_max_position_embeddings")
    options = {name: rope[name] for name in _options(kind) if rope.get(name) is not None}
    theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    return Rope(theta=float(theta), variant=kind, original_context=original if _stretches(kind) else 0, **options)


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.variant == "default":
        return None
    options = {name: getattr(rope, name) for name in _options(rope.variant) if getattr(rope, name) is not None}
    original = {"original_max_position_embeddings": rope.original_context} if _stretches(rope.variant) else {}
    return {"rope_type": rope.variant} | options | original


def _options(kind: str) -> tuple[str, ...]:
    """Fields that bear the same name there and in `Rope`."""
    extra = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}
    return () if kind == "default" else ("factor", *extra.get(kind, ()))


def _stretches(kind: str) -> bool:
    return kind in ("llama3", "yarn")
