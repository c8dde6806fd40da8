"""Which devices hold what: rows of a batch are split, weights are whole on every device."""

import os

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = "data"


def split_cpu(most: int = 4) -> None:
    """Make each CPU core, `most` at most, a device of its own. Call it before anything else uses JAX.

    XLA runs many of a small model's operations on one thread. Two devices with half of the rows each keep two cores busy: a training
    step of `config.SMALL` takes 5/8 of the time.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", min(os.cpu_count() or 1, most))


def rows_mesh(devices: int | None = None) -> Mesh:
    """The first `devices` of this machine, or all, along the axis that rows are split over."""
    return Mesh(jax.devices()[:devices], (ROWS,))


def everywhere(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
