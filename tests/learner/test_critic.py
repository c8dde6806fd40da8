"""The critic in the jitted update. With `SGD` at rate 1 the change of the weights is the gradient."""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from agentrl_jax import credit, objective
from agentrl_jax.config import Critic
from agentrl_jax.data.batch import trained
from agentrl_jax.data.collate import Shape, collate
from agentrl_jax.kernels.diagnostics import explained_variance
from agentrl_jax.learner.critic import CriticLearner, CriticWeights
from agentrl_jax.learner.update import Learner
from agentrl_jax.models import lora
from agentrl_jax.models.decoder import Decoder, ModelConfig, init_params
from agentrl_jax.models.sharding import AXES
from tests.data.strategies import make_episode
from tests.learner.test_update import EPISODES, assert_close, assert_same_bits, rows_of

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
SGD = optax.sgd(1.0)
LARGEST = Shape(rows=8, predict=48)  # of the episodes that are learnt from
HEAD = {"kernel": 0.1 * jax.random.normal(jax.random.key(1), (32,)), "bias": jnp.float32(0.3)}
PLAIN = Learner(MODEL, SGD, credit.gae, partial(objective.ppo, entropy=0.01))


def learner_with(optimizer=SGD, **settings):
    return replace(PLAIN, critic=CriticLearner(Critic(**settings), optimizer))


SEPARATE, SHARED = learner_with(), learner_with(trunk="shared", coefficient=0.25)


@cache
def weights(seed=0):
    return init_params(MODEL, jax.random.key(seed))


def batch_of(episodes=EPISODES, *, pack=False):
    return jax.device_put(collate(episodes, row_length=64, row_multiple=4, pack=pack)[0])


def state_of(learner, params=None):
    """With a head that says something, and a trunk of its own that is not the policy's."""
    state = learner.init(weights() if params is None else params)
    trunk = None if state.critic.weights.trunk is None else jax.tree.map(jnp.copy, weights(1))
    return learner.place(replace(state, critic=replace(state.critic, weights=CriticWeights(jax.tree.map(jnp.copy, HEAD), trunk))))


def updated(learner, batch, state=None):
    state = state_of(learner) if state is None else state
    signals = learner.signals(batch, values=learner.values(state, batch))
    return learner.update(state, batch, signals, rows_of(batch))


def gradients(learner, batch):
    """Of the policy's weights, the head and the critic's own trunk."""
    state, _ = updated(learner, batch)
    before = state_of(learner)
    difference = jax.tree.map(jnp.subtract, (before.params, before.critic.weights), (state.params, state.critic.weights))
    return difference[0], difference[1].head, difference[1].trunk


@cache
def plain_gradients():
    """By the seed of a trunk: gradients of trunk and head of the mean of 0.5 (V - R)^2 over the policy's tokens, with a segment in each row
    and the value of a token read at the one before it. Rewards come at the end and lambda is 1, so every return is the reward."""
    rows = [(e.reward, segment) for e in EPISODES for segment in e.segments]
    ids, mask = (np.stack([np.pad(x, (0, 64 - len(x))) for x in xs]) for xs in zip(*((s.tokens, s.mask) for _, s in rows), strict=True))
    position = jnp.broadcast_to(jnp.arange(64), ids.shape)

    def loss(params, head, ids):
        hidden = Decoder(MODEL).apply({"params": params}, ids, position, jnp.ones_like(ids))
        error = jnp.einsum("btd,d->bt", hidden, head["kernel"])[:, :-1] + head["bias"] - jnp.array([[reward] for reward, _ in rows])
        return jnp.sum(jnp.where(mask[:, 1:], 0.5 * error**2, 0.0)) / mask.sum().astype(np.float32)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return {seed: gradient(weights(seed), HEAD, jnp.asarray(ids)) for seed in (0, 1)}


def test_a_trunk_of_its_own_has_the_gradient_of_a_plain_dense_computation():
    of_policy, of_head, of_trunk = gradients(SEPARATE, batch_of())
    trunk, head = plain_gradients()[1]
    assert_close(of_head, head, atol=1e-5)
    assert_close(of_trunk, trunk, atol=1e-5)
    assert jnp.abs(of_trunk["embed"]["embedding"]).max() > 1e-3


