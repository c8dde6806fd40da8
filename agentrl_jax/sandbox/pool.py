"""Many boxes of one or several backends, lent one by one: bounded, started a few at a time, some kept ready, all closed."""

import asyncio
import itertools
import logging
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_jax.sandbox.protocol import Backend, ImageError, Limits, Result, Sandbox, SandboxError

FAILURES = 3  # failed starts one after another that set a backend aside
CLOSED = "the pool is not open"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stats:
    """Counts of a pool over all of its backends. Once it is closed, `live` and `leaked` are 0 if nothing was left behind.

    started:   boxes that a backend's `start` made; `forked`: those that `fork` made
    warm_hits: starts that were given a box kept ready
    failed:    starts and forks that a backend could not do
    closed:    boxes closed; `leaked`: those whose `close` raised, which only the end of their backend clears away
    live:      places taken: boxes lent, kept ready, being made and being closed
    warm:      boxes kept ready; `waiting`: starts and forks in the queue
    set_aside: names of the backends that get no starts at present
    """

    started: int
    forked: int
    warm_hits: int
    failed: int
    closed: int
    leaked: int
    live: int
    warm: int
    waiting: int
    set_aside: tuple[str, ...]


@dataclass(eq=False)
class _Host:
    """A backend and what it holds. `live` counts `forks` and what is being made (`starting`) or closed (`closing`) too."""

    name: str
    backend: Backend
    live: int = 0
    forks: int = 0
    starting: int = 0
    closing: int = 0
    idle: "deque[Lease]" = field(default_factory=deque)
    failures: int = 0  # of starts, one after another
    error: SandboxError | None = None  # the last of them
    aside: asyncio.TimerHandle | None = None  # what ends the time in which it gets no starts

    def take(self, fork: bool) -> None:
        self.live, self.forks, self.starting = self.live + 1, self.forks + fork, self.starting + 1

    def give_back(self, fork: bool) -> None:
        self.live, self.forks = self.live - 1, self.forks - fork


@dataclass(eq=False)
class _Ticket:
    """A place in the queue. `granted` is a host with a place to make a box in, or with a warm one."""

    number: int
    hosts: list[_Host]  # any of them will do
    warm: bool = False  # whether a warm box will do
    fork: bool = False  # forks go first
    granted: "asyncio.Future[tuple[_Host, Lease | None]]" = field(init=False)


