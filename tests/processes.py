"""Who is alive below a process."""

import os
import time
from pathlib import Path


def descendants(process: int) -> set[int]:
    """Processes below this one. Those of a box are, whatever namespaces they are in."""
    try:
        text = "".join(Path(f"/proc/{process}/task/{thread}/children").read_text() for thread in os.listdir(f"/proc/{process}/task"))
    except OSError:
        return set()
    children = {int(child) for child in text.split()}
    return children.union(*map(descendants, children))


def alive(processes: set[int]) -> set[int]:
    return {process for process in processes if Path(f"/proc/{process}").exists()}


def until_gone(processes: set[int]) -> set[int]:
    """Those of the processes that are still there after half a minute: a busy machine is slow to end them."""
    deadline = time.monotonic() + 30
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive(processes)