def test_the_gradient_of_a_shared_trunk_is_the_sum():
    """The policy's, from a critic that it is not shared with, and the coefficient's share of the critic's; the head has its own whole."""
    batch = batch_of()
    # The same values, so the same advantages: a separate trunk that is the policy's.
    state = state_of(SEPARATE)
    state = replace(
        state, critic=replace(state.critic, weights=CriticWeights(state.critic.weights.head, jax.tree.map(jnp.copy, weights())))
    )
    alone, _ = updated(SEPARATE, batch, state)
    of_policy = jax.tree.map(jnp.subtract, weights(), alone.params)
    trunk, head = plain_gradients()[0]
    together, of_head, none = gradients(SHARED, batch)
    assert none is None
    assert_close(together, jax.tree.map(lambda a, b: a + 0.25 * b, of_policy, trunk), atol=1e-5)
    assert_close(of_head, head, atol=1e-5)


def test_at_a_coefficient_of_0_the_policy_is_trained_as_without_a_critic():
    batch = batch_of()
    learner = learner_with(trunk="shared", coefficient=0.0)
    state = state_of(learner)
    signals = learner.signals(batch, values=learner.values(state, batch))
    ours, metrics = learner.update(state, batch, signals, rows_of(batch))
    theirs, _ = PLAIN.update(PLAIN.init(weights()), batch, replace(signals, values=None, returns=None), rows_of(batch))
    assert_close(ours.params, theirs.params)
    assert jnp.abs(ours.critic.weights.head["kernel"] - HEAD["kernel"]).max() > 1e-3
    np.testing.assert_allclose(metrics["loss"], metrics["policy_loss"] + metrics["value_loss"], rtol=1e-5)


def test_layout_pieces_and_devices_change_nothing():
    expected = gradients(SEPARATE, batch_of())
    assert_close(gradients(SEPARATE, batch_of(pack=True)), expected, atol=1e-5)
    split = Mesh(np.array(jax.devices()[:2]).reshape(1, 2, *[1] * (len(AXES) - 2)), AXES)  # weights along fsdp, the critic's trunk too
    many = replace(SEPARATE, accumulate=2, mesh=split)
    batch, rows = many.place((batch_of(), rows_of(batch_of())))
    state = before = many.place(state_of(many))
    before = jax.device_get((before.params, before.critic.weights))
    with jax.transfer_guard("disallow"):
        values = many.values(state, batch)
        state, _ = many.update(state, batch, many.signals(batch, values=values), rows)
    found = jax.tree.map(jnp.subtract, before, jax.device_get((state.params, state.critic.weights)))
    assert_close((found[0], found[1].head, found[1].trunk), expected, atol=1e-5)


def test_values_are_those_of_either_trunk_and_what_padding_holds_is_never_read():
    batch = batch_of()
    garbage = replace(batch, tokens=replace(batch.tokens, ids=jnp.where(batch.tokens.segment == 0, 17, batch.tokens.ids)))
    assert (garbage.tokens.ids != batch.tokens.ids).any()
    own, shared = (learner.values(state_of(learner), batch) for learner in (SEPARATE, SHARED))
    assert jnp.abs(own.before - shared.before).max() > 1e-2
    as_shared = learner_with().init(weights())
    as_shared = replace(as_shared, critic=replace(as_shared.critic, weights=replace(as_shared.critic.weights, head=HEAD)))
    assert_close(SEPARATE.values(as_shared, batch), shared)
    inside = batch.tokens.segment > 0
    for learner, values in ((SEPARATE, own), (SHARED, shared)):
        again = learner.values(state_of(learner), garbage)
        assert_same_bits((jnp.where(inside, again.before, 0.0), again.at_end), (jnp.where(inside, values.before, 0.0), values.at_end))


def test_a_new_critic_says_0_and_the_policy_has_weights_of_its_own():
    state = SEPARATE.init(weights())
    values = SEPARATE.values(state, batch_of())
    assert_same_bits(values, jax.tree.map(jnp.zeros_like, values))
    assert jax.tree.structure(state.params) == jax.tree.structure(weights())
    after, _ = updated(SEPARATE, batch_of(), state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.critic)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((weights(), after)))


def test_the_critic_learns_alone_until_the_policy_begins_to_move():
    learner = replace(learner_with(optax.adam(1e-2), warmup=2), optimizer=optax.adam(1e-2))
    batch = batch_of()
    before = state = learner.init(weights())
    seen = [jax.device_get(before)]
    for _ in range(3):
        state, metrics = updated(learner, batch, state)
        seen.append(jax.device_get(state))
        assert (metrics["update_norm"] > 0) == (len(seen) > 3)
        assert metrics["skipped"] == 0
    for earlier, later in pairwise(seen):
        assert (later.critic.weights.head["kernel"] != earlier.critic.weights.head["kernel"]).any()
    assert_same_bits([(s.params, s.opt_state) for s in seen[1:3]], [(s.params, s.opt_state) for s in seen[:2]])
    assert (seen[3].params["embed"]["embedding"] != seen[0].params["embed"]["embedding"]).any()
    assert seen[3].updates == 3


