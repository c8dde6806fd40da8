"""Reinforcement learning of language-model agents over multi-turn episodes, in JAX.

Which tokens is the reward credited to, and which tokens may be in the loss at all? To see how this code answers, read

1. `data/episode.py`     the record of one episode: who wrote each token
2. `kernels/`            credit rules and losses as pure functions on arrays, one topic a file
3. `credit/`, `objective.py`   the same, applied to a `data/batch.py` Batch
4. `rollout/agent.py`    one episode: the policy acts, an environment answers
5. `train.py`            the whole loop
6. `config.py`           what an experiment file may say

`envs/` holds tasks and verifiers, `sandbox/` the machines they run on, `chat/` the words around them, `inference/` whatever
samples tokens, `models/` the decoder, `learner/` the update, `report/` what people look at. A room imports rooms below it
only; the host side (everything up to an Episode) imports no jax.
"""

__version__ = "0.1.0"
