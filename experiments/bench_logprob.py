"""Log-prob of tokens over 151,936 words with its gradient, against all logits at once: memory as XLA plans it, and time.

Seconds are medians; the sides take turns.

python -m experiments.bench_logprob
"""

from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels.logprob import token_logprobs
from agentrl_jax.learner.forward import LOGITS

VOCABULARY = 151_936
TOKENS = {64: 8192, 256: 2048}  # by width
ROUNDS = 3


def ours(hidden: jax.Array, matrix: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean(token_logprobs(hidden, matrix, targets, jnp.ones(len(targets)), chunk=LOGITS)[0])


def all_logits(hidden: jax.Array, matrix: jax.Array, targets: jax.Array) -> jax.Array:
    logprobs = jax.nn.log_softmax(hidden @ matrix.T)
    return jnp.mean(jnp.take_along_axis(logprobs, targets[:, None], axis=1))


def measure(width: int, tokens: int) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, matrix = jax.random.normal(keys[0], (tokens, width)), jax.random.normal(keys[1], (VOCABULARY, width)) * 0.02
    arguments = hidden, matrix, jax.random.randint(keys[2], (tokens,), 0, VOCABULARY)
    print(f"log-prob and gradient, T = {tokens:,}, V = {VOCABULARY:,}, D = {width}")
    sides = {"this package": ours, "all logits": all_logits}
    programs = {side: jax.jit(jax.grad(function, argnums=(0, 1))).lower(*arguments).compile() for side, function in sides.items()}
    took: dict[str, list[float]] = {side: [] for side in programs}
    for _ in range(1 + ROUNDS):  # the first is not counted
        for side, program in programs.items():
            began = perf_counter()
            jax.block_until_ready(program(*arguments))
            took[side].append(perf_counter() - began)
    memory, seconds = [], []
    for side, program in programs.items():
        analysis = program.memory_analysis()
        assert analysis is not None
        memory.append(analysis.temp_size_in_bytes / 2**30)
        seconds.append(np.median(took[side][1:]))
        spread = f"({min(took[side][1:]):.2f}-{max(took[side][1:]):.2f})"
        print(f"  {side:13} {memory[-1]:6.2f} GiB of scratch  {seconds[-1]:6.2f} s {spread}", flush=True)
    print(f"  ratio: {memory[0] / memory[1]:.3f} of the memory, {seconds[0] / seconds[1]:.2f} of the time", flush=True)


def main() -> None:
    for width, tokens in TOKENS.items():
        measure(width, tokens)


if __name__ == "__main__":
    main()