@pytest.mark.parametrize("learner", [SEPARATE, SHARED], ids=["separate", "shared"])
def test_what_is_not_in_the_loss_is_never_read_and_what_is_not_finite_there_is_skipped(learner):
    batch = batch_of()
    inside = trained(batch.tokens, batch.episodes)
    signals = learner.signals(batch, values=learner.values(state_of(learner), batch))

    def update(poison, where):
        returns, values = (jnp.where(where, poison, x) for x in (signals.returns, signals.values))
        return learner.update(state_of(learner), batch, replace(signals, returns=returns, values=values), rows_of(batch))

    assert_same_bits(update(jnp.nan, ~inside), learner.update(state_of(learner), batch, signals, rows_of(batch)))
    state, metrics = update(jnp.inf, inside)
    assert metrics["skipped"] == 1
    assert_same_bits(state, state_of(learner))


def test_loss_of_values_is_held_around_the_old_ones():
    """Far from the returns and outside the interval, no value of a token moves; inside, all do."""
    batch = batch_of()
    held = learner_with(clip=0.1)
    signals = held.signals(batch, values=held.values(state_of(held), batch))
    for shift, fraction in ((-0.5, 1.0), (0.0, 0.0)):
        # The old value was further from the return than the one now.
        old = signals.values + shift
        state, metrics = held.update(state_of(held), batch, replace(signals, values=old, returns=signals.values + 5.0), rows_of(batch))
        assert metrics["value_clip_fraction"] == pytest.approx(fraction)
        assert (metrics["value_gradient_norm"] > 0) == (fraction == 0)


def test_an_adapter_has_a_critic_that_adapts_the_same_base():
    batch, base = batch_of(), weights()
    adapter = lora.init(base, jax.random.key(1), rank=2, alpha=4.0)
    for trunk in ("separate", "shared"):
        learner = learner_with(trunk=trunk)
        state = learner.init(adapter)
        state = replace(state, critic=replace(state.critic, weights=replace(state.critic.weights, head=jax.tree.map(jnp.copy, HEAD))))
        signals = learner.signals(batch, values=learner.values(state, batch, base))
        state, _ = learner.update(state, batch, signals, rows_of(batch), base)
        own = state.critic.weights.trunk
        assert isinstance(own, lora.Adapter) if trunk == "separate" else own is None
        if isinstance(own, lora.Adapter):
            assert (own.b["layers_0.mlp.up_proj"] != 0).any()
            assert (own.b["layers_0.mlp.up_proj"] != state.params.b["layers_0.mlp.up_proj"]).any()


def test_a_rule_without_returns_is_refused():
    learner = replace(SEPARATE, advantage=credit.grpo)
    batch = batch_of()
    with pytest.raises(ValueError, match="a credit rule that gives it returns"):
        learner.signals(batch, values=learner.values(learner.init(weights()), batch))


def told(n, seed):
    """Episodes that earn 1 where the first token of the prompt is one of the upper half, else 0."""
    made = [make_episode(f"{seed}-{i}", prompt=1, observation=2, action=2, seed=1000 * seed + i, vocabulary=8) for i in range(n)]
    return [replace(e, outcome=replace(e.outcome, reward=float(e.segments[0].tokens[0] >= 4))) for e in made]


@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_the_critic_learns_to_foresee_returns_of_episodes_it_has_not_seen(trunk):
    """Explained variance from 0 to above 0.8 on fresh episodes each time, by every rule that needs values; one program for all."""
    learner = replace(
        learner_with(optax.adam(1e-2), trunk=trunk, coefficient=1.0), optimizer=optax.adam(1e-2 if trunk == "shared" else 3e-3)
    )
    programs = Learner.update._cache_size()
    batches = [jax.device_put(collate(told(32, step), row_length=64, row_multiple=4, at_least=LARGEST)[0]) for step in range(80)]
    for rule in (credit.gae, credit.turn_gae, credit.bi_level_gae, credit.v_trace) if trunk == "separate" else (credit.gae,):
        state, explained = learner.init(weights()), [0.0]
        for batch in batches:
            proximal = learner.logprobs(state.params, batch.tokens)
            batch = replace(batch, tokens=replace(batch.tokens, logprob=proximal))
            signals = replace(learner, advantage=rule).signals(batch, proximal, values=learner.values(state, batch))
            explained.append(float(explained_variance(signals.values, signals.returns, trained(batch.tokens, batch.episodes))))
            state, _ = learner.update(state, batch, signals, rows_of(batch))
            if explained[-1] > 0.8:
                break
        assert explained[1] == 0, rule
        assert explained[-1] > 0.8, (rule, explained)
    assert Learner.update._cache_size() == programs + 1
