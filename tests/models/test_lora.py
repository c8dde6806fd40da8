from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax import credit, objective
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.checkpoint import Checkpoints
from agentrl_jax.learner.update import Learner
from agentrl_jax.models import lora
from agentrl_jax.models.decoder import ModelConfig, init_params
from tests.data.strategies import make_episode

MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, attention_bias=True
)
LEARNER = Learner(MODEL, optax.adamw(1e-2), credit.grpo, objective.ppo)
EPISODES = [make_episode(f"e{i}", group=f"g{i % 2}", reward=float(i > 1), turns=2, seed=i, prompt=4 + i) for i in range(4)]


@cache
def base():
    return init_params(MODEL, jax.random.key(0))


def adapter(rank=4, **options):
    return lora.init(base(), jax.random.key(1), rank=rank, alpha=8.0, **options)


def moved(trained):
    """The same, as if it had been trained: no factor is 0."""
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), trained)


@cache
def batch():
    return jax.device_put(collate(EPISODES, row_length=64, row_multiple=2)[0])


def update(learner, state, weights):
    rows = jnp.arange(len(batch().tokens.ids), dtype=jnp.int32)
    return learner.update(state, batch(), learner.signals(batch()), rows, weights)


def assert_same_bits(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_new_adapter_changes_nothing():
    new = adapter()
    assert_same_bits(lora.whole(new, base()), base())
    assert_same_bits(LEARNER.logprobs(new, batch().tokens, base()), LEARNER.logprobs(base(), batch().tokens))
    assert all(jnp.any(a) and not jnp.any(b) for a, b in zip(new.a.values(), new.b.values(), strict=True))


@pytest.mark.parametrize("projections", [lora.PROJECTIONS, ("q_proj", "v_proj"), ("down_proj",)])
def test_through_the_factors_is_through_the_merged_weights(projections):
    trained = moved(adapter(projections=projections))
    merged = lora.whole(trained, base())
    low_rank = LEARNER.logprobs(trained, batch().tokens, base())
    np.testing.assert_allclose(low_rank, LEARNER.logprobs(merged, batch().tokens), atol=2e-5)
    assert np.abs(low_rank - LEARNER.logprobs(base(), batch().tokens)).max() > 1e-2
    assert len(trained.a) == MODEL.num_layers * len(projections)


def test_a_merged_weight_by_hand():
    params = {"q_proj": {"kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]])}, "other": {"kernel": jnp.ones((2, 2))}}
    trained = lora.Adapter({"q_proj": jnp.array([[1.0], [-1.0]])}, {"q_proj": jnp.array([[0.5, 0.25]])}, 2.0)
    found = lora.merged(params, trained)
    np.testing.assert_array_equal(found["q_proj"]["kernel"], [[2.0, 2.5], [2.0, 3.5]])
    np.testing.assert_array_equal(found["other"]["kernel"], params["other"]["kernel"])


def test_only_the_adapter_is_trained_and_its_gradient_is_that_of_the_merged_weights():
    learner = Learner(MODEL, optax.sgd(1.0), credit.grpo, objective.ppo)
    before = moved(adapter())
    frozen = jax.tree.map(jnp.copy, base())
    state, metrics = update(learner, learner.init(before), base())
    gradient = jax.tree.map(jnp.subtract, before, state.params)
    full, _ = update(learner, learner.init(lora.merged(base(), before)), None)
    of_kernels = lora.flatten_dict(jax.tree.map(jnp.subtract, lora.merged(base(), before), full.params))
    for name, a in before.a.items():
        of_kernel = before.scale * of_kernels[(*name.split("."), "kernel")]
        np.testing.assert_allclose(gradient.a[name], of_kernel @ before.b[name].T, atol=2e-5)
        np.testing.assert_allclose(gradient.b[name], a.T @ of_kernel, atol=2e-5)
    assert metrics["skipped"] == 0
    assert_same_bits(base(), frozen)


def test_the_optimizer_remembers_nothing_but_the_adapter():
    state = LEARNER.init(adapter(rank=2))
    remembered = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert remembered == 2 * sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(x.size for x in jax.tree.leaves(state)) < sum(x.size for x in jax.tree.leaves(base())) / 2


@jax.numpy_dtype_promotion("standard")  # as outside of tests: flax promotes a bfloat16 kernel and float32 activations
def test_bfloat16_projections_stay_and_their_adapter_learns_in_float32():
    def half(path, leaf):
        return leaf.astype(jnp.bfloat16) if path[-1].key == "kernel" else leaf

    halved = jax.tree.map_with_path(half, base())
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), halved)
    state, metrics = update(LEARNER, LEARNER.init(adapter()), halved)
    assert_same_bits(state, update(LEARNER, LEARNER.init(adapter()), rounded)[0])
    assert metrics["skipped"] == 0
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    kernels = [x for path, x in jax.tree.leaves_with_path(lora.whole(state.params, halved)) if path[-1].key == "kernel"]
    assert {x.dtype for x in kernels} == {jnp.dtype("bfloat16")}


def test_pieces_of_a_minibatch_give_the_update_of_the_whole():
    split = Learner(MODEL, optax.sgd(1.0), credit.grpo, objective.ppo, accumulate=2)
    whole = Learner(MODEL, optax.sgd(1.0), credit.grpo, objective.ppo)
    states = [update(learner, learner.init(moved(adapter())), base())[0] for learner in (split, whole)]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), *states)


def test_a_checkpoint_holds_the_adapter_and_gives_it_back(tmp_path):
    state, _ = update(LEARNER, LEARNER.init(adapter()), base())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        _, restored, _ = checkpoints.restore(LEARNER.init(adapter()))
    assert_same_bits(restored, state)
    assert isinstance(restored.params, lora.Adapter)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="none of the projections w_proj"):
        adapter(projections=("w_proj",))
    with pytest.raises(ValueError, match="pass them as `base`"):
        LEARNER.logprobs(adapter(), batch().tokens)
