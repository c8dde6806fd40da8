"""Attention whose heads, and whose tokens, lie on several devices of the learner's mesh.

Along `tensor` every device has some heads. Along `sequence` it has some tokens of every row and runs the layers on these alone; for
attention the devices exchange tokens for heads, and back (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509, section 3.1): each then
sees whole rows of a share of the heads, and the kernel is that of one device. Both axes together must divide the key-value heads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from agentrl_jax.models.attention import causal_attention

SEQUENCE = "sequence"


def attention(
    q: Float[jax.Array, "B t H d"],
    k: Float[jax.Array, "B t KV d"],
    v: Float[jax.Array, "B t KV d"],
    segments: Int[jax.Array, "B T"],
    platform: str | None = None,
) -> Float[jax.Array, "B t H d"]:
    """`causal_attention`, over the devices of the mesh that it is called under, if any. segments: of whole rows, T = t x `sequence`."""
    mesh, of_device = jax.sharding.get_abstract_mesh(), partial(_over_tokens, platform=platform)
    if mesh.shape.get("tensor", 1) == 1:
        return of_device(q, k, v, segments)
    # Else XLA's partitioner would have to see through a kernel, and would give every device all heads.
    heads = PartitionSpec(None, None, "tensor")
    over_heads = jax.shard_map(
        of_device, in_specs=(heads, heads, heads, PartitionSpec()), out_specs=heads, axis_names={"tensor"}, check_vma=False
    )
    return over_heads(q, k, v, segments)


def _over_tokens(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, platform: str | None) -> jax.Array:
    if segments.shape[1] == q.shape[1]:
        return causal_attention(q, k, v, segments, platform)
    swap = partial(jax.lax.all_to_all, axis_name=SEQUENCE, tiled=True)
    q, k, v = (swap(x, split_axis=2, concat_axis=1) for x in (q, k, v))
    return swap(causal_attention(q, k, v, segments, platform), split_axis=1, concat_axis=2)


def share(x: jax.Array, parts: int) -> jax.Array:
    """This device's part of the columns [B, T], of so many along `sequence`."""
    if parts == 1:
        return x
    size = x.shape[1] // parts
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SEQUENCE) * size, size, axis=1)


def joined(x: jax.Array, parts: int) -> jax.Array:
    """All columns, of the devices' shares."""
    return x if parts == 1 else jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True)


def padded(x: jax.Array, parts: int, fill: int) -> jax.Array:
    """With columns of `fill` behind, so that `parts` divides their number."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % parts)), constant_values=fill)
