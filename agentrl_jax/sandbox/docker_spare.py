"""One container kept ready for the next fork, as starting one is nearly all of what a fork takes."""

import asyncio
from contextlib import suppress

from agentrl_jax.sandbox.docker_engine import Container, Engine
from agentrl_jax.sandbox.protocol import Limits, SandboxError


class Spare:
    """From the first fork on, an empty container of the limits and image of the last one. It is handed out once, and gone after `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kind: tuple[Limits, str] | None = None
        self._making: asyncio.Task[Container] | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._closed = False

    async def take(self, limits: Limits, image: str) -> Container:
        """An unused container, by preference the one kept ready; the next one is begun. Raises SandboxError."""
        making, self._making = self._making, None  # from here on nobody else can take it
        container = None
        try:
            if making and (limits, image) == self._kind:
                await asyncio.wait({making})
                if not making.cancelled() and not making.exception() and not making.result().link.gone:
                    container = making.result()
        finally:
            if making and not container:
                self._drop(making)
        container = container or await self._engine.start(limits, image)
        if not (self._closed or self._making):
            self._kind = limits, image
            self._making = asyncio.create_task(self._engine.start(limits, image))
        return container

    async def close(self) -> None:
        self._closed = True
        if self._making:
            self._drop(self._making)
        while self._dropping:
            await asyncio.wait(self._dropping)

    def _drop(self, making: asyncio.Task[Container]) -> None:
        """In a task, which goes on whoever is cancelled."""

        async def drop() -> None:
            await asyncio.wait({making})
            if not making.cancelled() and not making.exception():
                with suppress(SandboxError):  # an engine that is gone
                    await self._engine.remove(making.result())

        making.cancel()
        task = asyncio.create_task(drop())
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)
