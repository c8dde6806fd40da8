import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax.learner.checkpoint import CheckpointError, Checkpoints


def state_after(updates):
    optimizer = optax.adamw(1e-2)
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3)}
    opt_state = optimizer.init(params)
    for _ in range(updates):
        update, opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
        params = optax.apply_updates(params, update)
    return {"params": params, "opt_state": opt_state, "step": jnp.int32(updates)}


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state_after(3), {"cursor": 7})
    with Checkpoints(tmp_path) as checkpoints:
        step, state, meta = checkpoints.restore(state_after(0))
    assert (step, meta) == (3, {"cursor": 7})
    jax.tree.map(np.testing.assert_array_equal, state, state_after(3))
    assert jax.tree.structure(state) == jax.tree.structure(state_after(3))


def test_old_ones_go_and_the_same_step_is_saved_once(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 3):
            checkpoints.save(step, state_after(step), {})
        assert checkpoints.latest == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_after(1), {})
        checkpoints.save(2, state_after(2), {})
    for file in (tmp_path / "2").rglob("*"):
        if file.is_file() and "d" in file.parts[-2:][0]:
            file.write_bytes(b"\0" * 10)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"/2: cannot read .* go on from step 1"):
        checkpoints.restore(state_after(0))


def test_another_model_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_after(1), {})
        other = state_after(0) | {"params": {"w": jnp.zeros((2, 4)), "b": jnp.zeros(3)}}
        with pytest.raises(CheckpointError, match=r"'w'\] is float32\[2, 3\] in the checkpoint and float32\[2, 4\]"):
            checkpoints.restore(other)


def test_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None
        with pytest.raises(CheckpointError, match="no checkpoint"):
            checkpoints.restore(state_after(0))


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], None], ids=["bit", "cut", "gone"]
)
def test_damage_of_any_file_is_noticed(tmp_path, spoil):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_after(1), {})
        saved = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
        assert len(saved) > 3
        for file in saved:
            if data := file.read_bytes():
                file.write_bytes(spoil(data)) if spoil else file.unlink()
                # Of the sums themselves only a missing file is not damage: nothing can tell it from a process that ended before.
                if spoil or file.name != "crc32.json":
                    with pytest.raises(CheckpointError, match=r"/1: cannot read the checkpoint: .*start again from the warm start"):
                        checkpoints.restore(state_after(0))
                file.write_bytes(data)
        checkpoints.restore(state_after(0))


def test_what_a_killed_save_left_is_cleared(tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_after(1), {})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
