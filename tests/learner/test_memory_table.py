import dataclasses
import math

import jax
import pytest

from agentrl_jax.models.decoder import init_params
from experiments.memory_table import SIZES, parameters


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_counted_as_the_model_makes_them(name):
    config = dataclasses.replace(SIZES[name], num_layers=2)
    made = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert parameters(config) == sum(math.prod(x.shape) for x in jax.tree.leaves(made))
