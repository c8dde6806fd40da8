"""Two processes train one run: one leads, the other follows."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl_jax.models.distributed import initialise_from_environment
from tests import launch


def free_port() -> int:
    """Bound by the leader some seconds later: so not one of those that the kernel deals out, from 32768 on, to whoever asks meanwhile."""
    while True:
        with socket.socket() as tried, suppress(OSError):
            port = random.randrange(20000, 32000)
            tried.bind(("127.0.0.1", port))
            return port


def together(root, *overrides, **leader) -> list[launch.Ended]:
    """The tiny experiment by two processes of two devices each, on a mesh that lies across both. leader: told to the first of them."""
    address = f"127.0.0.1:{free_port()}"

    def start(number: int) -> launch.Ended:
        environment = {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(number),
        }
        return launch.train(
            root,
            "mesh.data=2",
            "mesh.fsdp=2",
            "reference=offloaded",
            *overrides,
            environment=environment,
            **(leader if number == 0 else {}),
        )

    with ThreadPoolExecutor() as threads:
        return list(threads.map(start, range(2)))


@pytest.mark.slow
@pytest.mark.real("bwrap")
def test_two_processes_make_the_run_of_one_and_stop_and_go_on_together(tmp_path, finished):
    leader, follower = together(tmp_path, stop="interrupt,3")
    assert (leader.code, follower.code) == (130, 0), leader.err + follower.err
    assert leader.err.splitlines()[-1] == "stopped; the same command goes on from here"
    assert follower.err == ""
    assert len(launch.measured(tmp_path / "tiny")) == 3

    leader, follower = together(tmp_path)
    assert (leader.code, follower.code) == (0, 0), leader.err + follower.err
    measured = launch.measured(tmp_path / "tiny")
    away = [step.pop("train/kl_reference") for step in measured]  # the run of one measures none
    assert 0 < away[0] < away[-1]
    for here, there in zip(measured, launch.measured(finished), strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5)
    one, two = (load_file(folder / "policy" / "model.safetensors") for folder in (finished, tmp_path / "tiny"))
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.real("bwrap")
def test_what_the_leader_cannot_do_ends_all(tmp_path):
    leader, follower = together(tmp_path, "policy=./not/there/now")
    assert (leader.code, follower.code) == (1, 0)
    assert "error: ./not/there/now: no such folder" in leader.err
    assert follower.err == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("127.0.0.1:1", "2", None), "not JAX_PROCESS_ID: set all three"),
        ((None, None, "0"), "not JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"),
        (("127.0.0.1:1", "2", "2"), "JAX_PROCESS_ID=2 must be a number below JAX_NUM_PROCESSES=2"),
    ],
)
def test_a_half_told_environment_is_refused(monkeypatch, values, message):
    for name, value in zip(("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), values, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        initialise_from_environment()
