import dataclasses
import math
import sys
from pathlib import Path

import jax
import pytest

from agentrl_jax.models.decoder import init_params
from experiments import memory_table
from experiments.memory_table import SIZES, parameters

DOCS = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_counted_as_the_model_makes_them(name):
    config = dataclasses.replace(SIZES[name], num_layers=2)
    made = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert parameters(config) == sum(math.prod(x.shape) for x in jax.tree.leaves(made))


def test_the_table_of_the_docs_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory_table", "--devices", "8", "--tokens", "8192"])
    memory_table.main()
    _, *table = capsys.readouterr().out.splitlines()
    assert "\n".join(table) in DOCS.read_text()
