"""One stored case of each reference, in a process of its own (float64); `make golden` checks all of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.golden import models

FOLDER = Path(__file__).parent


def checked(folder, *arguments):
    command = [sys.executable, str(FOLDER / "run.py"), str(folder), *arguments]
    # The suite's own strictness is for the package, not for adapters.
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=plain)


ONE_EACH = (
    "verl.gae",
    "verl.loss_vanilla",
    "verl.rollout_rs_mask",
    "gigpo.joint",
    "ragen.bi_level_gae",
    "vagen.no_concat_gae_first",
    "areal.ppo_actor_loss",
    "trl.loss_grpo",
    "slime.mis_weights",
    "prime_rl.loss_default",
    "roll.pg_topr",
    "rlax.vtrace_td_error_and_advantage",
)


@pytest.mark.slow
def test_a_case_of_each_reference_passes():
    done = checked(FOLDER, "--first", *ONE_EACH)
    assert done.returncode == 0, done.stdout + done.stderr
    (total,) = (line.split() for line in done.stdout.splitlines() if line.startswith("all "))
    assert total == ["all", str(len(ONE_EACH)), "0", "0"]


def test_a_wrong_number_fails(tmp_path):
    shutil.copy(FOLDER / "manifest.json", tmp_path)
    with np.load(FOLDER / "verl_kl.npz") as arrays:
        changed = {name: x + 1e-3 if "/out/kl" in name else x for name, x in arrays.items()}
    np.savez(tmp_path / "verl_kl.npz", **changed)
    done = checked(tmp_path, "--first", "verl.kl_penalty")
    assert done.returncode == 1
    assert "verl.kl_penalty.00  kl: largest difference 0.001" in done.stdout


MODEL = FOLDER / "hf_models" / "qwen3_yarn_tied"


@pytest.mark.slow
def test_a_model_without_a_manifest_is_checked_by_what_its_folder_stores(tmp_path):
    shutil.copytree(MODEL, tmp_path / "hf_models" / "other")
    done = checked(tmp_path, "--first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1].split() == ["hf.other", "1", "0", "0"]


@pytest.mark.slow
def test_a_folder_with_nothing_to_check_is_an_error(tmp_path):
    done = checked(tmp_path)
    assert done.returncode == 1
    assert "nothing to check" in done.stdout


@pytest.mark.slow
def test_wrong_numbers_of_a_model_fail_by_name(tmp_path):
    """A logit, a token and a gradient norm; the other 13 are right."""
    folder = shutil.copytree(MODEL, tmp_path / "hf_models" / MODEL.name)
    with np.load(MODEL / "io.npz") as arrays:
        stored = dict(arrays)
    stored["full/out/logits"][0, 3, 7] += 2e-4
    stored["greedy/out/new_tokens"][1, 0] ^= 1
    np.savez(folder / "io.npz", **stored)
    (facts,) = (entry for path, entry in models.described(FOLDER).items() if path == MODEL)
    facts["grad_norms_right_padded"]["model.norm.weight"] += 1e-3
    row, lines = models.judged(folder, facts)
    assert row == [13, 3, 0]
    assert [line.split(":")[0] for line in lines] == [
        f"hf.{MODEL.name}  {number}" for number in ("full logits", "greedy tokens", "right_padded gradient norms")
    ]
    assert "model.norm.weight" in lines[2]


def test_a_model_that_the_package_refuses_is_unsupported_and_a_damaged_one_fails(tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").write_bytes(b"")
    row, (line,) = models.judged(folder, {})
    assert row == [0, 1, 0]
    assert "model.safetensors: not a whole safetensors file" in line
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_moe"}))
    row, (line,) = models.judged(folder, {})
    assert row == [0, 0, 1]
    assert "model_type 'qwen3_moe' is not supported" in line
