"""Two processes of two devices each make one step of learning together."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from agentrl_jax.models.distributed import initialise_from_environment


@pytest.mark.slow
def test_two_processes_make_the_step_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(number: int, processes: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "JAX_NUMPY_DTYPE_PROMOTION": "standard",  # optax mixes types
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes} --xla_backend_optimization_level=0",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(number),
        }
        file = str(tmp_path / f"{number}_of_{processes}.npz")
        return subprocess.Popen([sys.executable, "-m", "tests.learner.sharded_update", file, "step:2x2x1x1"], env=environment)

    started = [start(0, 2), start(1, 2), start(0, 1)]
    try:
        assert [process.wait(timeout=200) for process in started] == [0, 0, 0]
    finally:
        for process in started:
            process.kill()
    alone = np.load(tmp_path / "0_of_1.npz")
    for number in range(2):
        together = np.load(tmp_path / f"{number}_of_2.npz")
        assert set(together) == set(alone)
        for name in alone:
            np.testing.assert_allclose(together[name], alone[name], rtol=1e-5, atol=1e-5, err_msg=name)


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
