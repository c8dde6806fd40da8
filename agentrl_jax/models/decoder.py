"""A decoder-only transformer: Qwen3, and Qwen2 or Llama by flags. Layers unrolled, parameters a plain pytree in f32.

Two ways through the same weights: `__call__` sees whole rows (training), `extend` appends to a key-value cache (sampling).
What CPU measurements decided: layers and caches are unrolled (a scan over stacked ones costs 1.4x in training, 3x in decoding),
and tokens run through the layers as flat rows [B * T, D] (with [B, T, D] the gradient of an MLP costs 1.8x).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentrl_jax.models.attention import cached_attention
from agentrl_jax.models.rope import Rope, cos_sin, rotate
from agentrl_jax.models.spread import attention

Params: TypeAlias = dict[str, Any]
Rotation: TypeAlias = tuple[Float[jax.Array, "B T h"], Float[jax.Array, "B T h"]]
LayerCache: TypeAlias = tuple[Float[jax.Array, "B KV d S"], Float[jax.Array, "B KV S d"]]
Cache: TypeAlias = list[LayerCache]
"""Keys and values of each layer; time is axis 3 of keys, 2 of values: `map_cache` hands it along."""
_Caches: TypeAlias = list[tuple[jax.Array, jax.Array]]  # of any sizes


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. Defaults are Qwen3; Qwen2: qk_norm=False, attention_bias=True; Llama: qk_norm=False."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope = field(default_factory=Rope)
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True
    attention_bias: bool = False


@dataclass(frozen=True)
class Compute:
    """How a decoder computes; its parameters are f32 whatever stands here.

    dtype: of matmuls and of what lies between layers. The statistics of norms and softmaxes are f32, and so is rotation. On CPUs
           bfloat16 trains slower than float32, as the matmuls of its gradients do.
    remat: keep the inputs of layers alone for the backward pass, which computes the rest again: for GPUs and TPUs. The schedule that
           XLA makes for CPUs computes it early, and saves little memory
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False


