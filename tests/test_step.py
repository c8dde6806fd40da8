"""One step of learning, on made-up episodes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import credit, objective, presets
from agentrl_jax.config import Compute, ConfigError, Critic, Limits, Lora, Mesh, Optimizer
from agentrl_jax.data.collate import Shape
from agentrl_jax.data.episode import Ending
from agentrl_jax.inference.runner import Stats
from agentrl_jax.learner.checkpoint import CheckpointError, Checkpoints
from agentrl_jax.learner.reference import reference_of
from agentrl_jax.learner.update import Learner
from agentrl_jax.models.decoder import ModelConfig, init_params
from agentrl_jax.models.lora import Adapter, whole
from agentrl_jax.report import metrics
from agentrl_jax.step import Clock, check_credit, degenerate, first_shape, learn, learner_of, learning_rate, trained_of
from tests import tiny
from tests.data.strategies import make_episode
from tests.test_presets import ARGUMENTS, NAMES

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
TWO_HEADS = replace(MODEL, num_kv_heads=2)
SMALL = Shape(4, 64, 32, 8, 4)
experiment = replace(tiny.experiment, row_length=64, rollout=replace(tiny.experiment.rollout, context=64), advantage=credit.grpo)


def collected(n=6, *, step=0, turns=2, **options):
    """Episodes of two groups, of alternating success."""
    return [
        make_episode(f"{step}-{i}", group=f"g{i % 2}", reward=float(i % 4 < 2), turns=turns, step=step, seed=100 * step + i, **options)
        for i in range(n)
    ]


def start(of=experiment):
    learner, params = learner_of(of, MODEL), init_params(MODEL, jax.random.key(0))
    base = learner.place(params) if of.lora else None
    return learner, learner.init(trained_of(of, params)), (base, reference_of(learner, params, of.reference, base))


def learned(episodes, of=experiment, *, step=0, shape=SMALL):
    learner, state, fixed = start(of)
    return learn(of, learner, state, *fixed, episodes, step, shape)


def assert_same_bits(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_every_metric_is_declared_and_finite():
    state, _, values, _ = learned(collected())
    for name, value in values.items():
        metrics.metric(name)
        assert np.isfinite(value), name
    assert state.updates == experiment.optimizer.minibatches
    assert values["train/skipped"] == 0
    assert values["train/logprob_difference_max"] >= values["train/logprob_difference"] > 0
    assert values["train/learning_rate"] == pytest.approx(3e-3 * 0.9)  # the second of ten updates, falling to 0


def test_the_learning_rate_begins_where_a_critic_has_been_warmed_up():
    optimizer = Optimizer(learning_rate=1.0, warmup=2, decay="constant")
    of = replace(experiment, optimizer=optimizer, critic=Critic(warmup=3))
    assert [learning_rate(of, updates) for updates in (1, 3, 4, 5, 6, 9)] == [0, 0, 0, 0.5, 1, 1]


@pytest.mark.slow
def test_a_critic_is_measured_and_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path):
    of = replace(experiment, advantage=credit.gae, critic=Critic(clip=0.2, learning_rate=0.01))
    learner, state, fixed = start(of)
    found = []
    for step in range(3):
        if step == 2:
            with Checkpoints(tmp_path) as checkpoints:
                checkpoints.save(step, state, {})
        state, _, values, _ = learn(of, learner, state, *fixed, collected(step=step), step, SMALL)
        found.append(values)
    for name, value in found[-1].items():
        metrics.metric(name)
        assert np.isfinite(value), name
    assert found[0]["train/explained_variance"] == 0
    assert found[0]["train/value_loss"] > found[-1]["train/value_loss"] > 0
    assert found[-1]["train/loss"] == pytest.approx(found[-1]["train/policy_loss"] + found[-1]["train/value_loss"], abs=1e-6)

    with Checkpoints(tmp_path) as checkpoints:
        _, restored, _ = checkpoints.restore(start(of)[1])
        # A policy alone does not take it for its own.
        with pytest.raises(CheckpointError, match=r"critic.* in the checkpoint and None in this experiment"):
            checkpoints.restore(start()[1])
    resumed, _, values, _ = learn(of, learner, restored, *fixed, collected(step=2), 2, SMALL)
    assert_same_bits(resumed, state)
    assert values == found[-1]


def test_credit_that_has_no_use_for_a_critic_or_needs_one_is_refused_before_anything_runs():
    def refused(message, **change):
        with pytest.raises(ConfigError, match=message):
            check_credit(replace(experiment, **change))

    for rule in ("gae", "turn_gae", "bi_level_gae", "v_trace"):
        refused(rf"advantage: credit.{rule} needs Estimates.values, .*; set critic=Critic\(\)", advantage=getattr(credit, rule))
    refused("critic: the rule of `advantage` gives no returns", critic=Critic())
    refused("advantage: credit.remax needs Estimates.greedy_reward", advantage=credit.remax)
    for name in NAMES:
        check_credit(replace(experiment, **getattr(presets, name)(**ARGUMENTS.get(name, {}))))
    check_credit(replace(experiment, advantage=partial(credit.gae, bootstrap=True), critic=Critic(trunk="shared")))


def test_what_is_left_out_is_counted():
    dropping = replace(experiment, limits=Limits(handling="drop"))
    limited = [replace(episode, ending=Ending.TURN_LIMIT) for episode in collected(2, step=9)]
    lost = make_episode("lost", group="g0", reward=None, ending=Ending.SANDBOX_FAILED)
    _, _, values, _ = learned([*collected(version=3), *limited, lost], dropping, step=5)
    assert values["rollout/dropped"] == 2
    assert (values["rollout/staleness"], values["rollout/staleness_max"]) == (2, 2)
    assert values["train/advantage_mean"] == pytest.approx(0, abs=0.1)
    assert values["train/advantage_std"] == pytest.approx(1, abs=0.1)


def test_credit_comes_back_by_episode_and_segment():
    lost = make_episode("lost", group="g0", reward=None, ending=Ending.SANDBOX_FAILED)
    episodes = [*collected(turns=3, segments=2), lost]
    _, _, _, found = learned(episodes)
    assert sorted(found) == sorted(episode.id for episode in episodes[:-1])
    for episode in episodes[:-1]:
        for segment, advantages in zip(episode.segments, found[episode.id], strict=True):
            assert advantages.shape == segment.tokens.shape
            assert (np.sign(advantages) == np.where(segment.mask, 2 * episode.reward - 1, 0)).all()


def test_the_same_step_is_the_same_update_and_another_deals_its_minibatches_anew():
    episodes = collected(8)
    assert_same_bits(learned(episodes)[0], learned(episodes)[0])
    with pytest.raises(AssertionError):
        assert_same_bits(learned(episodes)[0], learned(episodes, step=1)[0])


def test_a_step_without_a_usable_episode_changes_nothing():
    lost = [make_episode(f"e{i}", reward=None, ending=Ending.INFERENCE_FAILED, seed=i) for i in range(4)]
    state, _, values, found = learned(lost)
    assert_same_bits(state, start()[1])
    assert values["train/skipped"] == 1
    assert found == {}


def test_episodes_at_a_limit_leave_the_loss_where_the_experiment_drops_them():
    limited = [replace(episode, ending=Ending.TURN_LIMIT) for episode in collected(2, step=9)]
    dropping = replace(experiment, limits=Limits(handling="drop"))
    whole, fewer = (learned([*collected(), *limited], of)[2]["train/tokens"] for of in (experiment, dropping))
    assert fewer == learned(collected())[2]["train/tokens"] < whole


def test_the_reference_is_the_policy_that_the_run_started_from():
    of = replace(experiment, reference="held", loss=partial(objective.ppo, kl=0.1))
    learner, state, fixed = start(of)
    divergences = []
    for step in range(2):
        state, _, values, _ = learn(of, learner, state, *fixed, collected(step=step), step, SMALL)
        divergences.append(values["train/kl_reference"])
    assert 0 <= divergences[0] < divergences[1]


def test_an_adapter_is_trained_and_its_base_stays():
    of = replace(experiment, lora=Lora(rank=2, projections=("q_proj", "v_proj")))
    learner, before, (base, reference) = start(of)
    untrained = jax.tree.map(jnp.copy, base)
    proximal = whole(before.params, base)
    state, _, values, _ = learn(of, learner, before, base, reference, collected(), 0, SMALL)
    assert_same_bits((proximal, base), (untrained, untrained))
    assert isinstance(state.params, Adapter)
    assert values["train/update_norm"] > 0
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), whole(state.params, base), base)
    assert sum(jax.tree.leaves(changed)) == 2


@pytest.mark.slow
def test_a_mesh_changes_where_things_lie_and_not_what_is_learnt():
    """Weights too come as they would off a disk: already split."""
    steady = replace(experiment, optimizer=Optimizer(eps=1e-3, minibatches=1))  # a small eps would blow up rounding
    found = []
    for mesh in (Mesh(), Mesh(fsdp=2, tensor=2)):
        of = replace(steady, mesh=mesh)
        learner = learner_of(of, TWO_HEADS)
        state = learner.init(learner.place(init_params(TWO_HEADS, jax.random.key(0))))
        state, _, values, credit_of = learn(of, learner, state, None, None, collected(), 0, SMALL)
        found.append((jax.device_get(state), values, credit_of))
        kernel = state.params["layers_0"]["mlp"]["up_proj"]["kernel"]
        assert kernel.addressable_shards[0].data.size * mesh.fsdp * mesh.tensor == kernel.size
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *found)


@pytest.mark.slow
def test_a_step_is_computed_as_the_experiment_says():
    """In bfloat16, with layers computed again, on a mesh: near the step in float32; the state stays float32."""
    found, once = [], replace(experiment, optimizer=Optimizer(minibatches=1))
    for of in (once, replace(once, compute=Compute("bfloat16", remat=True), mesh=Mesh(fsdp=2, tensor=2))):
        learner = learner_of(of, TWO_HEADS)
        state = learner.init(init_params(TWO_HEADS, jax.random.key(0)))
        state, _, values, _ = learn(of, learner, state, None, None, collected(), 0, SMALL)
        found.append(values)
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"float32"}
    wide, narrow = found
    assert 1e-6 < abs(narrow["train/logprob_difference"] - wide["train/logprob_difference"]) < 0.01
    np.testing.assert_allclose(narrow["train/gradient_norm"], wide["train/gradient_norm"], rtol=0.05)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(fsdp=3), "mesh: data=None, fsdp=3, tensor=1, sequence=1 do not make a mesh of the 4 devices here"),
        (Mesh(tensor=4), "mesh.tensor=4 x mesh.sequence=1 must divide the 1 key-value heads of the model"),
        (Mesh(sequence=2), "mesh.tensor=1 x mesh.sequence=2 must divide the 1 key-value heads of the model"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, message):
    with pytest.raises(ConfigError, match=message):
        learner_of(replace(experiment, mesh=mesh), MODEL)


def test_a_run_compiles_a_bounded_number_of_programs():
    """Sizes go up and down; only a step that fits no earlier shape makes a new program."""
    learner, state, fixed = start(replace(experiment, loss=partial(objective.ppo, clip_low=0.15)))
    before, shape, shapes = Learner.update._cache_size(), Shape(), []
    for step, (n, turns) in enumerate([(3, 1), (2, 1), (9, 3), (4, 2), (12, 3), (1, 1), (9, 3)]):
        state, shape, _, _ = learn(experiment, learner, state, *fixed, collected(n, step=step, turns=turns), step, shape)
        shapes.append(shape)
    assert Learner.update._cache_size() - before == len(set(shapes)) == 2


def test_the_first_shape_holds_what_its_docstring_says():
    shape = first_shape(tiny.experiment)
    assert shape == Shape(rows=2, length=256, predict=96, episodes=4, turns=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rewrite": lambda batch, logprobs: replace(batch, tokens=replace(batch.tokens, logprob=np.zeros((4, 64), np.float32)))},
            "host-to-device",
        ),
        ({"loss": lambda inputs: objective.PerToken(inputs.new * float(jnp.sum(inputs.new)))}, "concrete value"),
        (
            {"advantage": lambda batch, estimates: credit.Credit(batch.tokens.logprob * np.asarray(batch.tokens.logprob))},
            "numpy.ndarray conversion",
        ),
    ],
    ids=["rewrite", "loss", "advantage"],
)
def test_what_goes_over_the_host_fails(change, message):
    """And nothing is lost: the state can still be saved."""
    of = replace(experiment, **change)
    learner, state, fixed = start(of)
    with pytest.raises(Exception, match=message):
        learn(of, learner, state, *fixed, collected(), 0, SMALL)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_groups_that_teach_nothing():
    even = [make_episode(f"a{i}", group="a", reward=1.0) for i in range(3)]
    uneven = [make_episode(f"b{i}", group="b", reward=float(i)) for i in range(2)]
    spoilt = [make_episode("c0", group="c", reward=1.0), make_episode("c1", group="c", reward=None, ending=Ending.SANDBOX_FAILED)]
    assert degenerate([*even, *uneven]) == 1 / 2
    assert degenerate([*even, *uneven, *spoilt]) == 2 / 3
    assert degenerate([]) == 0


def test_the_clock_accounts_for_the_whole_step():
    engine = Stats()
    clock = Clock(engine)
    clock.lap("evaluate")
    engine.seconds += 1e-9  # of the collection
    clock.lap("collect")
    engine.seconds += 1e9  # of something else
    clock.lap("train")
    values = clock.metrics(collected())
    for name, value in values.items():
        metrics.metric(name)
        assert value >= 0
    assert values["time/generate"] == pytest.approx(1e-9)
    assert {name for name in values if name.startswith("time/")} == {
        f"time/{x}" for x in ("evaluate", "generate", "sandbox", "train", "rest")
    }
