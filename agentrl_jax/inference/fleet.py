"""Several servers that do the same: which one gets a call, who is well enough to get any, and what happens to a call whose server fails.

A session's calls go to the server that holds its cache; a new session goes where the fewest calls are running. A call that meets a fault
of infrastructure is tried again, elsewhere if there is an elsewhere, until its deadline. Every server is probed all the time: one that
fails a probe gets no calls, those it had move on at once, and it is back after the first probe that it passes.

Nothing here knows what the servers do: `send` makes a call, `probe` looks at a server, and both raise `ServerError`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl_jax.inference.protocol import InferenceError

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound="Server")

ATTEMPTS = 4
"""Faults after which a call is given up, however much time it has left: it may be what makes them fail."""

_BACKOFF = 0.1  # seconds before a server is asked again, doubled for each attempt: the probe has its say first


class ServerError(Exception):
    """A server failed in a way that another server, or the same one later, may not."""


@dataclass(eq=False)
class Server:
    """One of the fleet.

    room:     a place for each call that may run at once; further ones wait here
    well:     it passed its latest probe
    load:     calls running or waiting for room
    sessions: sessions whose cache it holds
    """

    url: str
    room: asyncio.Semaphore
    well: bool = True
    load: int = 0
    sessions: int = 0
    _calls: set[asyncio.Timeout] = field(default_factory=set)
    _doubt: asyncio.Event = field(default_factory=asyncio.Event)

    async def attempt(self, send: Callable[[], Awaitable[T]]) -> T:
        """One call, once there is room for it. Raises ServerError, also where the server fails a probe meanwhile."""
        self.load += 1
        try:
            async with self.room:
                if not self.well:
                    raise ServerError("it failed a health check")
                async with asyncio.timeout(None) as call:
                    self._calls.add(call)
                    try:
                        return await send()
                    finally:
                        self._calls.discard(call)
        except TimeoutError:
            raise ServerError("it failed a health check during the call") from None
        finally:
            self.load -= 1

    def doubt(self) -> None:
        """Probe it now."""
        self._doubt.set()

    def give_up(self) -> None:
        """End every running call with a ServerError."""
        calls, self._calls = self._calls, set()
        for call in calls:
            call.reschedule(asyncio.get_running_loop().time())

    async def pause(self, seconds: float) -> None:
        """Sleep, unless or until there is doubt."""
        with suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
            async with asyncio.timeout(seconds):
                await self._doubt.wait()
        self._doubt.clear()


class Fleet(Generic[S]):
    """The servers and their sessions; `start` begins to probe them, `close` ends that.

    probe:    raises ServerError where the server should get no calls
    poll:     seconds from one probe of a server to the next
    deadline: seconds that a call may take, all attempts and waiting together
    """

    def __init__(self, servers: Sequence[S], probe: Callable[[S], Awaitable[None]], *, poll: float, deadline: float) -> None:
        self.servers = tuple(servers)
        self._probe, self._poll, self._deadline = probe, poll, deadline
        self._homes: dict[str, S] = {}
        self._changed, self._closed = asyncio.Event(), False
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._watchers = [asyncio.create_task(self._watch(server), name=f"probe {server.url}") for server in self.servers]

    async def close(self) -> None:
        """Stop probing, and fail every call that is left with InferenceError."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._closed = True
        self._changed.set()
        for server in self.servers:
            server.well = False
            server.give_up()

    async def call(self, session: str, send: Callable[[S], Awaitable[T]]) -> T:
        """What `send` returns for the session's server, or for another after a ServerError. Raises InferenceError with every fault met."""
        faults: list[str] = []
        tried: set[S] = set()
        try:
            async with asyncio.timeout(self._deadline):
                for attempt in range(ATTEMPTS):
                    server = await self._place(session, tried)
                    if server in tried:
                        await asyncio.sleep(_BACKOFF * 2**attempt)
                        server = await self._place(session, tried)
                    try:
                        return await server.attempt(lambda server=server: send(server))
                    except ServerError as fault:
                        logger.warning("session %s: %s: %s", session, server.url, fault)
                        faults.append(f"{server.url}: {fault}")
                        tried.add(server)
                        server.doubt()
        except TimeoutError:
            out = ", ".join(server.url for server in self.servers if not server.well)
            faults.append(f"not done after {self._deadline:g} s" + (f"; out of service: {out}" if out else ""))
        raise InferenceError(f"session {session}: {'; '.join(faults)}")

    def release(self, session: str) -> None:
        """The session is over; unknown ones are ignored."""
        server = self._homes.pop(session, None)
        if server is not None:
            server.sessions -= 1

    async def _place(self, session: str, tried: set[S]) -> S:
        """The session's home if it is well, else a new home; waits while no server is well."""
        while not self._closed:
            well = [server for server in self.servers if server.well]
            choice = [server for server in well if server not in tried] or well
            home = self._homes.get(session)
            if home in choice:
                return home
            if choice:
                self.release(session)
                home = min(choice, key=lambda server: (server.load, server.sessions))
                self._homes[session] = home
                home.sessions += 1
                return home
            self._changed.clear()
            await self._changed.wait()
        raise InferenceError(f"session {session}: the client was closed")

    async def _watch(self, server: S) -> None:
        while True:
            try:
                await self._probe(server)
            except ServerError as fault:
                self._mark(server, str(fault))
            except Exception as error:  # noqa: BLE001 - a watcher that ended would never take the server back
                self._mark(server, f"{type(error).__name__}: {error}")
            else:
                self._mark(server, None)
            await server.pause(self._poll)

    def _mark(self, server: S, fault: str | None) -> None:
        was, server.well = server.well, fault is None
        if was and fault is not None:
            logger.warning("%s is out of service: %s", server.url, fault)
            server.give_up()
        elif not was and fault is None:
            logger.warning("%s is back", server.url)
            self._changed.set()
