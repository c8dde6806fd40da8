"""Which devices hold what. Rows of a batch are split over `data` and `fsdp`; weights, and the optimizer's moments with them, over `fsdp`
and `tensor`, by the names of their dimensions (ZeRO, https://arxiv.org/abs/1910.02054, section 5.3, and Megatron's split of a layer,
https://arxiv.org/abs/1909.08053, section 3).
"""

import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = ("data", "fsdp")
AXES = (*ROWS, "sequence", "tensor")

MESH_AXIS = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
"""Logical dimension of a weight: mesh axis that it is split over."""

_DIMENSIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("embed", "embedding"): ("vocab", "embed"),
    ("q_proj", "kernel"): ("embed", "heads"),
    ("k_proj", "kernel"): ("embed", "kv_heads"),
    ("v_proj", "kernel"): ("embed", "kv_heads"),
    ("o_proj", "kernel"): ("heads", "embed"),
    ("q_proj", "bias"): ("heads",),
    ("k_proj", "bias"): ("kv_heads",),
    ("v_proj", "bias"): ("kv_heads",),
    ("gate_proj", "kernel"): ("embed", "mlp"),
    ("up_proj", "kernel"): ("embed", "mlp"),
    ("down_proj", "kernel"): ("mlp", "embed"),
}


def split_cpu(most: int = 4) -> None:
    """Make each CPU core, `most` at most, a device of its own, unless JAX is in use already.

    XLA runs many of a small model's operations on one thread. Two devices with half of the rows each keep two cores busy: a training
    step of `config.SMALL` takes 5/8 of the time. With 15 million weights it makes no difference, and with 135 million a step takes 1.2
    times as long, as every device writes a gradient of all weights and steps a copy of them.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with suppress(RuntimeError):  # in use
            jax.config.update("jax_num_cpu_devices", min(os.cpu_count() or 1, most))


def make_mesh(*, data: int | None = None, fsdp: int = 1, tensor: int = 1, sequence: int = 1) -> Mesh:
    """All devices of all processes, [data, fsdp, sequence, tensor]. data: None for what the others leave. Raises ValueError.

    Neighbours share `tensor`, which talks most.
    """
    devices = jax.devices()
    sizes = (len(devices) // max(fsdp * sequence * tensor, 1) if data is None else data, fsdp, sequence, tensor)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise ValueError(
            f"data={data}, fsdp={fsdp}, tensor={tensor}, sequence={sequence} do not make a mesh of the {len(devices)} devices here: "
            "their product must be that number, and without data the others must divide it"
        )
    return Mesh(np.array(devices).reshape(sizes), AXES)


def rows_mesh(devices: int | None = None) -> Mesh:
    """The first `devices` of this process, or all of them, with rows split over them and weights whole on each."""
    return Mesh(np.array(jax.local_devices()[:devices]).reshape(-1, 1, 1, 1), AXES)


def row_parts(mesh: Mesh) -> int:
    """Parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def everywhere(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def spec_of(mesh: Mesh, path: Sequence[Any], shape: Sequence[int]) -> PartitionSpec:
    """How the array at the end of `path` (names, or JAX's keys) is split: a weight by its last two names, so that its moments in an
    optimizer's state lie like it; whatever else is whole everywhere, as is a dimension that its axis does not divide.
    """
    names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
    dimensions = ("vocab", "embed") if names[-1:] == ("unembedding",) else _DIMENSIONS.get(names[-2:], ())
    if len(dimensions) != len(shape):
        return PartitionSpec()
    axes: list[str | None] = []
    for dimension, size in zip(dimensions, shape, strict=True):
        axis = MESH_AXIS[dimension]
        parts = mesh.shape[axis]
        if size % parts:
            _say_whole(dimension, size, axis, parts)
        axes.append(axis if parts > 1 and size % parts == 0 else None)
    # As XLA writes it: with a last None, a program's output would be called another sharding than its input, and be compiled for anew.
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def sharding_of(mesh: Mesh, path: Sequence[Any], shape: Sequence[int]) -> NamedSharding:
    """`spec_of` on this mesh. `partial(sharding_of, mesh)` lets a reader put every weight where it belongs."""
    return NamedSharding(mesh, spec_of(mesh, path, shape))


def specs_of(mesh: Mesh, tree: Any) -> Any:
    """`spec_of` of every array of `tree`."""
    return jax.tree_util.tree_map_with_path(lambda path, x: spec_of(mesh, path, x.shape), tree)


def shardings_of(mesh: Mesh, tree: Any, by_row: tuple[type, ...] = ()) -> Any:
    """`sharding_of` every array of `tree`; the arrays of records of the types `by_row` are split over their rows, the first axis.

    Raises ValueError where the devices do not divide the rows.
    """

    def of(path: Any, x: Any) -> Any:
        return jax.tree.map(partial(_of_rows, mesh), x) if isinstance(x, by_row) else sharding_of(mesh, path, np.shape(x))

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=lambda x: isinstance(x, by_row))


def place(mesh: Mesh, tree: Any, by_row: tuple[type, ...] = ()) -> Any:
    """All arrays of `tree` as `shardings_of` says. Over several processes each holds the whole of every array, and cuts its own shards."""
    shardings = shardings_of(mesh, tree, by_row)
    return jax.tree.map(_cut, tree, shardings) if mesh.is_multi_process else jax.device_put(tree, shardings)


def constrain(mesh: Mesh, tree: Any, by_row: tuple[type, ...] = ()) -> Any:
    """`place`, inside a jit."""
    return jax.lax.with_sharding_constraint(tree, shardings_of(mesh, tree, by_row))


def _of_rows(mesh: Mesh, x: Any) -> NamedSharding:
    rows, parts = np.shape(x)[0], row_parts(mesh)
    if rows % parts:
        raise ValueError(f"{rows} rows cannot be split over {parts} devices: collate with row_multiple={parts} or a multiple of it")
    return NamedSharding(mesh, PartitionSpec(ROWS))


def _cut(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


@cache
def _say_whole(dimension: str, size: int, axis: str, parts: int) -> None:
    logging.getLogger(__name__).warning(
        "weights' dimension %s of %d stays whole: %d devices along %s do not divide it", dimension, size, parts, axis
    )
