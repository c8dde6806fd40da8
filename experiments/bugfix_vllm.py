"""The main run in short, sampled by a vLLM server on this machine's CPUs instead of the embedded engine.

    make .venv-vllm/pins                          # once: vLLM in an environment of its own, two minutes, 1.9 GB (`make vllm` does it too)
    make train EXP=experiments/bugfix_vllm.py

The policy is that of the main run with heads of 32, which vLLM computes on CPUs; embedded parts make its warm start. Each step then pushes
its weights into the running server, and its line tells how far apart the log-probs of trainer and server are.
"""

from dataclasses import replace

from agentrl_jax.config import SMALL
from agentrl_jax.inference.served import Served
from experiments import bugfix_grpo

experiment = replace(
    bugfix_grpo.experiment,
    name="bugfix_vllm",
    model=replace(SMALL, head_dim=32),
    inference=Served,
    evaluate=replace(bugfix_grpo.experiment.evaluate, every=10, final=50),
    steps=10,
)
