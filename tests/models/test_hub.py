"""A model's folder by path, or by name out of a cache as huggingface_hub lays it out."""

import subprocess
import sys

import pytest

from agentrl_jax.models.hf_config import PretrainedError
from agentrl_jax.models.hub import model_folder


def run(code, tmp_path):
    """In a process of its own: huggingface_hub reads the environment once."""
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=True).stdout


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_name_is_found_in_the_cache_without_a_network(tmp_path):
    model = tmp_path / "cache" / "models--owner--tiny"
    snapshot = model / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(snapshot.name)
    found = run("from agentrl_jax.models.hub import model_folder; print(model_folder('owner/tiny'))", tmp_path)
    assert found.strip() == str(snapshot)


def test_a_name_that_is_nowhere_says_what_to_do(tmp_path):
    code = (
        "from agentrl_jax.models.hub import model_folder\n"
        "from agentrl_jax.models.hf_config import PretrainedError\n"
        "try: model_folder('owner/absent')\n"
        "except PretrainedError as error: print(error)"
    )
    assert "owner/absent: no such folder, not in the hub's cache" in run(code, tmp_path)


@pytest.mark.parametrize("name", ["no/such/folder", "/nowhere/policy", "two words"])
def test_what_cannot_be_a_name_is_a_folder_that_is_missing(name):
    with pytest.raises(PretrainedError, match="no such folder, and no name of a model"):
        model_folder(name)
