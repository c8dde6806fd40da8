"""Causal attention inside segments by the fastest kernel of the platform, and attention to a key-value cache."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentrl_jax.models.blockwise import blockwise_attention, by_group, by_token, segment_starts
from agentrl_jax.models.splash import LANES, splash_attention


def causal_attention(
    q: Float[jax.Array, "B T H d"],
    k: Float[jax.Array, "B T KV d"],
    v: Float[jax.Array, "B T KV d"],
    segments: Int[jax.Array, "B T"],
    platform: str | None = None,
) -> Float[jax.Array, "B T H d"]:
    """softmax(q kᵀ) v over the keys at or before the query in its segment; `q` comes scaled.

    Head h of q uses head h // (H / KV) of k and v. A segment is a run of one number that no other run of the row has, and padding is
    one more segment, so that no softmax is over nothing and all forms agree everywhere.

    platform: where it will run, "cpu", "cuda" or "tpu"; None: on the devices of this process. See `form_of`
    """
    match form_of(platform or _platform(), q.shape, q.dtype):
        case "splash":
            return splash_attention(q, k, v, segments)
        case "cudnn":
            return fused_attention(q, k, v, segments, "cudnn")
        case "blocks":
            return blockwise_attention(q, k, v, segment_starts(segments))


def form_of(platform: str, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Literal["blocks", "cudnn", "splash"]:
    """The kernel for queries [B, T, H, d]: on TPUs splash attention, whose blocks are whole lanes of tokens; on CUDA devices cuDNN's,
    which takes 16-bit types, an even T and heads of up to 128 in steps of 8; blocks in plain JAX otherwise.
    """
    _, t, _, d = shape
    if platform == "tpu" and t % LANES == 0:
        return "splash"
    if platform == "cuda" and jnp.dtype(dtype).itemsize == 2 and t % 2 == 0 and d % 8 == 0 and d <= 128:
        return "cudnn"
    return "blocks"


def fused_attention(
    q: Float[jax.Array, "B T H d"],
    k: Float[jax.Array, "B T KV d"],
    v: Float[jax.Array, "B T KV d"],
    segments: Int[jax.Array, "B T"],
    implementation: Literal["cudnn", "xla"],
) -> Float[jax.Array, "B T H d"]:
    """`causal_attention` as one call of JAX. To cuDNN the segments are a bias [B, 1, T, T], which all layers share."""
    same = (segments[:, :, None] == segments[:, None, :])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=same, scale=1.0, is_causal=True, implementation=implementation)


def _platform() -> str:
    """Of the devices of this process; "cuda" only where cuDNN's attention runs, from compute capability 8 on."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    device = jax.devices()[0]
    cuda = "cuda" in device.client.platform_version and int(device.compute_capability.split(".")[0]) >= 8
    return "cuda" if cuda else "gpu"


def cached_attention(
    q: Float[jax.Array, "B C H d"], k: Float[jax.Array, "B KV d S"], v: Float[jax.Array, "B KV S d"], start: Int[jax.Array, " B"]
) -> Float[jax.Array, "B C H d"]:
    """softmax(q kᵀ) v over the slots 0 .. start + i of query i; `q` comes scaled. The queries of a group are further rows.

    Keys lie as the columns of the scores' matmul, and one query a row mixes the values without a matmul: on CPU 2.3 times as fast.
    """
    grouped = by_group(q, v)
    b, kv, g, c, d = grouped.shape
    scores = (grouped.reshape(b, kv, g * c, d) @ k).reshape(b, kv, g, c, -1)
    visible = jnp.arange(k.shape[3])[None, None] <= (start[:, None] + jnp.arange(c)[None])[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
    if c == 1:
        mixed = jnp.sum(weights[:, :, :, 0, :, None] * v[:, :, None], axis=3)
    else:
        mixed = weights.reshape(b, kv, g * c, -1) @ v
    return by_token(mixed.reshape(b, kv, g, c, d))
