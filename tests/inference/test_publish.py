"""The file that a push carries. Pushes into real servers are in tests/inference_vllm."""

import hashlib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load

from agentrl_jax.inference.publish import Weights, tensors_of
from agentrl_jax.models.decoder import init_params
from agentrl_jax.models.pretrained import tensor_names
from tests.inference.conftest import CONFIG


@pytest.mark.parametrize("tied", [False, True])
def test_the_file_holds_every_tensor_turned_as_in_a_checkpoint_after_the_params_are_gone(tied: bool):
    config = replace(CONFIG, tie_embeddings=tied, attention_bias=True)
    params = init_params(config, jax.random.key(0))
    expected = {name: np.array(tensor) for name, tensor in tensors_of(config, params).items()}
    packed = Weights(tensors_of(config, params))
    jax.tree.map(lambda x: x.delete(), params)
    data = packed.read()
    assert hashlib.sha256(data).hexdigest() == packed.sha256
    loaded = load(data)
    assert loaded.keys() == expected.keys() == tensor_names(config).keys()
    for name, tensor in loaded.items():
        np.testing.assert_array_equal(tensor, expected[name])
    assert loaded["model.layers.0.mlp.down_proj.weight"].shape == (config.hidden_size, config.intermediate_size)


def test_the_file_is_gone_with_its_last_user():
    packed = Weights({"a": np.ones(3, np.float16)})
    assert load(packed.read())["a"].tolist() == [1, 1, 1]
    path = Path(packed.path)
    assert path.exists()
    del packed
    assert not path.exists()
