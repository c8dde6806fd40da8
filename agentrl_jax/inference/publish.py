"""New weights into running vLLM servers, without a restart and without losing a request.

    await publish([server.url], config, params, version=7)

In two phases, each on all servers at once. First a thread of every server lays the weights beside its model and checks them (names, shapes,
dtypes, finite numbers, SHA-256), while sampling goes on; if one server refuses, none changes. Then each server stops between two tokens,
loads, takes the version's name and goes on: what it was sampling continues under the new weights with its cache computed anew, as in the
embedded engine, and `weight_versions` of the completion says from which token on. The other half is vllm_worker.py, within vLLM.
"""

import asyncio
import base64
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import httpx
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from numpy.typing import NDArray

from agentrl_jax.inference.protocol import InferenceError
from agentrl_jax.inference.vllm_server import call, client
from agentrl_jax.models.decoder import ModelConfig, Params
from agentrl_jax.models.pretrained import tensor_names

logger = logging.getLogger(__name__)

Through: TypeAlias = Literal["memory", "request"]

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_POLL = 0.02  # seconds from one question whether the weights are staged to the next


async def publish(
    urls: Sequence[str], config: ModelConfig, params: Params, version: int, *, through: Through = "memory", deadline: float = 120.0
) -> None:
    """Serve `params` as `version` from every server in `urls`; see `push`. `params` must not be donated before it returns."""
    weights = await asyncio.to_thread(lambda: Weights(tensors_of(config, params)))
    await push(urls, weights, version, through=through, deadline=deadline)


def tensors_of(config: ModelConfig, params: Params) -> dict[str, NDArray[Any]]:
    """The policy's tensors as its Hugging Face folder holds them: their names, and matrices as [out, in]. Tied embeddings occur once.

    On CPUs they are views of the trainer's own memory, which may be donated: `Weights` copies them.
    """
    weights: dict[Any, Any] = flatten_dict(jax.device_get(params))
    return {name: weights[path].T if path[-1] == "kernel" else weights[path] for name, path in tensor_names(config).items()}


class Weights:
    """A copy of tensors as a safetensors file in memory, which goes with this object. sha256: of its bytes, in hex."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._descriptor = os.memfd_create("weights")
        weakref.finalize(self, os.close, self._descriptor)
        hashed = hashlib.sha256()
        with open(self._descriptor, "wb", closefd=False) as file:
            for part in _parts(tensors):
                hashed.update(part)
                file.write(part)
        self.sha256 = hashed.hexdigest()

    @property
    def path(self) -> str:
        """By which other processes of this user open it: it has no name, so that it is gone with us, however we end."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            return file.read()


def _parts(tensors: Mapping[str, NDArray[Any]]) -> Iterator[bytes | memoryview]:
    """The file piece by piece, so that no more than one tensor is ever copied beside it."""
    header, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[str(tensor.dtype)], "shape": tensor.shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # the format aligns the tensors so
    yield len(head).to_bytes(8, "little") + head
    for tensor in tensors.values():
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


async def push(urls: Sequence[str], weights: Weights, version: int, *, through: Through = "memory", deadline: float = 120.0) -> None:
    """Serve `weights` (names, shapes and dtype of the checkpoint that the servers loaded) as `version`, an int32 that is not negative.

    through:  "memory" for servers of this user on this machine, not in a container; "request" for any, a third more bytes
    deadline: seconds that a call may go without progress

    Raises InferenceError, naming the servers and why. A server that refused, or was not reached, serves its old weights on; pushing again
    is safe. Once begun, a push runs to its end even if its caller is cancelled, so that no server is left paused.
    """
    if not 0 <= version < 2**31:
        raise ValueError(f"version must be in 0 .. 2**31 - 1, got {version}")
    task = asyncio.create_task(_push(list(urls), weights, version, through, deadline))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if (error := task.exception()) is not None:
            logger.error("%s", error)  # noqa: TRY400 - the text says it all
        raise


async def _push(urls: list[str], weights: Weights, version: int, through: Through, deadline: float) -> None:
    async with await client(timeout=deadline) as http:
        update = await asyncio.to_thread(_body, weights, through)
        if refused := await _each(urls, lambda url: _stage(http, url, update, deadline)):
            # Those that did stage forget it; one that cannot be told so will at the next push.
            await _each(urls, lambda url: _forget(http, url))
            raise InferenceError(f"version {version} is served nowhere, every server has what it had: {_listing(refused)}")
        if failed := await _each(urls, lambda url: _swap(http, url, version)):
            served = len(urls) - len(failed)
            raise InferenceError(f"version {version} is served by {served} of {len(urls)} servers, push it again: {_listing(failed)}")


def _body(weights: Weights, through: Through) -> bytes:
    """The body of /update_weights."""
    file = {"path": weights.path} if through == "memory" else {"data": base64.b64encode(weights.read()).decode("ascii")}
    return json.dumps({"update_info": {"sha256": weights.sha256} | file}).encode()


async def _stage(http: httpx.AsyncClient, url: str, update: bytes, deadline: float) -> None:
    await _forget(http, url)
    await call(http, f"{url}/start_weight_update", {})
    await call(http, f"{url}/update_weights", update)
    end = time.monotonic() + deadline
    while not all(worker["staged"] for worker in (await call(http, f"{url}/collective_rpc", {"method": "weights_staged"}))["results"]):
        if time.monotonic() > end:
            raise InferenceError(f"{url}: has not read the weights after {deadline:g} s")
        await asyncio.sleep(_POLL)


async def _forget(http: httpx.AsyncClient, url: str) -> None:
    """End what a push has begun, such as that of a trainer which died within it."""
    await call(http, f"{url}/collective_rpc", {"method": "abort_weight_update"})
    await call(http, f"{url}/resume", {})


async def _swap(http: httpx.AsyncClient, url: str, version: int) -> None:
    try:
        # "keep" freezes the running requests; the cache is dropped, as it is that of the old weights.
        await call(http, f"{url}/pause?mode=keep&clear_cache=true", {})
        await call(http, f"{url}/finish_weight_update", {"weight_version": str(version)})
    finally:
        await call(http, f"{url}/resume", {})


async def _each(urls: Sequence[str], step: Callable[[str], Awaitable[None]]) -> list[InferenceError]:
    """Take a step with every server; the errors of those that failed. Waits for all, whatever happens."""
    outcomes = await asyncio.gather(*(step(url) for url in urls), return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in errors:
        if not isinstance(error, InferenceError):
            raise error
    return [error for error in errors if isinstance(error, InferenceError)]


def _listing(errors: list[InferenceError]) -> str:
    return "; ".join(map(str, errors))
