"""New weights into running vLLM servers, without a restart and without losing a request.

    await publish([server.url], config, params, version=7)

In two phases, each on all servers at once. First the weights are laid beside every model and checked there (names, shapes, dtypes, finite
numbers, SHA-256), while sampling goes on; if one server refuses, none changes. Then each server stops between two tokens, loads, takes the
version's name and goes on: what it was sampling continues under the new weights with its cache computed anew, as in the embedded engine,
and `weight_versions` of the completion says from which token on. The other half is vllm_worker.py, within vLLM.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import httpx
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from numpy.typing import NDArray
from safetensors.numpy import save

from agentrl_jax.inference.protocol import InferenceError
from agentrl_jax.inference.vllm_server import call, client
from agentrl_jax.models.decoder import ModelConfig, Params
from agentrl_jax.models.pretrained import tensor_names

logger = logging.getLogger(__name__)

Through: TypeAlias = Literal["memory", "request"]


async def publish(
    urls: Sequence[str], config: ModelConfig, params: Params, version: int, *, through: Through = "memory", deadline: float = 120.0
) -> None:
    """Serve `params` as `version` from every server in `urls`; see `push`. `params` must not be donated before it returns."""
    await push(urls, await asyncio.to_thread(tensors_of, config, params), version, through=through, deadline=deadline)


def tensors_of(config: ModelConfig, params: Params) -> dict[str, NDArray[Any]]:
    """The policy's tensors as its Hugging Face folder holds them: their names, and matrices as [out, in]. Tied embeddings occur once.

    They are copies: on CPUs an array of numpy may otherwise be the trainer's own memory.
    """
    weights: dict[Any, Any] = flatten_dict(jax.device_get(params))
    names = tensor_names(config)
    return {name: np.array(weights[path].T if path[-1] == "kernel" else weights[path], order="C") for name, path in names.items()}


async def push(
    urls: Sequence[str], tensors: Mapping[str, NDArray[Any]], version: int, *, through: Through = "memory", deadline: float = 120.0
) -> None:
    """Serve `tensors` (names, shapes and dtype of the checkpoint that the servers loaded) as `version`, an int32 that is not negative.

    through:  "memory" for servers of this user on this machine, not in a container; "request" for any, a third more bytes
    deadline: seconds that a call may go without progress

    Raises InferenceError, naming the servers and why. A server that refused, or was not reached, serves its old weights on; pushing again
    is safe. Once begun, a push runs to its end even if its caller is cancelled, so that no server is left paused.
    """
    if not 0 <= version < 2**31:
        raise ValueError(f"version must be in 0 .. 2**31 - 1, got {version}")
    task = asyncio.create_task(_push(list(urls), tensors, version, through, deadline))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if (error := task.exception()) is not None:
            logger.error("%s", error)  # noqa: TRY400 - the text says it all
        raise


async def _push(urls: list[str], tensors: Mapping[str, NDArray[Any]], version: int, through: Through, deadline: float) -> None:
    async with await client(timeout=deadline) as http:
        with contextlib.ExitStack() as stack:
            update = await asyncio.to_thread(_pack, tensors, through, stack)
            refused = await _each(urls, lambda url: _stage(http, url, update))
        if refused:
            # Those that did stage forget it; one that cannot be told so will at the next push.
            await _each(urls, lambda url: _forget(http, url))
            raise InferenceError(f"version {version} is served nowhere, every server has what it had: {_listing(refused)}")
        if failed := await _each(urls, lambda url: _swap(http, url, version)):
            served = len(urls) - len(failed)
            raise InferenceError(f"version {version} is served by {served} of {len(urls)} servers, push it again: {_listing(failed)}")


def _pack(tensors: Mapping[str, NDArray[Any]], through: Through, stack: contextlib.ExitStack) -> bytes:
    """The body of /update_weights. The file in memory that it names lives as long as the stack."""
    data = save(dict(tensors))
    update = {"sha256": hashlib.sha256(data).hexdigest()}
    if through == "request":
        update["data"] = base64.b64encode(data).decode("ascii")
    else:
        # A file without a name: other processes of this user open it through this one, and it goes with it, however that ends.
        descriptor = os.memfd_create("weights")
        stack.callback(os.close, descriptor)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        update["path"] = f"/proc/{os.getpid()}/fd/{descriptor}"
    return json.dumps({"update_info": update}).encode()


async def _stage(http: httpx.AsyncClient, url: str, update: bytes) -> None:
    await _forget(http, url)
    await call(http, f"{url}/start_weight_update", {})
    await call(http, f"{url}/update_weights", update)


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
