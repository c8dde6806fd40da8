"""Memory that training needs on each device, by a formula: `python -m experiments.memory_table --devices 8 --tokens 8192`.

Weights, gradients and Adam's two moments are f32 and split over the devices: 16 bytes a parameter. A device also holds the whole
weights while it computes, 4 bytes a parameter, as it gathers them for the pass: no layer lets go of them before the backward pass ends.
Activations are those of one device's tokens, f32: what a layer keeps for its backward pass, and `LOGITS` tokens' logits twice.
Not counted: XLA's buffers within one operation.
"""

import argparse

from agentrl_jax.learner.forward import LOGITS
from agentrl_jax.models.decoder import ModelConfig

GIB = 2**30
F32 = 4


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(151_936, hidden, layers, heads, 8, 128, intermediate, tie_embeddings=tied)


SIZES = {
    "0.6B": qwen3(1024, 28, 16, 3072, tied=True),
    "1.7B": qwen3(2048, 28, 16, 6144, tied=True),
    "4B": qwen3(2560, 36, 32, 9728, tied=True),
    "8B": qwen3(4096, 36, 32, 12288, tied=False),
    "32B": qwen3(5120, 64, 64, 25600, tied=False),
}
"""Qwen3's dense models, as their config.json files say."""


def parameters(config: ModelConfig) -> int:
    """Number of weights of a model without attention biases."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 2 * c.head_dim * c.qk_norm
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    return c.num_layers * layer + c.hidden_size * (1 + c.vocab_size * (1 if c.tie_embeddings else 2))


def activations(config: ModelConfig, tokens: int, *, remat: bool) -> int:
    """Bytes kept for the backward pass of `tokens` on one device; remat keeps each layer's input and, of one layer, all.

    A layer keeps its input, both norms' outputs and the middle residual (4 D), queries before and after norm and rotation and the mixed
    values (4 H d), keys likewise and values (4 KV d), and of the MLP gate, its silu, up and their product (4 F).
    """
    c = config
    layer = 4 * (c.hidden_size + c.num_heads * c.head_dim + c.num_kv_heads * c.head_dim + c.intermediate_size)
    kept = c.num_layers * c.hidden_size + layer if remat else c.num_layers * layer
    return F32 * (tokens * kept + 2 * min(tokens, LOGITS) * c.vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="along fsdp")
    parser.add_argument("--tokens", type=int, default=8192, help="of one device, at a time")
    args = parser.parse_args()
    print(f"GiB a device; weights, gradients and moments over {args.devices}, activations of {args.tokens:,} tokens")
    print("| model | parameters | weights | gradients | Adam | gathered | activations | with remat |\n|---|---|---|---|---|---|---|---|")
    for name, config in SIZES.items():
        n = parameters(config)
        share = F32 * n / args.devices
        kept = (activations(config, args.tokens, remat=remat) for remat in (False, True))
        cells = (x / GIB for x in (share, share, 2 * share, F32 * n, *kept))
        print(f"| {name} | {n / 1e9:.2f}e9 | " + " | ".join(f"{x:.1f}" for x in cells) + " |")


if __name__ == "__main__":
    main()
