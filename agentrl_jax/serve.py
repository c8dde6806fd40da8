"""A vLLM server on this machine's CPUs for the policy of an experiment, until Ctrl-C.

    python -m agentrl_jax.serve VENV EXPERIMENT.py [field=value ...]

Served are the weights that the experiment's run ended with, or those of its warm start, or fresh ones: a run that samples from this server
(`inference.urls=http://127.0.0.1:...`) pushes its own before it asks for anything.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import jax

from agentrl_jax import config
from agentrl_jax.config import Experiment
from agentrl_jax.inference.vllm_server import serve
from agentrl_jax.models.decoder import init_params
from agentrl_jax.models.policy import Policy
from agentrl_jax.prepare import tokenizer_of
from agentrl_jax.runs import reported


def policy_of(experiment: Experiment) -> Policy:
    """What there is of the experiment's policy."""
    for folder in filter(None, (experiment.policy, experiment.folder / "policy", experiment.folder / "warmstart")):
        if Path(folder).exists():
            return Policy.read(Path(folder))
    return Policy(experiment.model, init_params(experiment.model, jax.random.key(experiment.seed)), tokenizer_of(experiment))


async def _serve(venv: Path, file: str, experiment: Experiment) -> None:
    context = experiment.rollout.context
    with tempfile.TemporaryDirectory(prefix="policy-") as scratch:
        folder = Path(scratch, "policy")
        policy_of(experiment).write(folder, context_limit=context)
        print("vLLM is starting: about half a minute.", flush=True)
        async with serve(folder, venv=venv, context_limit=context, slots=experiment.rollout.slots) as server:
            print(f"{server.url} serves the policy of {experiment.name}, until Ctrl-C. To train from it:", flush=True)
            print(f'  make train EXP={file} ARGS="inference.urls={server.url}"', flush=True)
            await asyncio.Event().wait()


def main(arguments: Sequence[str]) -> int:
    """Serve until interrupted. Returns the exit status."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print("usage: python -m agentrl_jax.serve VENV EXPERIMENT.py [field=value ...]", file=sys.stderr)
        return 2
    venv, file, *overrides = arguments
    with reported() as status, suppress(KeyboardInterrupt):
        asyncio.run(_serve(Path(venv), file, config.override(config.load(file), overrides)))
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
