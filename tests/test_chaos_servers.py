"""A small sample of what `make chaos` does to vLLM servers."""

from pathlib import Path

import pytest

from experiments.chaos import servers


@pytest.mark.real("vllm", "bwrap")
@pytest.mark.slow
async def test_a_hung_server_costs_no_episode(vllm_venv: Path):
    """It is killed and started again; one whose engine dies is in tests/inference/test_served.py."""
    fault = "vLLM hangs"
    [row] = [row async for row in servers.ours(1, vllm_venv, {fault: servers.FAULTS[fault]})]
    assert (row.fault, row.times, row.episodes, row.excluded) == (fault, 1, servers.JOBS, 0)


async def test_without_vllm_its_faults_are_left_out_and_said_to_be(tmp_path: Path):
    assert [str(row) async for row in servers.run(1, tmp_path)] == [
        f"faults of vLLM are left out: there is none in {tmp_path} (`make vllm`)"
    ]
