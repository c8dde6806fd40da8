"""Speed, each part against a named alternative in the same run, and where the time of a training step goes.

    python -m experiments.bench [RUN]

Runs `bench_engine` and the smallest size of `bench_learner`, then reads the wall-clock shares off the metrics of a run (default: the
latest). Run nothing else meanwhile.
"""

import subprocess
import sys
from pathlib import Path
from statistics import median

from agentrl_jax.report.metrics import FILE, columns, read

PARTS = ("generate", "sandbox", "train", "rest")


def shares(run: Path) -> str:
    """Median seconds and share of each part of a step, the first left out, since it compiles; and how much was compiled."""
    found = columns(read(run))
    seconds = {part: median(found[f"time/{part}"][1][1:]) for part in PARTS}
    total = sum(seconds.values())
    parts = "  ".join(f"{part} {value:.2f} s ({value / total:.1%})" for part, value in seconds.items())
    programs = {kind: int(found[f"{kind}/programs"][1][-1]) for kind in ("rollout", "train")}
    return (
        f"a step of {run}: {parts}\n"
        f"programs compiled in {len(found['time/train'][1])} steps: generation {programs['rollout']}, updates {programs['train']}"
    )


def main(arguments: list[str]) -> int:
    for command in (["bench_engine"], ["bench_learner", "--sizes", "0.5M"]):
        print(f"\n{' '.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", f"experiments.{command[0]}", *command[1:]], check=True)
    made = sorted(Path("runs").glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    runs = [Path(arguments[0])] if arguments else [path.parent for path in made]
    print(f"\n{shares(runs[-1])}" if runs else "\nno run yet: `make train` makes one, then this shows where its time went")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
