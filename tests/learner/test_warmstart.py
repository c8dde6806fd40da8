from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from agentrl_jax import credit, objective
from agentrl_jax.config import WarmStart
from agentrl_jax.data.collate import collate
from agentrl_jax.learner.update import Learner
from agentrl_jax.learner.warmstart import imitate
from agentrl_jax.models.decoder import ModelConfig, init_params
from tests.data.strategies import make_episode

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
SETTINGS = WarmStart(updates=25, rows=4, learning_rate=3e-2, warmup=2)
# Some fail: the warm start imitates them all alike.
EPISODES = [make_episode(f"e{i}", group=f"g{i}", reward=float(i % 2), turns=2, vocabulary=4, seed=i) for i in range(9)]


def imitated(episodes, seed=0, settings=SETTINGS, accumulate=1):
    told = []
    start, progress = init_params(MODEL, jax.random.key(0)), lambda done, nll: told.append((done, nll))
    params = imitate(MODEL, start, episodes, settings, row_length=32, seed=seed, accumulate=accumulate, progress=progress)
    return jax.device_get(params), told


def test_it_imitates_what_the_demonstrator_wrote():
    params, told = imitated(EPISODES)
    assert [done for done, _ in told] == [10, 20, 25]
    # Four ids in use, at random: ln 4 is what there is to learn.
    assert told[0][1] > told[-1][1]
    assert told[-1][1] < np.log(8)
    tokens = jax.device_put(collate(EPISODES, row_length=32)[0]).tokens
    learner = Learner(MODEL, optax.sgd(0.0), credit.grpo, objective.supervised)
    nll = -np.asarray(learner.logprobs(params, tokens))[np.asarray(tokens.mask)].mean()
    assert nll < np.log(8)


def test_the_same_seed_is_the_same_policy():
    ours, theirs, other = imitated(EPISODES)[0], imitated(EPISODES)[0], imitated(EPISODES, seed=1)[0]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, ours, other)


def test_pieces_of_an_update_change_memory_alone():
    settings = replace(SETTINGS, rows=2 * jax.device_count(), updates=5)
    whole, pieces = (imitated(EPISODES, settings=settings, accumulate=n)[0] for n in (1, 6))  # 6: the two that divide the rows
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), whole, pieces)


def test_fewer_rows_than_an_update_takes():
    _, told = imitated(EPISODES[:1])
    assert np.isfinite(told[-1][1])
