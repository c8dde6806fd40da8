"""Break every part of a run while it runs, and audit what becomes of its episodes.

    python -m experiments.chaos [--times N] [--only servers|sandboxes|trainer]

For each fault one line: how often it was made (--times, default 3; the trainer is killed 20 times), the episodes around it, the
attempts that were made again, the episodes left without a score, the seconds of the slowest wait that has a deadline, and how they ended.
The run stops with an error where a wait exceeds its deadline, an episode is lost or counted twice, a failure of infrastructure is scored,
or a process, container or file is left over. All load stays on this machine. Half an hour, of which vLLM's starts are the half; faults of
vLLM and of a Docker engine (root, `dockerd`) are left out, with a line that says so, where those are missing.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator

from experiments.chaos import sandboxes, servers, trainer
from experiments.chaos.audit import HEADER, AuditError, Row

KILLS = 20


async def rows(only: str | None, times: int) -> AsyncIterator[Row | str]:
    if only in (None, "trainer"):
        for row in trainer.run(KILLS):  # it blocks: nothing else is going on
            yield row
        if reason := await sandboxes.working(sandboxes.DOCKER):
            yield f"the trainer over Docker: left out: {reason}"
        else:
            for row in trainer.run(times, trainer.DOCKER):
                yield row
    if only in (None, "sandboxes"):
        async for row in sandboxes.run(times):
            yield row
    if only in (None, "servers"):
        async for row in servers.run(times):
            yield row


async def show(only: str | None, times: int) -> None:
    print(HEADER, flush=True)
    async for row in rows(only, times):
        print(row, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="Break every part of a run while it runs.")
    parser.add_argument("--times", type=int, default=3, metavar="N", help="how often each fault is made (default 3)")
    parser.add_argument("--only", choices=("servers", "sandboxes", "trainer"), help="faults of this part alone")
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error(f"--times must be at least 1, got {options.times}")
    logging.disable(logging.WARNING)  # what is broken on purpose is no news
    try:
        asyncio.run(show(options.only, options.times))
    except AuditError as error:
        print(f"BROKEN  {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
