"""One update is the same whatever the mesh, and weights lie where the table says."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl_jax import credit, objective
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.checkpoint import Checkpoints
from agentrl_jax.learner.update import Learner
from agentrl_jax.models import pretrained
from agentrl_jax.models.decoder import init_params
from agentrl_jax.models.sharding import make_mesh, place, sharding_of
from tests.data.strategies import make_episode
from tests.learner.sharded_update import MODEL

MESHES = {
    "1x1x1x1": ("4x2x1x1", "2x2x1x2x2", "1x2x2x2"),  # the second: in two pieces
    "lora:1x1x1x1": ("lora:1x2x2x2",),
}


@pytest.mark.slow
def test_an_update_on_eight_devices_is_that_on_one(tmp_path):
    """Log-probs, metrics, weights (which move by the gradient) and moments; one program each for log-probs, signals and update."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # compiles faster
    shapes = [shape for one, many in MESHES.items() for shape in (one, *many)]
    command = [sys.executable, "-m", "tests.learner.sharded_update", str(tmp_path / "found.npz"), *shapes]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags, "JAX_NUMPY_DTYPE_PROMOTION": "standard"}, check=True, timeout=280)
    with np.load(tmp_path / "found.npz") as found:
        for one, many in MESHES.items():
            expected = {name.partition("/")[2]: found[name] for name in found if name.startswith(f"{one}/")}
            assert len(expected) > 30
            assert expected["programs"] == 3
            for mesh in many:
                for name, value in expected.items():
                    np.testing.assert_allclose(found[f"{mesh}/{name}"], value, rtol=1e-5, atol=1e-5, err_msg=f"{mesh} {name}")


def test_weights_and_moments_are_split_alike():
    mesh = make_mesh(fsdp=2, tensor=2)
    params = init_params(MODEL, jax.random.key(0))
    moments = optax.adam(1.0).init(params)
    placed, (adam, *_) = place(mesh, (params, moments))
    specs = [jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (placed, adam.mu, adam.nu)]
    assert specs[0] == specs[1] == specs[2]
    assert specs[0]["embed"]["embedding"] == PartitionSpec("tensor", "fsdp")
    assert specs[0]["layers_0"]["attention"]["o_proj"]["kernel"] == PartitionSpec("tensor", "fsdp")
    assert specs[0]["norm"]["scale"] == PartitionSpec()
    assert placed["embed"]["embedding"].addressable_shards[0].data.shape == (32, 8)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(placed), jax.device_get(params))


def test_a_checkpoint_comes_back_onto_the_mesh(tmp_path):
    params = init_params(MODEL, jax.random.key(0))
    here, there = (place(make_mesh(fsdp=n), params) for n in (2, 4))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, here, {})
        _, restored, _ = checkpoints.restore(jax.tree.map(jnp.zeros_like, there))
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, there)


def test_a_dimension_that_does_not_divide_stays_whole_and_is_named_once(caplog):
    where = partial(sharding_of, make_mesh(fsdp=4))
    for _ in range(2):
        assert where(("layers_0", "mlp", "up_proj", "kernel"), (18, 32)).spec == PartitionSpec()
    assert [record.getMessage() for record in caplog.records] == [
        "weights' dimension embed of 18 stays whole: 4 devices along fsdp do not divide it"
    ]


@pytest.mark.parametrize("sizes", [{"fsdp": 3}, {"data": 2, "fsdp": 1}, {"data": 0}, {"fsdp": 0}, {"fsdp": 8}])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="do not make a mesh of the 4 devices here: their product must be that number"):
        make_mesh(**sizes)


def test_rows_that_the_devices_do_not_divide_are_refused():
    learner = Learner(MODEL, optax.sgd(1.0), credit.grpo, objective.ppo, mesh=make_mesh(fsdp=2))
    host = collate([make_episode()], row_length=64, row_multiple=3)[0]
    with pytest.raises(ValueError, match="3 rows cannot be split over 4 devices: collate with row_multiple=4"):
        learner.place(host)


def test_a_model_folder_is_read_onto_the_mesh(tmp_path):
    """Shard by shard; a weight that the table does not split is whole on each."""
    params = init_params(MODEL, jax.random.key(0))
    words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>")).to_str()
    pretrained.write(tmp_path / "model", MODEL, params, pretrained.Chat(words, "", end="<end>", padding="<end>", context_limit=64))
    mesh = make_mesh(fsdp=2, tensor=2)
    _, found = pretrained.read(tmp_path / "model", partial(sharding_of, mesh))
    placed = place(mesh, params)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, placed)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(params))
