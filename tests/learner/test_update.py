"""The jitted update. With `SGD` at rate 1 the change of the weights is the gradient, so gradients are compared through the public door."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax import credit, objective
from agentrl_jax.data.batch import Batch
from agentrl_jax.data.collate import collate
from agentrl_jax.data.episode import Ending
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.objective import Signals
from tests.data.strategies import make_episode

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
SGD = optax.sgd(1.0)
LOSS = partial(objective.ppo, entropy=0.01)
LEARNER = Learner(MODEL, SGD, credit.grpo, LOSS)

EPISODES = [
    make_episode("a", group="g", reward=1.0, turns=2, seed=1),
    make_episode("b", group="g", reward=0.0, turns=3, segments=2, seed=2),
    make_episode("c", group="h", reward=0.5, turns=1, action=5, seed=3),
    make_episode("d", group="h", reward=1.0, turns=2, prompt=9, seed=4, temperature=0.7),
    make_episode("e", group="g", reward=0.0, turns=4, action=2, seed=5),
]


@cache
def weights():
    return init_params(MODEL, jax.random.key(0))


def batch_of(episodes, **options) -> Batch:
    return jax.device_put(collate(episodes, row_length=64, row_multiple=4, **options)[0])


def rows_of(batch):
    return jnp.arange(len(batch.tokens.ids), dtype=jnp.int32)


def updated(learner, batch, *, advantages=None, reference=None, rows=None):
    """New state and metrics of one update from the same weights."""
    advantages = learner.signals(batch).advantages if advantages is None else advantages
    rows = rows_of(batch) if rows is None else rows
    return learner.update(learner.init(weights()), batch, Signals(advantages, reference), rows)


def gradient(learner, batch, **options):
    state, metrics = updated(learner, batch, **options)
    assert metrics["skipped"] == 0
    return jax.tree.map(jnp.subtract, weights(), state.params)


def assert_close(ours, theirs, atol=1e-6):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=atol), ours, theirs)


def assert_same_bits(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(("reduction", "pieces"), [("token", 2), ("token", 4), ("episode", 4), ("group", 2)])
def test_one_batch_is_any_split_of_it(reduction, pieces):
    """Ragged pieces, one of them empty: five episodes in rows of their own and three rows of padding."""
    batch = batch_of(EPISODES, pack=False)
    whole = Learner(MODEL, SGD, credit.grpo, LOSS, reduction)
    split = replace(whole, accumulate=pieces)
    assert_close(gradient(split, batch), gradient(whole, batch))
    (_, one), (_, many) = updated(whole, batch), updated(split, batch)
    for name in one:
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_rows_may_come_in_any_order():
    batch = batch_of(EPISODES, pack=False)
    assert_close(gradient(LEARNER, batch, rows=rows_of(batch)[::-1]), gradient(LEARNER, batch))


def test_packed_rows_are_padded_ones():
    packed, padded = batch_of(EPISODES), batch_of(EPISODES, pack=False)
    assert len(packed.tokens.ids) < len(padded.tokens.ids)
    assert_close(gradient(LEARNER, packed), gradient(LEARNER, padded))


def test_the_trainer_against_itself_has_a_ratio_of_one():
    """Exactly 1 between two calls of `logprobs`; to rounding in the gradient's program, which XLA fuses in its own way."""

    def largest(inputs):
        ppo = objective.ppo(inputs, clip_low=1e-5, clip_high=1e-5)
        apart = jnp.where(inputs.mask, jnp.abs(inputs.new - inputs.behaviour), 0.0)
        return replace(ppo, metrics=ppo.metrics | {"apart": (apart > 2e-6).astype(jnp.float32)})

    learner = replace(LEARNER, loss=largest)
    batch = batch_of(EPISODES)
    own = learner.logprobs(weights(), batch.tokens)
    assert_same_bits(learner.logprobs(learner.init(weights()).params, batch.tokens), own)
    _, metrics = updated(learner, replace(batch, tokens=replace(batch.tokens, logprob=own)))
    assert (metrics["apart"], metrics["clip_fraction"]) == (0, 0)
    np.testing.assert_allclose(metrics["ratio"], 1.0, rtol=1e-6)


def test_logprobs_are_those_of_the_tokens_themselves():
    """Against the plain definition: all logits of a row, divided by the temperature, one position earlier."""
    from agentrl_jax.models.decoder import Decoder, unembed

    batch = batch_of([EPISODES[3]])
    t = batch.tokens
    hidden = Decoder(MODEL).apply({"params": weights()}, t.ids, t.position, t.segment)
    logits = (hidden @ unembed(weights()).T)[:, :-1] / t.temperature[:, 1:, None]
    all_of_them = jnp.take_along_axis(jax.nn.log_softmax(logits), t.ids[:, 1:, None], axis=2)[..., 0]
    expected = jnp.where(t.mask[:, 1:], all_of_them, 0.0)
    np.testing.assert_allclose(LEARNER.logprobs(weights(), t)[:, 1:], expected, atol=1e-5)


