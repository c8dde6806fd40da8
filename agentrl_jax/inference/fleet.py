"""Several servers that do the same: which one gets a call, who is well enough to get any, and what happens to a call whose server fails.

A session's calls go to the server that holds its cache; a new session goes where the fewest calls are running. A call that meets a fault
of infrastructure is tried again until its deadline: elsewhere, or where there is no elsewhere, after a probe has looked at the server.
Every server is probed all the time: one that fails a probe gets no calls, those it had move on at once, and it is back after the first
probe that it passes.

All that is done to a server for its health is done by one task, one thing after the other: it is probed, started again where that is
for us to do, and probed again. Nothing here knows what the servers do: `send` makes a call, `probe` looks at a server and mends what it
can, `restart` starts it again, and all raise `ServerError`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl_jax.inference.protocol import InferenceError

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound="Server")

ATTEMPTS = 4
"""Faults after which a call is given up, however much time it has left: it may be what makes them fail."""

RESTARTS = 3
"""Restarts without a passed probe between them after which a server is given up."""

_BACKOFF = 0.5  # seconds before a server is asked again, doubled for each attempt; and a probe has its say first


class ServerError(Exception):
    """A server failed in a way that another server, or the same one later, may not."""


@dataclass(eq=False)
class Server:
    """One of the fleet.

    room:     a place for each call that may run at once; further ones wait here
    fault:    why it failed its latest probe; None if it passed
    lost:     it was given up for good
    load:     calls running or waiting for room
    sessions: sessions whose cache it holds
    probes:   begun so far
    verdict:  number of the latest one that ended
    """

    url: str
    room: asyncio.Semaphore
    fault: str | None = None
    lost: bool = False
    load: int = 0
    sessions: int = 0
    probes: int = 0
    verdict: int = 0
    _calls: set[asyncio.Timeout] = field(default_factory=set)
    _doubt: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def well(self) -> bool:
        """Whether it gets calls."""
        return self.fault is None

    async def attempt(self, send: Callable[[], Awaitable[T]]) -> T:
        """One call, once there is room for it. Raises ServerError, also where the server fails a probe meanwhile."""
        self.load += 1
        try:
            async with self.room:
                if self.fault is not None:
                    raise ServerError(f"out of service: {self.fault}")
                async with asyncio.timeout(None) as call:
                    self._calls.add(call)
                    try:
                        return await send()
                    finally:
                        self._calls.discard(call)
        except TimeoutError:
            raise ServerError(f"out of service during the call: {self.fault}") from None
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
    restart:  kills a server that failed a probe and starts it again, which RESTARTS failures in a row end; None where others do that
    """

    def __init__(
        self,
        servers: Sequence[S],
        probe: Callable[[S], Awaitable[None]],
        *,
        poll: float,
        deadline: float,
        restart: Callable[[S], Awaitable[None]] | None = None,
    ) -> None:
        self.servers = tuple(servers)
        self._probe, self._poll, self._deadline, self._restart = probe, poll, deadline, restart
        self._homes: dict[str, S] = {}
        self._probed, self._closed = asyncio.Event(), False
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._watchers = [asyncio.create_task(self._watch(server), name=f"probe {server.url}") for server in self.servers]

    async def close(self) -> None:
        """Stop probing, and fail every call that is left with InferenceError."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._closed = True
        for server in self.servers:
            server.fault = "the client was closed"
            server.give_up()
        self._probed.set()

    async def call(self, session: str, send: Callable[[S], Awaitable[T]]) -> T:
        """What `send` returns for the session's server, or for another after a ServerError. Raises InferenceError with every fault met."""
        faults: list[str] = []
        tried: dict[S, int] = {}  # and the probe that will have begun after the fault
        try:
            async with asyncio.timeout(self._deadline):
                for attempt in range(ATTEMPTS):
                    server = await self._place(session, tried)
                    if server in tried:
                        await asyncio.sleep(_BACKOFF * 2**attempt)
                        await self.until(lambda server=server: self._closed or server.lost or server.verdict >= tried[server])
                        server = await self._place(session, tried)
                    try:
                        return await server.attempt(lambda server=server: send(server))
                    except ServerError as fault:
                        logger.warning("session %s: %s: %s", session, server.url, fault)
                        faults.append(f"{server.url}: {fault}")
                        tried[server] = server.probes + 1
                        server.doubt()
        except TimeoutError:
            out = self.faults()
            faults.append(f"not done after {self._deadline:g} s" + (f"; out of service: {out}" if out else ""))
        raise InferenceError(f"session {session}: {'; '.join(faults)}")

    def release(self, session: str) -> None:
        """The session is over; unknown ones are ignored."""
        server = self._homes.pop(session, None)
        if server is not None:
            server.sessions -= 1

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once it holds, which is looked at after every probe."""
        while not holds():
            self._probed.clear()
            await self._probed.wait()

    def faults(self) -> str:
        """The servers that are out of service, and why."""
        return "; ".join(f"{server.url}: {server.fault}" for server in self.servers if not server.well)

    async def _place(self, session: str, tried: Collection[S]) -> S:
        """The session's home if it is well, else a new home; waits while no server is well."""
        await self.until(lambda: self._closed or any(server.well for server in self.servers) or all(server.lost for server in self.servers))
        well = [server for server in self.servers if server.well]
        choice = [server for server in well if server not in tried] or well
        if not choice:
            raise InferenceError(f"session {session}: {'the client was closed' if self._closed else f'no server is left: {self.faults()}'}")
        home = self._homes.get(session)
        if home not in choice:
            self.release(session)
            home = min(choice, key=lambda server: (server.load, server.sessions))
            self._homes[session] = home
            home.sessions += 1
        return home

    async def _watch(self, server: S) -> None:
        """Keep it well, or give it up."""
        restarts, failed = 0, None
        while True:
            fault, failed = failed or await self._look(server), None
            self._mark(server, fault)
            if fault is None or self._restart is None:
                restarts = 0
                await server.pause(self._poll)
            elif restarts < RESTARTS:
                restarts += 1
                logger.warning("%s is started again", server.url)
                failed = await _fault_of(self._restart(server))
            else:
                server.lost = True
                self._mark(server, f"given up after {RESTARTS} restarts in a row: {fault}")
                return

    async def _look(self, server: S) -> str | None:
        """What a probe finds wrong with it."""
        server.probes += 1
        fault = await _fault_of(self._probe(server))
        server.verdict = server.probes
        return fault

    def _mark(self, server: S, fault: str | None) -> None:
        was, server.fault = server.fault, fault
        if was is None and fault is not None:
            server.give_up()
        if fault is not None and fault != was:
            logger.warning("%s is out of service: %s", server.url, fault)
        elif fault is None and was is not None:
            logger.warning("%s is back", server.url)
        self._probed.set()


async def _fault_of(action: Awaitable[None]) -> str | None:
    """Why it failed, or None. Whatever it was: a watcher that ended would never take the server back."""
    try:
        await action
    except (ServerError, InferenceError) as fault:
        return str(fault)
    except Exception as error:  # noqa: BLE001 - see above
        return f"{type(error).__name__}: {error}"
    return None
