"""`python -m agentrl_jax.report RUN`: write the page of a run folder and say where it is."""

import argparse
import sys
from pathlib import Path

from agentrl_jax.report.page import build


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 where the folder holds no run."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_jax.report", description="Write RUN/report.html.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, with metrics.jsonl and the episodes")
    folder = parser.parse_args(arguments).run
    try:
        path = build(folder)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{path}  ({path.stat().st_size / 1e6:.1f} MB)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
