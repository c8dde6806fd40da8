"""Causal attention inside segments on TPUs, by JAX's splash attention: FlashAttention in Pallas that skips what the mask hides."""

from functools import cache
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Float, Int

LANES = 128
"""Tokens that T must be a multiple of."""


def splash_attention(
    q: Float[jax.Array, "B T H d"],
    k: Float[jax.Array, "B T KV d"],
    v: Float[jax.Array, "B T KV d"],
    segments: Int[jax.Array, "B T"],
    *,
    interpret: bool = False,
) -> Float[jax.Array, "B T H d"]:
    """softmax(q kᵀ) v over the keys at or before the query that have its segment number; `q` comes scaled.

    interpret: run on any device, slowly: for tests
    """
    kernel = _kernel(q.shape[1], q.shape[2], interpret)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return kernel(q, k, v, kernels.SegmentIds(segments, segments))

    return jax.vmap(row)(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), segments).swapaxes(1, 2)


@cache
def _kernel(t: int, heads: int, interpret: bool) -> Any:
    """The kernel for rows of t tokens, in the largest blocks of up to 512 that divide t. The mask takes half a second at T = 8,192."""
    block = next(size for size in (512, 256, LANES) if t % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((t, t))] * heads)
    with jax.ensure_compile_time_eval():  # arrays that outlive the trace which asked for them first
        return kernels.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
