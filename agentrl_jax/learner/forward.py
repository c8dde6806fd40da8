"""What a decoder says of the tokens of a batch: hidden states, and log-probs read off them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentrl_jax.data.batch import Tokens
from agentrl_jax.kernels.logprob import token_logprobs
from agentrl_jax.models.decoder import FLOAT32, Compute, Decoder, ModelConfig, Params, unembed
from agentrl_jax.models.lora import Trained, attached, frozen
from agentrl_jax.models.spread import joined, padded, share

LOGITS = 2048  # tokens whose logits exist at the same time


def hidden_of(
    model: ModelConfig, trained: Trained, tokens: Tokens, base: Params | None = None, compute: Compute = FLOAT32, parts: int = 1
) -> Float[Array, "B T D"]:
    """Final hidden states. base: what is adapted, where `trained` is an adapter.

    parts: devices along the axis `sequence` of the mesh that this runs under; each does as much of the layers' tokens
    """
    ids, position = (share(x, parts) for x in (tokens.ids, tokens.position))
    with attached(trained):
        hidden = Decoder(model, compute).apply({"params": frozen(trained, base)}, ids, position, tokens.segment)
    assert isinstance(hidden, jax.Array)
    return joined(hidden, parts)


def token_logprobs_of(
    model: ModelConfig, trained: Trained, tokens: Tokens, base: Params | None = None, compute: Compute = FLOAT32, parts: int = 1
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each token of `predict` given those before it in its segment, and the entropy there; 0 elsewhere."""
    hidden = hidden_of(model, trained, tokens, base, compute, parts)
    return logprobs_at(hidden, unembed(frozen(trained, base)), tokens, parts)


def logprobs_at(
    hidden: Float[Array, "B T D"], matrix: Float[Array, "V D"], tokens: Tokens, parts: int = 1
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`token_logprobs_of`, from hidden states and the unembedding.

    Logits are made at the positions of `predict` alone and for `LOGITS` tokens at a time.
    """
    width = tokens.ids.shape[1]
    all_of_them = padded(tokens.predict, parts, width)
    predict = share(all_of_them, parts)
    at = jnp.minimum(predict, width - 1)

    def pick(x: Float[Array, "B T"] | Int[Array, "B T"]) -> Array:
        return jnp.take_along_axis(x, at, axis=1)

    before = jnp.take_along_axis(hidden, jnp.maximum(at - 1, 0)[..., None], axis=1)
    targets = jnp.where((predict < width) & (pick(tokens.position) > 0), pick(tokens.ids), -1)
    found = token_logprobs(before.reshape(-1, before.shape[-1]), matrix, targets.ravel(), pick(tokens.temperature).ravel(), chunk=LOGITS)
    row = jnp.arange(len(at), dtype=jnp.int32)[:, None]
    laid = (joined(x.reshape(at.shape), parts) for x in found)
    # Filler of `predict` points past the row and is dropped.
    logprob, entropy = (jnp.zeros(tokens.ids.shape).at[row, all_of_them].set(x, mode="drop") for x in laid)
    return logprob, entropy
