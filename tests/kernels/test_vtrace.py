import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels.gae import gae
from agentrl_jax.kernels.returns import discounted_return, lambda_return, n_step_return
from agentrl_jax.kernels.vtrace import off_policy_return, vtrace

T = 8
rows = hypothesis.extra.numpy.arrays(np.float32, T, elements=st.floats(-2, 2, width=16))
masks = hypothesis.extra.numpy.arrays(bool, T)
TRUNCATED = {"truncated": jnp.array(True), "bootstrap_value": jnp.asarray(0.5, jnp.float32)}
run = jax.jit(vtrace, static_argnames=("clip_rho", "clip_c", "clip_pg", "leak"))
target, one_step, whole, mixed = (
    jax.jit(off_policy_return),
    jax.jit(n_step_return, static_argnames="n"),
    jax.jit(discounted_return),
    jax.jit(lambda_return),
)
on_policy = jax.jit(gae)


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-4, rtol=1e-4)


def loop(log_ratio, reward, value, mask, discount, lam, clip, bootstrap):
    rho = np.minimum(np.exp(log_ratio), clip)
    errors, advantages = np.zeros(T), np.zeros(T)
    later, next_value = 0.0, bootstrap
    for t in reversed(np.flatnonzero(mask)):
        advantages[t] = rho[t] * (reward[t] + discount * (next_value + lam * later) - value[t])
        later = rho[t] * (reward[t] + discount * next_value - value[t]) + discount * lam * rho[t] * later
        errors[t], next_value = later, value[t]
    return errors, advantages


@hypothesis.given(rows, rows, rows, masks)
def test_is_the_plain_loop(log_ratio, reward, value, mask):
    reward = np.where(mask, reward, 0)
    hidden = [jnp.asarray(np.where(mask, x, np.nan)) for x in (log_ratio, value)]
    out = run(hidden[0], jnp.asarray(reward), hidden[1], jnp.asarray(mask), discount=0.9, lam=0.8, **TRUNCATED)
    errors, advantages = loop(log_ratio, reward, value, mask, 0.9, 0.8, 1.0, 0.5)
    close(out.errors, errors)
    close(out.advantages, advantages)


@hypothesis.given(rows, rows, masks)
def test_on_policy_it_is_gae(reward, value, mask):
    arguments = jnp.asarray(reward), jnp.asarray(value), jnp.asarray(mask)
    out = run(jnp.zeros(T), *arguments, discount=0.9, lam=0.8, **TRUNCATED)
    want = on_policy(*arguments, discount=0.9, lam=0.8, **TRUNCATED).advantages
    close(out.errors, want)
    close(out.advantages, want)


def test_a_leak_lies_between_clipped_and_not():
    x = jnp.array([1.0, -1.0, 0.5]), jnp.array([0.0, 1.0, 2.0]), jnp.array([0.1, 0.2, 0.3]), jnp.ones(3, bool)
    clipped, free = (vtrace(*x, clip_rho=c, clip_c=c, clip_pg=c).errors[-1] for c in (1.0, None))
    close(vtrace(*x, leak=0.25).errors[-1], 0.75 * clipped + 0.25 * free)
    close(vtrace(*x, leak=1.0).advantages, vtrace(*x, clip_rho=None, clip_c=None, clip_pg=None).advantages)


def test_ratios_far_off_are_finite():
    x = jnp.array([500.0, -500.0]), jnp.ones(2), jnp.zeros(2), jnp.ones(2, bool)
    assert np.isfinite(vtrace(*x, clip_rho=None, clip_c=None, clip_pg=None).errors).all()


@hypothesis.given(rows, rows, masks)
def test_traces_between_one_step_and_the_whole_return(reward, value, mask):
    x, m = jnp.asarray(reward), jnp.asarray(mask)
    hidden = jnp.asarray(np.where(mask, value, np.nan))
    same = {"discount": 0.9, **TRUNCATED}
    close(target(x, hidden, hidden, jnp.zeros(T), m, **same), one_step(x, hidden, m, n=1, **same))
    # With Q = V and trace lambda it is the lambda-return; with trace 1 the whole one.
    close(target(x, hidden, hidden, jnp.full(T, 0.7), m, **same), mixed(x, hidden, m, lam=0.7, **same))
    close(target(x, hidden, hidden, jnp.ones(T), m, **same), whole(x, m, **same))


def test_episodes_in_one_row():
    reward, q, value = jnp.array([0.0, 1.0, 0.0, 2.0]), jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.array([0.5, 0.6, 0.7, 0.8])
    trace, mask = jnp.full(4, 0.9), jnp.ones(4, bool)
    apart = off_policy_return(*(x.reshape(2, 2) for x in (reward, q, value, trace, mask)), discount=0.9)
    close(off_policy_return(reward, q, value, trace, mask, discount=jnp.array([0.9, 0.0, 0.9, 0.9])), apart.ravel())
    cut = jnp.array([False, True, False, False])
    got = off_policy_return(reward, q, value, trace, mask, discount=0.9, truncated=cut, bootstrap_value=jnp.full(4, 2.0))
    close(got[1:], [1 + 0.9 * 2, *apart[1]])
