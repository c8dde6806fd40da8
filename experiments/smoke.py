"""Run `bugfix_smoke` afresh and check what must hold of any run, however short.

python -m experiments.smoke [field=value ...]
"""

import asyncio
import math
import shutil
import sys

from agentrl_jax.config import override
from agentrl_jax.data.episode import Ending
from agentrl_jax.data.store import read
from agentrl_jax.models.sharding import split_cpu
from agentrl_jax.report.load import EPISODES
from agentrl_jax.report.metrics import read as read_metrics
from agentrl_jax.runs import reported
from agentrl_jax.train import train
from experiments.bugfix_smoke import experiment


def main(arguments: list[str]) -> int:
    split_cpu()
    with reported() as status:
        smoke = override(experiment, arguments)
        shutil.rmtree(smoke.folder, ignore_errors=True)
        folder = asyncio.run(train(smoke))
        records = read_metrics(folder)
        collected = smoke.rollout.groups * smoke.rollout.group_size
        checks = {
            "every step is on record": len(records) == smoke.steps,
            "every number is finite": all(math.isfinite(value) for record in records for value in record.values()),
            "endings sum to the episodes": all(sum(r[f"rollout/ending/{e.value}"] for e in Ending) == collected for r in records),
            "trainer and sampler agree to 1e-4": all(r["train/logprob_difference_max"] <= 1e-4 for r in records),
            "every episode is stored": sum(1 for _ in read(folder / EPISODES)) >= collected * smoke.steps,
            "the policy is written": (folder / "policy" / "model.safetensors").is_file(),
        }
        for what, holds in checks.items():
            print(f"{'ok  ' if holds else 'FAIL'}  {what}")
        status.code = 0 if all(checks.values()) else 1
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
