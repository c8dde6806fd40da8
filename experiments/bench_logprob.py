"""Log-prob of 8,192 tokens over 151,936 words with its gradient, against all logits at once: memory as XLA plans it, and time.

python -m experiments.bench_logprob
"""

from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.kernels.logprob import token_logprobs
from agentrl_jax.learner.forward import LOGITS


def main(tokens: int = 8192, vocabulary: int = 151_936, width: int = 64) -> None:
    key = jax.random.key(0)
    hidden, matrix = jax.random.normal(key, (tokens, width)), jax.random.normal(key, (vocabulary, width)) * 0.02
    targets = jax.random.randint(key, (tokens,), 0, vocabulary)
    temperature = jnp.ones(tokens)

    def parts(hidden: jax.Array, matrix: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean(token_logprobs(hidden, matrix, targets, temperature, chunk=LOGITS)[0])

    def all_logits(hidden: jax.Array, matrix: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(hidden @ matrix.T)
        return jnp.mean(jnp.take_along_axis(logits, targets[:, None], axis=1))

    print(f"log-prob and gradient, T = {tokens:,}, V = {vocabulary:,}, D = {width}")
    found = {}
    for side, function in {"this package": parts, "all logits": all_logits}.items():
        program = jax.jit(jax.grad(function, argnums=(0, 1))).lower(hidden, matrix, targets).compile()
        analysis: Any = program.memory_analysis()
        jax.block_until_ready(program(hidden, matrix, targets))
        took = []
        for _ in range(2):
            began = perf_counter()
            jax.block_until_ready(program(hidden, matrix, targets))
            took.append(perf_counter() - began)
        found[side] = analysis.temp_size_in_bytes / 2**30, np.median(took)
        print(f"  {side:13} {found[side][0]:6.2f} GiB of scratch  {np.median(took):6.2f} s ({min(took):.2f}-{max(took):.2f})", flush=True)
    (memory, seconds), (all_memory, all_seconds) = found.values()
    print(f"  ratio: {memory / all_memory:.3f} of the memory, {seconds / all_seconds:.2f} of the time")


if __name__ == "__main__":
    main()
