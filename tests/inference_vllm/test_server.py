"""A server that cannot start says why, and none outlives whoever started it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from agentrl_jax.inference.protocol import InferenceError, Sampling
from agentrl_jax.inference.vllm import VLLM
from agentrl_jax.inference.vllm_server import serve
from tests.inference_vllm.served import CONFIG, weights, write
from tests.processes import descendants, until_gone


async def test_a_folder_without_a_model_is_refused_at_once(tmp_path, vllm_venv):
    with pytest.raises(InferenceError, match=r"no config\.json there; name the folder"):
        async with serve(tmp_path, venv=vllm_venv):
            pass


async def test_an_environment_without_vllm_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(InferenceError, match=r"no vLLM there; run `python -m agentrl_jax\.inference\.vllm_server install"):
        async with serve(tmp_path, venv=tmp_path):
            pass


@pytest.mark.real("vllm")
@pytest.mark.slow
async def test_what_vllm_cannot_serve_is_one_error_with_the_cause(tmp_path, vllm_venv):
    folder = write(tmp_path / "policy", CONFIG, weights(CONFIG, 0))
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 288}
    (folder / "config.json").write_text(json.dumps(config))
    before = descendants(os.getpid())
    with pytest.raises(InferenceError, match=r"vLLM ended instead of starting: .*288") as raised:
        async with serve(folder, venv=vllm_venv):
            pass
    assert "the end of its log" in str(raised.value)
    assert not until_gone(descendants(os.getpid()) - before)


@pytest.mark.real("vllm")
@pytest.mark.slow
async def test_prompts_beyond_one_batch_are_sampled_with_their_seeds(tmp_path, vllm_venv):
    folder = write(tmp_path / "policy", CONFIG, weights(CONFIG, 0))
    prompt = np.arange(1, 61, dtype=np.int32)
    async with serve(folder, venv=vllm_venv, context_limit=128) as server, VLLM([server.url]) as client:
        sampling = [Sampling(4, seed=seed) for seed in range(64)]
        done = await asyncio.gather(*(client.generate(prompt, each, session=str(each.seed)) for each in sampling))
    assert all(len(completion.tokens) == 4 for completion in done)


@pytest.mark.real("vllm")
@pytest.mark.slow
def test_the_server_of_a_killed_process_ends(tmp_path, vllm_venv):
    write(tmp_path / "policy", CONFIG, weights(CONFIG, 0))
    program = """
import asyncio, sys
from pathlib import Path
from agentrl_jax.inference.vllm_server import serve
async def main(folder, venv, log):
    async with serve(folder, venv=venv, log=log):
        print("up", flush=True)
        await asyncio.sleep(600)
asyncio.run(main(*map(Path, sys.argv[1:])))
"""
    arguments = [str(tmp_path / "policy"), str(vllm_venv), str(tmp_path / "log")]
    root = Path(__file__).parents[2]
    scratch = Path(tempfile.mkdtemp())  # not in tmp_path: names of sockets must be short
    command, env = [sys.executable, "-c", program, *arguments], os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n", (tmp_path / "log").read_text()
            started = descendants(process.pid)
            assert len(started) >= 2
            assert list(scratch.glob("vllm-*"))
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert not until_gone(started)
    assert not list(scratch.glob("vllm-*"))
    shutil.rmtree(scratch)
