"""What is the observation mask worth? The main run against the same run trained on everything after the prompt.

    python -m experiments.mask_ablation [seeds] [field=value ...]

Search-R1 (https://arxiv.org/abs/2503.09516, section 5.4) reports average exact match 0.431 with the mask and 0.343 without. Here:
success before and after, the share of the first step's gradient that sits on tokens the policy did not write, and how likely the
policy finds the tools' text before and after. Writes a figure into the folder of runs.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from agentrl_jax.config import Experiment, override
from agentrl_jax.credit import Estimates
from agentrl_jax.data.batch import Batch, Tokens
from agentrl_jax.data.collate import collate
from agentrl_jax.data.episode import Author
from agentrl_jax.data.store import read
from agentrl_jax.kernels.reduce import token_weights
from agentrl_jax.learner.forward import token_logprobs_of
from agentrl_jax.models.decoder import Params
from agentrl_jax.models.policy import Policy
from agentrl_jax.models.sharding import split_cpu
from agentrl_jax.report.load import EPISODES
from agentrl_jax.report.metrics import columns
from agentrl_jax.report.metrics import read as read_metrics
from agentrl_jax.runs import reported
from experiments.arms import arm, run, table
from experiments.bugfix_grpo import experiment


@jax.jit
def everything(tokens: Tokens) -> Tokens:
    """The same tokens with all that follows a segment's first sampled token in mask, loss and `predict`."""
    mask = tokens.mask.astype(jnp.int32)
    sampled = jnp.cumsum(mask, axis=1)
    before_segment = jax.lax.cummax(jnp.where(tokens.position == 0, sampled - mask, 0), axis=1)
    after = (tokens.segment > 0) & (sampled > before_segment)
    predict = jnp.broadcast_to(jnp.arange(after.shape[1], dtype=jnp.int32), after.shape)
    return replace(tokens, mask=after, in_loss=after, predict=predict)


@jax.jit
def _fill(batch: Batch, tokens: Tokens, logprobs: Float[Array, "B T"]) -> Batch:
    return replace(batch, tokens=replace(tokens, logprob=jnp.where(batch.tokens.mask, batch.tokens.logprob, logprobs)))


def unmask(batch: Batch, logprobs: Callable[[Tokens], Float[Array, "B T"]]) -> Batch:
    """`Experiment.rewrite` of the arm without the mask: no sampler reported the tools' tokens, so the trainer's log-probs stand in."""
    tokens = everything(batch.tokens)
    return _fill(batch, tokens, logprobs(tokens))


def gradient_share(base: Experiment, folder: Path) -> float:
    """Of the first step's gradient without the mask: norm of the part on tokens the policy did not write, over the sum of both norms."""
    policy = Policy.read(base.folder / "warmstart")
    first = list(islice((e for e in read(folder / EPISODES) if e.step == 0), base.rollout.groups * base.rollout.group_size))
    batch = jax.device_put(collate(first, row_length=base.row_length)[0])
    wide = Batch(everything(batch.tokens), batch.episodes)
    advantages = base.advantage(wide, Estimates()).advantages
    weights = token_weights(wide.tokens.mask, wide.tokens.episode, wide.episodes.group)

    @jax.jit
    def norm(mask: Bool[Array, "B T"]) -> Float[Array, ""]:
        def loss(params: Params) -> Float[Array, ""]:
            logprob, _ = token_logprobs_of(policy.model, params, wide.tokens)
            return -jnp.sum(jnp.where(mask, weights * advantages * logprob, 0.0))

        return optax.tree.norm(jax.grad(loss)(policy.params))

    policys, tools = float(norm(batch.tokens.mask)), float(norm(wide.tokens.mask & ~batch.tokens.mask))
    return tools / (policys + tools)


def tool_likelihood(base: Experiment, folder: Path, model: Path) -> float:
    """Mean log-prob, nats per token, of the tools' text in the first step's episodes of a run under the policy in `model`."""
    policy = Policy.read(model)
    first = [e for e in read(folder / EPISODES) if e.step == 0]
    host, _ = collate(first, row_length=base.row_length, pack=False)
    # One segment a row, in the order of the episodes: who wrote each column.
    author = np.full(host.tokens.ids.shape, -1)
    for row, segment in enumerate(segment for episode in first if episode.usable for segment in episode.segments):
        written = np.concatenate([np.full(len(span.tokens), span.author) for span in segment.spans])
        author[row, : len(written)] = written
    tokens = everything(jax.device_put(host).tokens)
    logprob = np.asarray(jax.jit(partial(token_logprobs_of, policy.model))(policy.params, tokens)[0])
    return float(logprob[(author == Author.ENVIRONMENT) & np.asarray(tokens.mask)].mean())


def plot(arms: dict[str, list[Path]], target: Path) -> None:
    """Held-out success by step, a line for each run."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, folders), colour in zip(arms.items(), ("#0072b2", "#d55e00"), strict=True):
        for number, folder in enumerate(folders):
            steps, values = columns(read_metrics(folder))["rollout/success"]
            smooth = np.convolve(values, np.ones(5) / 5, "valid")
            axes.plot(steps[4:], smooth, color=colour, alpha=0.8, label=name if number == 0 else None)
    axes.set(xlabel="step", ylabel="success of training episodes, mean of 5 steps", ylim=(0, 1))
    axes.legend(frameon=False)
    figure.savefig(target, dpi=150)


def compare(base: Experiment, seeds: range) -> None:
    """Train both arms, print the figures, and draw."""
    arms = {
        "with the mask": [run(arm(base, "seed", seed)) for seed in seeds],
        "without the mask": [run(arm(base, "unmasked", seed, rewrite=unmask)) for seed in seeds],
    }
    for name, folders in arms.items():
        print(table(name, folders))
    shares = [gradient_share(base, folder) for folder in arms["with the mask"]]
    spread = f"min {min(shares):.2f}  median {median(shares):.2f}  max {max(shares):.2f}"
    print(f"share of the gradient on tokens that the policy did not write: {spread}")
    for name, folders in arms.items():
        start = median(tool_likelihood(base, folder, base.folder / "warmstart") for folder in folders)
        after = median(tool_likelihood(base, folder, folder / "policy") for folder in folders)
        print(f"log-prob of the tools' text, {name}: {start:.2f} before, {after:.2f} after (nats per token, median over seeds)")
    target = Path(base.root) / "mask_ablation.png"
    plot(arms, target)
    print(f"figure: {target}")


def main(arguments: list[str]) -> int:
    split_cpu()
    with reported() as status:
        compare(override(experiment, arguments[1:]), range(int(arguments[0]) if arguments else 3))
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
