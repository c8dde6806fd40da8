"""One stored case of each reference, in a process of its own (float64); `make golden` checks all of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
