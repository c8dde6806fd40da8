"""A small sample of what `make chaos` does to vLLM servers."""

from pathlib import Path

import pytest

from experiments.chaos import servers


@pytest.mark.real("vllm", "bwrap")
@pytest.mark.slow
async def test_a_killed_and_a_hung_server_cost_no_episode(vllm_venv: Path):
    faults = {name: servers.FAULTS[name] for name in ("vLLM is killed", "vLLM hangs")}
    rows = [row async for row in servers.ours(1, vllm_venv, faults)]
    assert [(row.fault, row.times, row.episodes, row.excluded) for row in rows] == [(name, 1, servers.JOBS, 0) for name in faults]


async def test_without_vllm_its_faults_are_left_out_and_said_to_be(tmp_path: Path):
    assert [str(row) async for row in servers.run(1, tmp_path)] == [
        f"faults of vLLM are left out: there is none in {tmp_path} (`make vllm`)"
    ]
