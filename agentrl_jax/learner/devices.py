"""A computation on rows, by every device on its share of them and of the weights: gathered before, and the gradient scattered after."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from agentrl_jax.models.sharding import ROWS, specs_of

SUMMED = (*ROWS, "sequence")


def on_rows(mesh: Mesh, function: Callable[..., Any], params: Any, *rows: Any, out: Callable[[Any], Any]) -> Any:
    """`function(split, params, *rows)` on every device's share of the rows and of the weights.

    split: for every array of `params` the spec of its axis along `fsdp`, which `gathered` and `summed` want
    out:   the specs of the results, by `split`

    Along `sequence` devices have the same rows, whole, and `function` shares their tokens out. XLA's partitioner is left the axis `tensor`
    alone, and nothing where that has one device.
    """
    split = jax.tree.map(_fsdp_only, specs_of(mesh, params), is_leaf=lambda x: isinstance(x, PartitionSpec))
    by_hand = {axis for axis, size in mesh.shape.items() if axis in SUMMED or size == 1}
    specs = (split, *[PartitionSpec(ROWS)] * len(rows))
    shares = jax.shard_map(partial(function, split), mesh=mesh, in_specs=specs, out_specs=out(split), axis_names=by_hand, check_vma=False)
    return shares(params, *rows)


def gathered(params: Any, split: Any) -> Any:
    """Whole weights from the shards along `fsdp`. Its transpose sums over `fsdp` and leaves each device its shard."""
    return jax.tree.map(
        lambda x, spec: jax.lax.all_gather(x, "fsdp", axis=tuple(spec).index("fsdp"), tiled=True) if any(spec) else x, params, split
    )


def summed(values: Any, gradient: Any, split: Any) -> tuple[Any, Any]:
    """Sums of all devices' values and gradients. What `gathered` split is summed over `fsdp` already."""
    whole = jax.tree.map(lambda x, spec: None if any(spec) else x, gradient, split)
    shards = jax.tree.map(lambda x, spec: x if any(spec) else None, gradient, split)
    # Whole gradients in one call, so that XLA sums them all at once.
    (values, whole), shards = jax.lax.psum((values, whole), SUMMED), jax.lax.psum(shards, ("data", "sequence"))
    return values, jax.tree.map(lambda a, b: b if a is None else a, whole, shards, is_leaf=lambda x: x is None)


def _fsdp_only(spec: PartitionSpec) -> PartitionSpec:
    axes = [axis if axis == "fsdp" else None for axis in spec]
    return PartitionSpec(*axes) if any(axes) else PartitionSpec()
