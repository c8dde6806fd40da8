"""Several processes as one JAX program."""

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialise_from_environment() -> None:
    """Join the other processes of the run; nothing happens in a run of one. Call it before anything else uses JAX.

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID tell who they are; without these, JAX's own
    detection is asked on a TPU pod slice, under srun and under mpirun. Raises ValueError where only some are set.
    """
    found = {name: value for name in VARIABLES if (value := os.environ.get(name))}
    if not found:
        if _of_a_cluster():
            jax.distributed.initialize()
        return
    if missing := [name for name in VARIABLES if name not in found]:
        raise ValueError(f"{', '.join(found)} set but not {', '.join(missing)}: set all three, or none for a run of one process")
    address, *numbers = found.values()
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise ValueError(f"JAX_PROCESS_ID={numbers[1]} must be a number below JAX_NUM_PROCESSES={numbers[0]}")
    if int(numbers[0]) > 1:
        jax.distributed.initialize(address, int(numbers[0]), int(numbers[1]))


def leads() -> bool:
    """Whether this is process 0, as that of a run of one is."""
    return jax.process_index() == 0


def broadcast(message: bytes = b"") -> bytes:
    """The message of process 0, in every process. All of them call it, and wait until all have; what the others pass is ignored."""
    if jax.process_count() == 1:
        return message
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    room = np.zeros(1 << size.bit_length(), np.uint8)  # few lengths: XLA compiles for each
    if leads():
        room[:size] = np.frombuffer(message, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(room), np.uint8)[:size].tobytes()


def local(tree: Any) -> Any:
    """Arrays that this process can read whole: those that it holds a part of are gathered to its host, one by one, by all processes."""
    return jax.tree.map(lambda x: x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True), tree)


def _of_a_cluster() -> bool:
    sizes = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return any(size.isdecimal() and int(size) > 1 for size in sizes) or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
