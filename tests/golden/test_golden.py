"""One stored case of every function, in a process of its own (float64); `make golden` checks all of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent


def checked(folder, *arguments):
    command = [sys.executable, str(FOLDER / "run.py"), str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_case_of_every_function_passes():
    done = checked(FOLDER, "--first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" in done.stdout.splitlines()[0]


def test_a_wrong_number_fails(tmp_path):
    shutil.copy(FOLDER / "manifest.json", tmp_path)
    with np.load(FOLDER / "verl_kl.npz") as arrays:
        changed = {name: x + 1e-3 if "/out/kl" in name else x for name, x in arrays.items()}
    np.savez(tmp_path / "verl_kl.npz", **changed)
    done = checked(tmp_path, "--first", "verl.kl_penalty")
    assert done.returncode == 1
    assert "verl.kl_penalty.00  kl: largest difference 0.001" in done.stdout
