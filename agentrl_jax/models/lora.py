"""LoRA (https://arxiv.org/abs/2106.09685): W + (alpha / rank) A B for chosen projections, with W frozen and A, B trained.

An `Adapter` is all that an optimizer sees, a checkpoint holds and a gradient flows into. Training goes through A and B
(`attached`: no gradient and no copy as large as W); samplers and model folders get ordinary weights (`merged`). W may be bfloat16.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from agentrl_jax.models.decoder import Params

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """a, b: [D_in, r] and [r, D_out] by the name of their projection, "layers_0.attention.q_proj"; scale: alpha / rank, not trained."""

    a: dict[str, Float[Array, "_ r"]]
    b: dict[str, Float[Array, "r _"]]
    scale: float = field(metadata={"static": True})


Trained: TypeAlias = Params | Adapter
"""What training changes: all weights, or an adapter of weights that stay (`base`)."""


def init(params: Params, key: Array, *, rank: int, alpha: float, projections: tuple[str, ...] = PROJECTIONS) -> Adapter:
    """An adapter that changes nothing yet: A is normal with variance 1 / D_in, B is 0, both f32 whatever `params` are.

    Raises ValueError where the weights have none of the projections.
    """
    flat: Any = flatten_dict(params)
    kernels = {_name(path): kernel for path, kernel in flat.items() if path[-1] == "kernel" and path[-2] in projections}
    if not kernels:
        raise ValueError(f"the model has none of the projections {', '.join(projections)}")
    keys = dict(zip(kernels, jax.random.split(key, len(kernels)), strict=True))
    a = {name: jax.random.normal(keys[name], (w.shape[0], rank)) * w.shape[0] ** -0.5 for name, w in kernels.items()}
    b = {name: jax.numpy.zeros((rank, w.shape[1])) for name, w in kernels.items()}
    return Adapter(a, b, alpha / rank)


@jax.jit
def merged(params: Params, adapter: Adapter) -> Params:
    """New weights W + scale A B, in the type of W; those without an adapter are as they were."""
    flat: Any = flatten_dict(params)
    for path, kernel in flat.items():
        if (name := _name(path)) in adapter.a and path[-1] == "kernel":
            flat[path] = kernel + (adapter.scale * (adapter.a[name] @ adapter.b[name])).astype(kernel.dtype)
    return unflatten_dict(flat)


def whole(trained: Trained, base: Params | None) -> Params:
    """Ordinary weights, for whoever knows no adapters."""
    return merged(frozen(trained, base), trained) if isinstance(trained, Adapter) else trained


def frozen(trained: Trained, base: Params | None) -> Params:
    """The weights that a decoder reads, inside `attached(trained)`. Raises ValueError where an adapter comes without its base."""
    if not isinstance(trained, Adapter):
        return trained
    if base is None:
        raise ValueError("an adapter needs the weights that it adapts: pass them as `base`")
    return base


def attached(trained: Trained) -> AbstractContextManager[Any]:
    """Inside, projections of a decoder that have an adapter give x W + scale (x A) B. Nothing changes for ordinary weights."""
    return nn.intercept_methods(partial(_low_rank, trained)) if isinstance(trained, Adapter) else nullcontext()


def _low_rank(adapter: Adapter, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Any) -> Any:
    out = method(*args, **kwargs)
    name = ".".join(context.module.path)
    if name not in adapter.a or context.method_name != "__call__":
        return out
    a, b = (factor[name].astype(out.dtype) for factor in (adapter.a, adapter.b))
    return out + adapter.scale * (args[0].astype(out.dtype) @ a @ b)


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path[:-1])
