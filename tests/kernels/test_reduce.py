import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.kernels.reduce import counts, token_weights, weighted_sum

# Two episodes with masked losses [1, 3] and [1, 1, 1, 1, 1, 4].
LOSS = jnp.array([[1.0, 9.0, 3.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 9.0]])
MASK = jnp.array([[1, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]], bool)
EPISODE = jnp.array([[0] * 7, [1] * 7], jnp.int32)


@pytest.mark.parametrize(
    ("group", "options", "expected"),
    [
        ([0, 0, 0], {}, 1.625),
        ([0, 0, 0], {"reduction": "episode"}, 1.75),
        ([0, 1, 1], {"reduction": "group"}, 1.75),
        ([0, 0, 0], {"reduction": "group"}, 1.625),
        ([0, 0, 0], {"reduction": "constant", "horizon": 8.0}, 0.8125),
        ([0, 0, 0], {"reduction": "episode_sum"}, 6.5),
        ([0, 0, 0], {"reduction": "sum"}, 13.0),
        ([0, 0, 0], {"reduction": "sum", "horizon": 8.0}, 1.625),
        # Counting the episode without a token: TRL's grpo and dr_grpo.
        ([0, 0, 0], {"reduction": "episode", "episodes": 3}, 7 / 6),
        ([0, 0, 0], {"reduction": "constant", "horizon": 8.0, "episodes": 3}, 0.5416667),
    ],
)
def test_reductions_of_a_worked_example(group, options, expected):
    # The third episode has no token in the loss: it is in no denominator.
    weights = token_weights(MASK, EPISODE, jnp.array(group, jnp.int32), **options)
    np.testing.assert_allclose(jnp.sum(weights * LOSS), expected, atol=1e-6)
    assert (np.asarray(weights)[~np.asarray(MASK)] == 0).all()


@pytest.mark.parametrize("reduction", ["token", "episode", "group"])
def test_rows_and_segments_do_not_matter(reduction):
    group = jnp.array([0, 1], jnp.int32)
    weights = token_weights(MASK, EPISODE, group, reduction=reduction)
    flat = token_weights(MASK.reshape(7, 2), EPISODE.reshape(7, 2), group, reduction=reduction)
    np.testing.assert_allclose(flat.reshape(2, 7), weights)


@pytest.mark.parametrize("options", [{}, {"reduction": "episode"}, {"reduction": "group"}, {"reduction": "constant", "horizon": 8.0}])
def test_nothing_in_the_loss_gives_zero_weights(options):
    assert (np.asarray(token_weights(jnp.zeros_like(MASK), EPISODE, jnp.zeros(3, jnp.int32), **options)) == 0).all()


def test_the_horizon_goes_with_constant_alone():
    for options in ({"horizon": 8.0}, {"reduction": "constant"}):
        with pytest.raises(ValueError, match="horizon"):
            token_weights(MASK, EPISODE, jnp.zeros(3, jnp.int32), **options)


def test_weights_of_single_tokens():
    rows = {"token": [1 / 8, 1 / 8], "episode": [1 / 4, 1 / 12], "constant": [1 / 16, 1 / 16]}
    for reduction, expected in rows.items():
        weights = token_weights(MASK, reduction=reduction, horizon=8.0 if reduction == "constant" else None)
        np.testing.assert_allclose(weights[:, 2], expected, rtol=1e-6)


def test_an_episode_in_two_segments_is_one_episode():
    """Segments of 4 and 6 tokens: 1/10 for each token, or 1/8 and 1/12 where each segment counts as one."""
    mask = jnp.arange(6)[None] < jnp.array([[4], [6]])
    together = token_weights(mask, jnp.zeros((2, 6), jnp.int32), jnp.zeros(1, jnp.int32), reduction="episode")
    apart = token_weights(mask, reduction="episode")
    np.testing.assert_allclose(together[:, 0], [0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(apart[:, 0], [1 / 8, 1 / 12], rtol=1e-6)


def test_a_micro_batch_alone_is_another_reduction():
    alone = [weighted_sum(LOSS[i : i + 1], token_weights(MASK[i : i + 1])) for i in range(2)]
    np.testing.assert_allclose(sum(alone) / 2, 1.75, rtol=1e-6)


REDUCTIONS = [
    {"reduction": "token"},
    {"reduction": "episode"},
    {"reduction": "group"},
    {"reduction": "constant", "horizon": 5.0},
    {"reduction": "episode_sum"},
    {"reduction": "sum"},
]


@pytest.mark.parametrize("options", REDUCTIONS)
def test_micro_batches_with_the_counts_of_the_whole_add_up(options):
    """Episodes over several rows, cut anywhere; loss and gradient are those of the whole."""
    group = jnp.array([0, 0, 1, 2], jnp.int32)

    @jax.jit
    def both(mask, owner, first):
        episode = jnp.broadcast_to(owner[:, None], mask.shape)
        loss = jnp.where(mask, jnp.arange(24.0).reshape(6, 4) - 9, jnp.nan)
        whole = token_weights(mask, episode, group, **options)
        known = counts(mask, episode, group)
        parts = [token_weights(mask & part[:, None], episode, group, **options, **known) for part in (first, ~first)]
        return whole, sum(parts), weighted_sum(loss, whole), sum(weighted_sum(loss, part) for part in parts)

    @given(st.data())
    def check(data):
        mask = jnp.array(data.draw(st.lists(st.booleans(), min_size=24, max_size=24))).reshape(6, 4)
        owner = jnp.array(data.draw(st.lists(st.integers(0, 3), min_size=6, max_size=6)), jnp.int32)
        first = jnp.array(data.draw(st.lists(st.booleans(), min_size=6, max_size=6)))
        whole, added, loss, sum_of_losses = both(mask, owner, first)
        np.testing.assert_allclose(added, whole, rtol=1e-6)
        np.testing.assert_allclose(sum_of_losses, loss, rtol=1e-5, atol=1e-4)

    check()


def test_nothing_under_a_weight_of_zero_is_seen():
    loss = jnp.where(MASK, LOSS, jnp.nan)
    value, gradient = jax.value_and_grad(weighted_sum)(loss, token_weights(MASK))
    np.testing.assert_allclose(value, 1.625, rtol=1e-6)
    np.testing.assert_allclose(gradient, token_weights(MASK))


def test_rejecting_every_token_of_an_episode():
    keep = jnp.array([[False] * 7, [True] * 7])
    kept = token_weights(MASK, keep=keep, reduction="episode", denominator="kept")
    original = token_weights(MASK, keep=keep, reduction="episode")
    np.testing.assert_allclose([weighted_sum(LOSS, kept), weighted_sum(LOSS, original)], [1.5, 0.75], rtol=1e-6)


def test_factors_of_episodes():
    weights = token_weights(MASK, reduction="episode", scale=jnp.array([2.0, 0.0]))
    np.testing.assert_allclose(weighted_sum(LOSS, weights), 2.0, rtol=1e-6)
    jitted = jax.jit(lambda mask, episodes: token_weights(mask, reduction="episode", episodes=episodes))
    np.testing.assert_allclose(jitted(MASK, jnp.array(2.0)), token_weights(MASK, reduction="episode"), rtol=1e-6)


def test_episode_and_group_go_together():
    with pytest.raises(ValueError, match="goes with `group`"):
        token_weights(MASK, EPISODE)
