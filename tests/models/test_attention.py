"""Which kernel which platform gets, what its program calls, and that all of them are the plain formula. No accelerator is needed."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from agentrl_jax.models.attention import form_of, fused_attention
from agentrl_jax.models.splash import splash_attention
from agentrl_jax.models.spread import attention
from tests.models.test_blockwise import inputs, plain, segments_of


@pytest.mark.parametrize(
    ("platform", "t", "d", "dtype", "form"),
    [
        ("cpu", 512, 128, "bfloat16", "blocks"),
        ("tpu", 512, 128, "bfloat16", "splash"),
        ("tpu", 384, 24, "float32", "splash"),
        ("tpu", 500, 128, "bfloat16", "blocks"),
        ("cuda", 512, 128, "bfloat16", "cudnn"),
        ("cuda", 500, 64, "float16", "cudnn"),
        ("cuda", 512, 128, "float32", "blocks"),
        ("cuda", 501, 128, "bfloat16", "blocks"),
        ("cuda", 512, 256, "bfloat16", "blocks"),
        ("cuda", 512, 36, "bfloat16", "blocks"),
        ("gpu", 512, 128, "bfloat16", "blocks"),
    ],
)
def test_the_kernel_of_a_platform(platform, t, d, dtype, form):
    assert form_of(platform, (2, t, 4, d), dtype) == form


@pytest.mark.parametrize(
    "form", [partial(fused_attention, implementation="xla"), partial(splash_attention, interpret=True)], ids=["cudnn", "splash"]
)
def test_every_form_is_the_plain_formula(form):
    """On padding too. What cuDNN is asked is asked of XLA; splash attention is interpreted, in three blocks."""
    arrays = *inputs(384), segments_of(384)

    def results(form, q, k, v, d_out, segments):
        out, back = jax.vjp(lambda *x: form(*x, segments), q, k, v)
        return out, *back(d_out)

    ours, theirs = (jax.jit(partial(results, one))(*arrays) for one in (form, plain))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def gradient(platform, q, k, v, segments):
    return jax.grad(lambda *x: attention(*x, segments, platform).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


def program(function, platform):
    """The program, not compiled, of a gradient in bfloat16."""
    arrays = *(jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)), jax.ShapeDtypeStruct((2, 256), jnp.int32)
    return jax.jit(partial(function, platform)).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def kernels_in(text):
    return text.count("@tpu_custom_call"), text.count("@__cudnn$fmhaScaleBiasSoftmax")


def test_programs_call_the_kernel_of_their_platform(monkeypatch):
    # JAX asks the version of a cuDNN, which is not installed where there is no CUDA device.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    assert kernels_in(program(gradient, "cpu")) == (0, 0)
    assert kernels_in(program(gradient, "tpu")) == (3, 0)  # forward, dq, dk and dv
    assert kernels_in(program(gradient, "cuda")) == (0, 2)  # forward and backward


def test_heads_are_split_where_xla_is_left_an_axis():
    """A kernel cannot be split by XLA, which the mesh leaves `tensor` to; two of four devices take half of the heads each."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = PartitionSpec("data")

    def of_rows(platform, *arrays):
        one = partial(gradient, platform)
        return jax.shard_map(one, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False)(*arrays)

    text = program(of_rows, "tpu")
    assert kernels_in(text) == (3, 0)
    # Queries, keys and values of one row.
    assert text.count("tensor<2x256x64xbf16>, tensor<1x256x64xbf16>, tensor<1x256x64xbf16>, ") == 3