def test_nothing_under_the_mask_reaches_the_weights():
    """NaN and inf wherever no trained token is: in log-probs of the sampler and of the reference, and in advantages."""
    batch = batch_of(EPISODES)
    learner = replace(LEARNER, loss=partial(objective.ppo, kl=0.1))
    # One turn of one episode was sampled and must not be trained.
    table = replace(batch.episodes, turn_in_loss=batch.episodes.turn_in_loss.at[0, 1].set(False))
    batch = replace(batch, episodes=table)
    trained = batch.tokens.mask & table.turn_in_loss[batch.tokens.episode, batch.tokens.turn]
    assert 0 < trained.sum() < batch.tokens.mask.sum()

    def poisoned(x, poison):
        return jnp.where(trained, x, poison)

    advantages = learner.signals(batch).advantages
    reference = jnp.full(advantages.shape, -0.7)
    clean, clean_metrics = updated(learner, batch, advantages=advantages, reference=reference)
    for poison in (jnp.nan, jnp.inf, -jnp.inf):
        logprob = poisoned(batch.tokens.logprob, poison)
        state, metrics = updated(
            learner,
            replace(batch, tokens=replace(batch.tokens, logprob=logprob)),
            advantages=poisoned(advantages, poison),
            reference=poisoned(reference, poison),
        )
        assert_same_bits(state.params, clean.params)
        assert_same_bits(metrics, clean_metrics)


def test_what_is_masked_is_as_good_as_absent():
    """Dropping an episode from the loss gives the gradient of the batch that never had it; statistics stay those of the group."""
    limited = make_episode("f", group="g", reward=1.0, turns=3, ending=Ending.TOKEN_LIMIT, seed=6)
    dropped = batch_of([*EPISODES, limited], limits="drop")
    assert_close(gradient(LEARNER, dropped), gradient(LEARNER, batch_of(EPISODES)))


def test_tokens_of_others_have_no_gradient():
    """The last tokens of a segment, where the policy did not write them, can be anything."""
    batch = batch_of(EPISODES, pack=False)
    t = batch.tokens
    last = jnp.max(jnp.where(t.mask, t.position, -1), axis=1, keepdims=True)
    after = t.position > last
    extended = replace(t, segment=jnp.maximum(t.segment, 1), position=jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), t.ids.shape))
    changed = replace(extended, ids=jnp.where(after | (t.segment == 0), 17, t.ids))
    assert_close(gradient(LEARNER, replace(batch, tokens=changed)), gradient(LEARNER, batch))


def test_an_empty_loss_changes_nothing_and_is_counted():
    lost = [make_episode(f"x{i}", reward=None, ending=Ending.SANDBOX_FAILED, seed=i) for i in range(3)]
    adam = replace(LEARNER, optimizer=optax.adamw(1e-2, weight_decay=0.1))
    state, metrics = updated(adam, batch_of(lost))
    assert_same_bits(state, adam.init(weights()))
    assert (metrics["skipped"], metrics["loss"], metrics["tokens"]) == (1, 0, 0)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    adam = Learner(MODEL, optax.adamw(1e-2), credit.grpo, lambda inputs: objective.PerToken(inputs.new * jnp.inf))
    state, metrics = updated(adam, batch_of(EPISODES))
    assert_same_bits(state, adam.init(weights()))
    assert metrics["skipped"] == 1


def test_equal_rewards_teach_nothing():
    equal = [replace(episode, outcome=replace(episode.outcome, reward=0.1)) for episode in EPISODES]
    learner = replace(LEARNER, loss=objective.ppo)
    state, metrics = updated(learner, batch_of(equal))
    assert_same_bits(state.params, weights())
    assert metrics["gradient_norm"] == 0


def test_an_update_moves_the_policy_towards_what_was_rewarded():
    batch = batch_of(EPISODES)
    tokens = replace(batch.tokens, logprob=LEARNER.logprobs(weights(), batch.tokens))
    batch = replace(batch, tokens=tokens)
    learner = replace(LEARNER, optimizer=optax.sgd(0.01), loss=objective.ppo)
    state, _ = updated(learner, batch)
    moved = LEARNER.logprobs(state.params, tokens) - tokens.logprob
    assert jnp.sum(moved * learner.signals(batch).advantages) > 0


def test_buffers_of_the_old_state_are_donated_and_the_given_weights_are_not():
    batch = batch_of(EPISODES)
    before = LEARNER.init(weights())
    state, _ = LEARNER.update(before, batch, LEARNER.signals(batch), rows_of(batch))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((weights(), state)))


def test_the_same_shapes_compile_once():
    learner = replace(LEARNER, loss=partial(objective.ppo, clip_high=0.28))
    before = Learner.update._cache_size()
    state = learner.init(weights())
    for seed in range(3):
        episodes = [replace(episode, id=f"{episode.id}{seed}", group=f"{episode.group}{seed}") for episode in EPISODES]
        batch = batch_of(episodes)
        state, _ = learner.update(state, batch, learner.signals(batch), rows_of(batch))
    assert Learner.update._cache_size() == before + 1
    assert state.updates == 3
