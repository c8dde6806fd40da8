"""Rotary position embedding: frequencies of the variants that checkpoints use, and the rotation itself."""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rope:
    """How angles grow with the position. Fields beyond `theta` belong to the variant that names them.

    theta:             base of the wavelengths
    variant:           "default"; "linear" divides every frequency by `factor`; "llama3" and "yarn" divide only the slow ones
    factor:            by how much the context was stretched
    original_context:  llama3, yarn: context length before stretching, tokens
    low_freq_factor:   llama3: wavelengths above original_context / low_freq_factor are divided by `factor`
    high_freq_factor:  llama3: wavelengths below original_context / high_freq_factor stay
    beta_fast:         yarn: dimensions that turn at least this often within the original context stay
    beta_slow:         yarn: dimensions that turn at most this often are divided by `factor`
    attention_factor:  yarn: multiplies cos and sin; None means 0.1 ln(factor) + 1
    """

    theta: float = 1e6
    variant: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


def frequencies(rope: Rope, head_dim: int) -> tuple[NDArray[np.float64], float]:
    """Angle per position f64[head_dim / 2], and the factor on cos and sin.

    llama3: Llama 3.1 release notes; yarn: https://arxiv.org/abs/2309.00071, section 3.2.
    """
    plain = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    match rope.variant:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            turns = rope.original_context * plain / (2 * math.pi)
            keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            scale = 1.0
        case "yarn":

            def dimension(turns: float) -> float:
                return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

            low = max(math.floor(dimension(rope.beta_fast)), 0)
            high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
            keep = 1 - (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
            scale = 0.1 * math.log(rope.factor) + 1 if rope.attention_factor is None else rope.attention_factor
    keep = np.clip(keep, 0, 1)
    return plain * keep + plain / rope.factor * (1 - keep), scale


def cos_sin(rope: Rope, head_dim: int, positions: Int[jax.Array, "B T"]) -> tuple[Float[jax.Array, "B T h"], Float[jax.Array, "B T h"]]:
    """cos and sin of the angle of every position, h = head_dim / 2."""
    inverse, scale = frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)[None, None, :]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: Float[jax.Array, "B T N d"], cos: Float[jax.Array, "B T h"], sin: Float[jax.Array, "B T h"]) -> Float[jax.Array, "B T N d"]:
    """Rotate pairs (i, i + d/2) of every head, the layout of Hugging Face checkpoints."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
