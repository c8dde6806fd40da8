"""A real HTTP server on loopback that misbehaves as a test asks: how failures look from outside, without an engine behind them."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

Answer = tuple[int, Any]
MODELS = {"data": [{"id": "policy", "max_model_len": 64}]}


def completed(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What vLLM answers to a request for tokens: here always token 5, at log-prob -1."""
    n = body["sampling_params"]["max_tokens"]
    choice = {
        "token_ids": [5] * n,
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}] * n},
        "weight_versions": [{"version": "default", "start": 0, "end": n}],
        "finish_reason": "length",
    }
    return {"choices": [choice | changes], "usage": {"prompt_tokens": len(body["token_ids"])}}


class Loopback:
    """`async with Loopback() as server`: answers like vLLM, but for the paths in `answers`.

    answers: path to (status, JSON), or to an async function of the request's JSON that returns that, or None to hang up
    asked:   requests by path
    hung_up: requests whose client went before the answer
    """

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Answer | Callable[[Any], Awaitable[Answer | None]]] = {
            "/health": (200, None),
            "/v1/models": (200, MODELS),
            "/weight_info": (200, {"weight_version": "default"}),
            "/inference/v1/generate": self._generate,
        } | answers
        self.bodies: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.hung_up = 0
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen; after `stop`, on the same port again."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: every connection breaks, and new ones are refused."""
        self._server.close()
        broken, self._open = self._open, {}
        for task, writer in broken.items():
            task.cancel()
            writer.close()
        await asyncio.gather(*broken, *(writer.wait_closed() for writer in broken.values()), return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _generate(self, body: dict[str, Any]) -> Answer:
        if not body:
            return 422, {"error": {"message": "token_ids is missing"}}
        return 200, completed(body)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._open[task] = writer
        task.add_done_callback(lambda task: self._open.pop(task, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split()[1]
            sizes = [int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:")]
            body = json.loads(await reader.readexactly(sizes[0])) if sizes else None
            self.asked[path] += 1
            if body:
                self.bodies.append(body)
            answer = self.answers.get(path, (404, None))
            if callable(answer):
                answer = await self._unless_hung_up(answer(body), reader)
            if answer is not None:
                text = json.dumps(answer[1]).encode()
                writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (answer[0], len(text), text))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _unless_hung_up(self, answer: Awaitable[Answer | None], reader: asyncio.StreamReader) -> Answer | None:
        answering, gone = asyncio.ensure_future(answer), asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.hung_up += 1
                return None
            return answering.result()
        finally:
            answering.cancel()
            gone.cancel()