class Pool:
    """A `Backend` made of others, which it opens and closes. `Pool([Bubblewrap()])`, or one Docker backend for each of several hosts.

    backends:  a start goes to the one with the fewest live boxes
    max_live:  boxes alive at once on each backend, whatever made them; starts beyond that wait, first come first served
    forks:     of these, places kept for forks (default an eighth, at least 1)
    starts:    boxes made at once on each backend; more only slows an engine down
    warm:      empty boxes kept ready on each backend, for starts with these `limits` and neither snapshot nor image
    set_aside: seconds that a backend gets no starts after three in a row failed
    fork_wait: seconds that a fork may wait for a place

    Scoring forks a box that its episode still holds, so a fork that waited behind starts, which wait for episodes to end, would wait for
    ever. Therefore starts leave `forks` places free, and waiting forks go before waiting starts: a fork waits for other forks only. Who
    holds forks while asking for more can still use them up; `fork_wait` makes that a SandboxError.

    A start that one backend fails is tried on the others; SandboxError says what each of them answered. Starts that only a backend set
    aside could serve wait until it has been tried again, by one start, and fail with that one.

    A box is lent once: what was kept ready is empty and unused. It counts until its `close` is over; a cancelled `close` goes on, and
    `__aexit__` waits for it.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        max_live: int = 64,
        forks: int | None = None,
        starts: int = 4,
        warm: int = 0,
        limits: Limits | None = None,
        set_aside: float = 10.0,
        fork_wait: float = 60.0,
    ) -> None:
        forks = max(1, max_live // 8) if forks is None else forks
        if not backends:
            raise ValueError("Pool.backends is empty: give at least one, such as [Bubblewrap()]")
        if not 1 <= forks < max_live:
            raise ValueError(f"Pool.forks must be at least 1 and less than max_live, got forks {forks} and max_live {max_live}")
        if starts < 1:
            raise ValueError(f"Pool.starts must be at least 1, got {starts}")
        if not 0 <= warm <= max_live - forks:
            raise ValueError(f"Pool.warm must be from 0 to max_live - forks = {max_live - forks}, got {warm}")
        self._hosts = [_Host(f"backend {number} ({type(backend).__name__})", backend) for number, backend in enumerate(backends)]
        self._max_live, self._reserve, self._starts, self._warm = max_live, forks, starts, warm
        self._limits, self._set_aside, self._fork_wait = limits or Limits(), set_aside, fork_wait
        self._queue: list[_Ticket] = []
        self._boxes: set[Lease] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # closing boxes, and filling up the warm ones
        self._counts = dict.fromkeys(("started", "forked", "warm_hits", "failed", "closed", "leaked"), 0)
        self._numbers, self._closed = itertools.count(), True

    @property
    def stats(self) -> Stats:
        return Stats(
            **self._counts,
            live=sum(host.live for host in self._hosts),
            warm=sum(len(host.idle) for host in self._hosts),
            waiting=len(self._queue),
            set_aside=tuple(host.name for host in self._hosts if host.aside),
        )

    async def __aenter__(self) -> "Pool":
        async with AsyncExitStack() as stack:
            for host in self._hosts:
                try:
                    await stack.enter_async_context(host.backend)
                except SandboxError as error:
                    raise SandboxError(f"{host.name} does not open: {error}") from error
            self._backends = stack.pop_all()
        self._closed = False
        self._emptied = asyncio.Event()
        self._serve()
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with self._backends:
            self._closed = True
            for timer in filter(None, (host.aside for host in self._hosts)):
                timer.cancel()
            for ticket in (ticket for ticket in self._queue if not ticket.granted.done()):
                ticket.granted.set_exception(SandboxError(CLOSED))
            self._queue.clear()
            await asyncio.gather(*(box.close() for box in tuple(self._boxes)), return_exceptions=True)  # `_end` logs what fails
            # What is being made now is closed by whoever makes it; a backend must not end before, or it would start one after its end.
            self._serve()
            await self._emptied.wait()
            while self._tasks:
                await asyncio.wait(self._tasks)
            for host in self._hosts:
                host.idle.clear()
                host.aside, host.failures = None, 0

    async def start(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        snapshot: bytes | None = None,
        limits: Limits | None = None,
        image: str | Path | None = None,
    ) -> "Lease":
        limits = limits or Limits()
        ticket = _Ticket(next(self._numbers), list(self._hosts), warm=snapshot is image is None and limits == self._limits)
        while True:
            host, lease = await self._grant(ticket)
            try:
                if lease is None:
                    return await self._make(host, host.backend.start(files, snapshot=snapshot, limits=limits, image=image))
                return await self._fill(lease, files or {})
            except SandboxError as error:
                if self._closed:
                    raise
                if lease is None:
                    ticket.hosts.remove(host)
                    if not ticket.hosts and isinstance(error, ImageError):
                        raise
                    if not ticket.hosts:
                        raise self._no_backend() from error
                ticket.warm = False

    async def _fork(self, lease: "Lease") -> "Lease":
        try:
            async with asyncio.timeout(self._fork_wait):
                await self._grant(_Ticket(next(self._numbers), [lease.host], fork=True))
        except TimeoutError:
            reason = f"{lease.host.name} had no place for a fork within {self._fork_wait:g} s"
            raise SandboxError(f"{reason}: close forks sooner, or raise the pool's `forks`") from None
        return await self._make(lease.host, lease.box.fork(), fork=True)

    async def _grant(self, ticket: _Ticket) -> "tuple[_Host, Lease | None]":
        """Wait in the queue. A place that is granted is to be used or given back, and a cancelled wait gives it back."""
        if self._closed:
            raise SandboxError(CLOSED)
        ticket.granted = asyncio.get_running_loop().create_future()
        insort(self._queue, ticket, key=lambda ticket: (not ticket.fork, ticket.number))
        self._serve()
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            if ticket.granted.cancelled():
                self._queue = [other for other in self._queue if other is not ticket]
            elif not ticket.granted.exception():  # granted in the very moment of the cancellation
                host, lease = ticket.granted.result()
                if lease is not None:
                    host.idle.appendleft(lease)
                else:
                    host.give_back(ticket.fork)
                    host.starting -= 1
            self._serve()
            raise

    def _serve(self) -> None:
        """Grant what is free, forks first, then in the order of arrival; fill up the warm boxes with what nobody waits for."""
        if self._closed:
            if not any(host.live for host in self._hosts):
                self._emptied.set()
            return
        for ticket in tuple(self._queue):
            if ticket.granted.done():  # cancelled
                continue
            if found := self._find(ticket):
                self._queue.remove(ticket)
                ticket.granted.set_result(found)
            elif len(ticket.hosts) == len(self._hosts) and not (ticket.fork or any(host.idle for host in self._hosts)):
                break  # any start could have used what serves one behind it, and thousands may wait
        for host in self._hosts:
            while len(host.idle) + host.starting < self._warm and self._may_start(host) and self._has_place(host):
                host.take(fork=False)
                self._spawn(self._keep_ready(host))

    def _find(self, ticket: _Ticket) -> "tuple[_Host, Lease | None] | None":
        """What serves this ticket now, taken."""
        hosts = sorted(ticket.hosts, key=lambda host: host.live)
        if ticket.warm and (ready := [host for host in hosts if host.idle]):
            return ready[0], ready[0].idle.popleft()
        hosts = [host for host in hosts if (host.starting < self._starts if ticket.fork else self._may_start(host))]
        for host in hosts:
            if self._has_place(host, ticket.fork):
                host.take(ticket.fork)
                return host, None
        for host in hosts:
            if host.idle and not host.closing:  # a warm box that does not do makes room for one that does
                host.idle.pop().end()
                break
        return None

    def _may_start(self, host: _Host) -> bool:
        """Whether starts may go there; only one at a time where the last ones failed."""
        return not host.aside and host.starting < (self._starts if host.failures < FAILURES else 1)

    def _has_place(self, host: _Host, fork: bool = False) -> bool:
        return host.live < self._max_live and (fork or host.live - host.forks < self._max_live - self._reserve)

    async def _make(self, host: _Host, making: Awaitable[Sandbox], fork: bool = False, keep: bool = False) -> "Lease":
        """A box in the place that was granted, kept ready if `keep`; the place is free again if there is none."""
        try:
            box = await making
        except BaseException as error:
            host.give_back(fork)
            if isinstance(error, SandboxError):
                self._counts["failed"] += 1
                if not fork and not isinstance(error, ImageError):  # the task's fault, not the backend's
                    self._failed(host, error)
            raise
        else:
            if not fork:
                host.failures = 0
            self._counts["forked" if fork else "started"] += 1
            lease = Lease(self, host, box, fork)
            self._boxes.add(lease)
            if keep:
                host.idle.append(lease)
        finally:
            host.starting -= 1
            self._serve()
        if self._closed:
            await lease.close()
            raise SandboxError(CLOSED)
        return lease

    async def _fill(self, lease: "Lease", files: Mapping[str, bytes]) -> "Lease":
        """Put the files of a start into a warm box, with the errors of a start."""
        try:
            if files and (result := await lease.put(files)).exit_code != 0:
                raise ValueError(f"the files given to start() do not unpack within {self._limits}: {result.text}")
        except BaseException as error:
            self._counts["failed"] += isinstance(error, SandboxError)
            with suppress(SandboxError):  # the error that matters is the one at hand
                await lease.close()
            raise
        self._counts["warm_hits"] += 1
        return lease

    async def _keep_ready(self, host: _Host) -> None:
        async def empty() -> Sandbox:
            try:
                return await host.backend.start(limits=self._limits)
            except Exception as error:  # nothing was asked of it that could be wrong
                raise SandboxError(f"an empty box does not start: {error!r}") from error

        with suppress(SandboxError):  # counted, and logged where it comes again
            await self._make(host, empty(), keep=True)

    def _failed(self, host: _Host, error: SandboxError) -> None:
        """A start failed. Too many in a row set the host aside for a while; after that, one decides for all that wait."""
        host.error = error
        host.failures += 1
        if host.aside or self._closed or host.failures < FAILURES:
            return

        def try_again() -> None:
            host.aside = None
            self._serve()

        host.aside = asyncio.get_running_loop().call_later(self._set_aside, try_again)
        logger.warning("%s gets no starts for %g s, as %d in a row failed: %s", host.name, self._set_aside, host.failures, error)
        for ticket in tuple(self._queue):
            if not ticket.fork and not ticket.granted.done() and all(host.failures > FAILURES for host in ticket.hosts):
                self._queue.remove(ticket)
                ticket.granted.set_exception(self._no_backend())

    def _no_backend(self) -> SandboxError:
        answers = "; ".join(f"{host.name}: {host.error}" for host in self._hosts)
        return SandboxError(f"no backend of the pool starts a box ({answers})")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, lease: "Lease") -> None:
        host, ended = lease.host, False
        try:
            await lease.box.close()
            ended = True
        except Exception as error:
            logger.warning("a box of %s does not close: %r", host.name, error)
            raise
        finally:
            host.closing -= 1
            self._counts["closed" if ended else "leaked"] += 1
            self._boxes.discard(lease)
            host.give_back(lease.forked)
            self._serve()


class Lease:
    """A `Sandbox` of a pool: a box of one of its backends, used as that one is, whose place is free again once it is closed."""

    def __init__(self, pool: Pool, host: _Host, box: Sandbox, forked: bool) -> None:
        self._pool, self.host, self.box, self.forked = pool, host, box, forked
        self._ending: asyncio.Task[None] | None = None

    async def exec(self, argv: Sequence[str], **options: Any) -> Result:
        return await self.box.exec(argv, **options)

    async def exec_fresh(self, argv: Sequence[str], **options: Any) -> Result:
        return await self.box.exec_fresh(argv, **options)

    async def put(self, files: Mapping[str, bytes]) -> Result:
        return await self.box.put(files)

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        return await self.box.get(path, limit=limit)

    async def fork(self) -> "Lease":
        """As in the protocol; it may wait for a place, see `Pool`."""
        return await self._pool._fork(self)

    async def snapshot(self) -> bytes:
        return await self.box.snapshot()

    async def pause(self) -> None:
        await self.box.pause()

    async def resume(self) -> None:
        await self.box.resume()

    async def close(self) -> None:
        await asyncio.shield(self.end())

    def end(self) -> asyncio.Task[None]:
        """Begin to close the box, once, in a task of the pool's: whoever waits may be cancelled, the closing goes on."""
        if self._ending is None:
            self.host.closing += 1
            self._ending = self._pool._spawn(self._pool._end(self))
            self._ending.add_done_callback(lambda task: task.cancelled() or task.exception())  # an end nobody waits for is no warning
        return self._ending
