"""config.json: every field that would make another model is refused by name, and those that change nothing are not."""

import json

import pytest

from agentrl_jax.models.hf_config import PretrainedError, parse_config

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def parsed(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | fields))
    return parse_config(path)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Mixtures of experts.
        ("num_experts", 64),
        ("num_local_experts", 8),
        ("n_routed_experts", 64),
        ("n_shared_experts", 2),
        ("num_experts_per_tok", 8),
        ("moe_intermediate_size", 768),
        ("decoder_sparse_step", 2),
        # Other attention.
        ("use_sliding_window", True),
        ("attention_chunk_size", 8192),
        ("is_causal", False),
        ("use_qk_norm", True),
        ("clip_qkv", 8.0),
        ("attention_multiplier", 0.0078125),
        ("attn_logit_softcapping", 50.0),
        ("kv_lora_rank", 512),
        ("attention_sinks", 4),
        # Other rotations.
        ("partial_rotary_factor", 0.5),
        ("rotary_pct", 0.25),
        ("no_rope_layers", [1, 0]),
        ("rope_local_base_freq", 10000.0),
        ("rope_interleaved", True),
        ("alibi", True),
        # Other layers and scales.
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("add_bias_linear", True),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12.0),
        ("scale_emb", 12),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("final_logit_softcapping", 30.0),
        ("num_nextn_predict_layers", 1),
        ("quantization_config", {"quant_method": "fp8"}),
        ("is_encoder_decoder", True),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, kind, name, value):
    with pytest.raises(PretrainedError, match=rf"config\.json: {name}=.* is not supported"):
        parsed(tmp_path, {"model_type": kind, name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
        ({"model_type": "llama", "sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True is not supported"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "architectures holds Qwen2ForRewardModel; .* Qwen2ForCausalLM"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "layer_types holds 'linear_attention'"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}}, "rope_type 'mrope' is not supported"),
        ({"model_type": "qwen2", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "mrope_section": [8]}}, "mrope_section=.* is not supported"),
        ({"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "a rotation for full_attention alone"),
    ],
)
def test_and_where_it_depends_on_another_field(tmp_path, fields, message):
    with pytest.raises(PretrainedError, match=message):
        parsed(tmp_path, fields)


def test_fields_that_change_nothing_are_ignored(tmp_path):
    """As published models have them: Qwen's window that is off, marks of tools, what matters to training alone."""
    noise = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_dropout": 0.1,
        "bos_token_id": 1,
        "initializer_range": 0.02,
        "is_llama_config": True,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_experts": 0,
        "pretraining_tp": 2,
        "residual_multiplier": 1.0,
        "rope_interleaved": False,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "transformers_version": "5.0.0",
        "unsloth_fixed": True,
        "use_cache": True,
        "use_sliding_window": False,
        "_attn_implementation_autoset": True,
    }
    assert parsed(tmp_path, {"model_type": "qwen3"} | noise) == parsed(tmp_path, {"model_type": "qwen3"})
