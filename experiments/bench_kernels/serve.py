"""One side of the benchmark: a process that is asked for a rule on stdin and answers on stdout, one line of JSON each.

Request:  rule, repeats, limit (seconds for all of it), save (file for what the rule gives)
Answer:   ms (of each repeat), peak (MB of memory so far); or error
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.bench_kernels.batch import Arrays

Outputs = Any


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("out of time")


def serve(
    path: str,
    load: Callable[[Arrays], Any],
    rule: Callable[[str, Any], Callable[[], Outputs]],
    to_numpy: Callable[[Outputs], list[NDArray[Any]]],
) -> None:
    """`rule` makes a function of a rule's name and the arrays; its first call, which may compile, is not timed. The last one is kept."""
    signal.signal(signal.SIGALRM, _out_of_time)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with np.load(path) as file:
        arrays = load(dict(file))
    made, run = "", list
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(request["limit"])
        try:
            if request["rule"] != made:
                run = rule(request["rule"], arrays)
                np.savez(request["save"], *to_numpy(run()))
                made = request["rule"]
            ms = []
            for _ in range(request["repeats"]):
                start = time.perf_counter()
                run()
                ms.append(1e3 * (time.perf_counter() - start))
            answer: dict[str, Any] = {"ms": ms}
        except Exception as error:  # noqa: BLE001 - one rule that fails, such as a compiler that is missing, is a line of the table
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            signal.alarm(0)
        answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(answer), file=answers, flush=True)