FLOAT32 = Compute()


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in f32; the result has the type of x."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[jax.Array, "... D"]) -> Float[jax.Array, "... D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (normed * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention between its projections. Tokens come as flat rows [N = B * T, D]; `rotation` knows B and T."""

    config: ModelConfig
    compute: Compute

    def setup(self) -> None:
        c = self.config
        dense = partial(nn.Dense, dtype=self.compute.dtype)
        self.q_proj = dense(c.num_heads * c.head_dim, use_bias=c.attention_bias)
        self.k_proj = dense(c.num_kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.v_proj = dense(c.num_kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.o_proj = dense(c.hidden_size, use_bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps)
            self.k_norm = RMSNorm(c.rms_norm_eps)

    def project(
        self, x: Float[jax.Array, "N D"], rotation: Rotation
    ) -> tuple[Float[jax.Array, "B T H d"], Float[jax.Array, "B T KV d"], Float[jax.Array, "B T KV d"]]:
        """Queries, scaled by 1 / sqrt(d), keys and values."""
        c = self.config
        rows = rotation[0].shape[:2]
        q = self.q_proj(x).reshape(*rows, c.num_heads, c.head_dim)
        k = self.k_proj(x).reshape(*rows, c.num_kv_heads, c.head_dim)
        v = self.v_proj(x).reshape(*rows, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(x.astype(jnp.float32), *rotation) for x in (q, k))
        return (q * c.head_dim**-0.5).astype(v.dtype), k.astype(v.dtype), v

    def __call__(self, x: Float[jax.Array, "N D"], rotation: Rotation, segments: Int[jax.Array, "B T"]) -> Float[jax.Array, "N D"]:
        mixed = attention(*self.project(x, rotation), segments)
        return self.o_proj(mixed.reshape(x.shape[0], -1))

    def extend(
        self, x: Float[jax.Array, "N D"], rotation: Rotation, start: Int[jax.Array, " B"], cache: LayerCache
    ) -> tuple[Float[jax.Array, "N D"], LayerCache]:
        q, k, v = self.project(x, rotation)
        keys, values = _write(cache[0], k.transpose(0, 2, 3, 1), start, 3), _write(cache[1], v.swapaxes(1, 2), start, 2)
        mixed = cached_attention(q.astype(keys.dtype), keys, values, start)
        return self.o_proj(mixed.reshape(x.shape[0], -1)), (keys, values)


class MLP(nn.Module):
    """SwiGLU."""

    config: ModelConfig
    compute: Compute

    def setup(self) -> None:
        dense = partial(nn.Dense, use_bias=False, dtype=self.compute.dtype)
        self.gate_proj = dense(self.config.intermediate_size)
        self.up_proj = dense(self.config.intermediate_size)
        self.down_proj = dense(self.config.hidden_size)

    def __call__(self, x: Float[jax.Array, "N D"]) -> Float[jax.Array, "N D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around."""

    config: ModelConfig
    compute: Compute

    def setup(self) -> None:
        self.input_norm = RMSNorm(self.config.rms_norm_eps)
        self.attention = Attention(self.config, self.compute)
        self.mlp_norm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = MLP(self.config, self.compute)

    def __call__(self, x: Float[jax.Array, "N D"], rotation: Rotation, segments: Int[jax.Array, "B T"]) -> Float[jax.Array, "N D"]:
        x = x + self.attention(self.input_norm(x), rotation, segments)
        return x + self.mlp(self.mlp_norm(x))

    def extend(
        self, x: Float[jax.Array, "N D"], rotation: Rotation, start: Int[jax.Array, " B"], cache: LayerCache
    ) -> tuple[Float[jax.Array, "N D"], LayerCache]:
        mixed, cache = self.attention.extend(self.input_norm(x), rotation, start, cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nn.Module):
    """Token ids to final hidden states; `unembed` gives the matrix that turns those into logits."""

    config: ModelConfig
    compute: Compute = FLOAT32

    def setup(self) -> None:
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=nn.initializers.normal(0.02))
        block = nn.remat(Block) if self.compute.remat else Block
        self.layers = [block(c, self.compute) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_embeddings:
            self.unembedding = self.param("unembedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))

    def __call__(
        self, tokens: Int[jax.Array, "B T"], positions: Int[jax.Array, "B T"], segments: Int[jax.Array, "B T"]
    ) -> Float[jax.Array, "B T D"]:
        """Whole rows. A token sees itself and earlier tokens of its own segment; padding (segment 0) sees only padding."""
        rotation = cos_sin(self.config.rope, self.config.head_dim, positions)
        x = self.embed(tokens.ravel()).astype(self.compute.dtype)  # rows of the table, not the table: its gradient adds up in f32
        for layer in self.layers:
            x = layer(x, rotation, segments)
        return self.norm(x).reshape(*tokens.shape, -1)

    def extend(self, tokens: Int[jax.Array, "B C"], start: Int[jax.Array, " B"], cache: Cache) -> tuple[Float[jax.Array, "B C D"], Cache]:
        """Append C tokens to every row: keys and values go to cache slots start .. start+C-1, token i sees slots up to start+i.

        Slots past a row's true length may hold anything: they are overwritten before they are seen. The caller keeps
        start + C <= S: the write would be shifted, as `lax.dynamic_update_slice` clamps.
        """
        positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
        rotation = cos_sin(self.config.rope, self.config.head_dim, positions)
        x = self.embed(tokens.ravel()).astype(self.compute.dtype)
        extended = []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, layer_cache = layer.extend(x, rotation, start, layer_cache)
            extended.append(layer_cache)
        return self.norm(x).reshape(*tokens.shape, -1), extended


def _write(cache: Float[jax.Array, "B KV a b"], new: Float[jax.Array, "B KV c d"], start: Int[jax.Array, " B"], axis: int) -> jax.Array:
    """`new` from `start` on, which every row has its own of, along axis 2 or 3."""
    write = partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(write)(cache, new.astype(cache.dtype), start)


def init_cache(config: ModelConfig, batch: int, length: int) -> Cache:
    """Empty keys and values for every layer."""
    heads = batch, config.num_kv_heads
    return [(jnp.zeros((*heads, config.head_dim, length)), jnp.zeros((*heads, length, config.head_dim))) for _ in range(config.num_layers)]


def map_cache(change: Callable[..., jax.Array], *caches: _Caches) -> _Caches:
    """`change(array, ..., axis)` of the keys and of the values of every layer; time is along `axis`. Further caches give further arrays."""
    return [(change(*(keys for keys, _ in layer), 3), change(*(values for _, values in layer), 2)) for layer in zip(*caches, strict=True)]


def cache_length(cache: Cache) -> int:
    """S: slots of a row."""
    return cache[0][1].shape[2]


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random weights. Lazily: nothing of a forward pass is computed."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    variables: Any = Decoder(config).lazy_init(key, tokens, tokens, tokens)
    return variables["params"]


def unembed(params: Params) -> Float[jax.Array, "V D"]:
    """The matrix whose rows score the hidden states: logits = hidden @ unembed(params).T."""
    return params["unembedding"] if "unembedding" in params else params["embed"]["embedding"]
