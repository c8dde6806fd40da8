"""Routing, retries and health of several servers. Those here answer wrongly, slowly or not at all; sampling is tested on real ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from agentrl_jax.inference.fleet import ATTEMPTS, RESTARTS
from agentrl_jax.inference.protocol import Completion, InferenceError, Sampling
from agentrl_jax.inference.vllm import PUSHES, TOKENS, VLLM
from tests.inference.loopback import Loopback, completed

PROMPT = np.arange(1, 6, dtype=np.int32)


@asynccontextmanager
async def fleet(*servers: Loopback, **options: Any) -> AsyncIterator[VLLM]:
    """Started servers, and a client of them."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        yield await stack.enter_async_context(VLLM([server.url for server in servers], poll=0.02, **options))


async def ask(client: VLLM, session: str) -> Completion:
    return await client.generate(PROMPT, Sampling(4, seed=0), session=session)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def out(client: VLLM) -> list[str]:
    return [server.url for server in client.servers if not server.well]


class Gate:
    """Answers once it is open. `waiting` counts the requests before it."""

    def __init__(self) -> None:
        self.open, self.waiting = asyncio.Event(), 0

    async def __call__(self, body: Any) -> Any:
        if not body:
            return 422, None
        self.waiting += 1
        await self.open.wait()
        self.waiting -= 1
        return 200, completed(body)


async def test_new_sessions_spread_and_old_ones_go_home():
    a, b = Loopback(), Loopback()
    async with fleet(a, b) as client:
        for turn in range(3):
            for session in "abcdef":
                await ask(client, session)
            assert (a.asked[TOKENS] - 1, b.asked[TOKENS] - 1) == (3 * (turn + 1), 3 * (turn + 1))
        before = a.asked[TOKENS]
        for _ in range(5):
            await ask(client, "a")
        assert a.asked[TOKENS] - before in (0, 5)


async def test_new_sessions_go_where_the_fewest_calls_run():
    gate = Gate()
    slow, quick = Loopback(**{TOKENS: gate}), Loopback()
    async with fleet(slow, quick) as client, asyncio.TaskGroup() as group:
        group.create_task(ask(client, "first"))
        await until(lambda: gate.waiting == 1)
        for i in range(6):
            await ask(client, f"later {i}")
        assert quick.asked[TOKENS] == 6 + 1
        gate.open.set()


async def test_a_released_session_counts_no_more():
    a, b = Loopback(), Loopback()
    async with fleet(a, b) as client:
        for i in range(6):
            await ask(client, f"{i}")
            await client.release(f"{i}")
        await client.release("nobody")
        assert [server.sessions for server in client.servers] == [0, 0]


async def test_no_more_requests_run_at_a_server_than_it_has_room_for():
    gate = Gate()
    server = Loopback(**{TOKENS: gate})
    async with fleet(server, concurrency=2) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(client, f"{i}")) for i in range(5)]
        await until(lambda: client.servers[0].load == 5)
        await until(lambda: gate.waiting == 2)
        await asyncio.sleep(0.5)
        assert gate.waiting == 2
        gate.open.set()
    assert [task.result().queued > 0.4 for task in tasks] == [False, False, True, True, True]


@pytest.mark.parametrize("answer", [(500, {"error": {"message": "no memory"}}), (503, None), (429, None), None], ids=str)
async def test_a_fault_is_tried_again_elsewhere(answer: Any):
    async def bad(body: Any) -> Any:
        return answer if body else (422, None)

    broken, good = Loopback(**{TOKENS: bad}), Loopback()
    async with fleet(broken, good) as client:
        for session in "abcdef":
            done = await ask(client, session)
            assert done.tokens.tolist() == [5, 5, 5, 5]
        assert broken.asked[TOKENS] > 1
        await ask(client, "a")
        assert good.asked[TOKENS] == 7 + 1


async def test_a_lone_server_is_asked_again():
    faults = iter([(500, None), None])

    async def twice(body: Any) -> Any:
        return next(faults, (200, completed(body))) if body else (422, None)

    async with fleet(Loopback(**{TOKENS: twice})) as client:
        assert len((await ask(client, "a")).tokens) == 4


async def test_a_call_is_not_spent_on_a_crashed_server_before_a_probe_has_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl_jax.inference.fleet._BACKOFF", 0.0)
    crashed, noticed = asyncio.Event(), asyncio.Event()

    async def crash(body: Any) -> Any:
        if not body or noticed.is_set():
            return (200, completed(body)) if body else (422, None)
        crashed.set()
        return None

    async def health(body: Any) -> Any:
        if not crashed.is_set() or noticed.is_set():
            return 200, None
        await asyncio.sleep(0.2)
        noticed.set()
        return 503, None

    server = Loopback(**{TOKENS: crash, "/health": health})
    async with fleet(server) as client:
        assert len((await ask(client, "a")).tokens) == 4
        assert server.asked[TOKENS] == 2 + 1


async def test_what_keeps_failing_is_given_up_with_every_reason():
    async def bad(body: Any) -> Any:
        return (500, {"error": {"message": "no memory"}}) if body else (422, None)

    server = Loopback(**{TOKENS: bad})
    async with fleet(server) as client:
        with pytest.raises(InferenceError, match=f"session a: .*{server.url}.*HTTP 500: no memory"):
            await ask(client, "a")
        assert server.asked[TOKENS] == ATTEMPTS + 1


async def test_a_refused_request_is_not_tried_again():
    async def picky(body: Any) -> Any:
        return 400, {"error": {"message": "token id 99 is out of vocabulary"}}

    a, b = Loopback(**{TOKENS: picky}), Loopback(**{TOKENS: picky})
    async with fleet(a, b) as client:
        with pytest.raises(InferenceError, match="HTTP 400: token id 99 is out of vocabulary"):
            await ask(client, "a")
        assert a.asked[TOKENS] + b.asked[TOKENS] == 2 + 1


async def test_a_server_that_dies_loses_no_call_and_is_taken_back():
    gate = Gate()
    mortal, other = Loopback(**{TOKENS: gate}), Loopback()
    async with fleet(mortal, other) as client:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(client, f"{i}")) for i in range(4)]
            await until(lambda: gate.waiting == 2)
            await mortal.stop()
        assert all(len(task.result().tokens) == 4 for task in tasks)
        await until(lambda: out(client) == [mortal.url])
        before = other.asked[TOKENS]
        for i in range(4, 8):
            await ask(client, f"{i}")
        assert other.asked[TOKENS] == before + 4
        gate.open.set()
        await mortal.start()
        await until(lambda: not out(client))
        before = mortal.asked[TOKENS]
        await ask(client, "new")
        assert mortal.asked[TOKENS] == before + 1


async def test_calls_leave_a_server_that_stops_answering_health_checks():
    hang, gate = asyncio.Event(), Gate()

    async def health(body: Any) -> Any:
        if hang.is_set():
            await asyncio.Event().wait()
        return 200, None

    stuck, other = Loopback(**{TOKENS: gate, "/health": health}), Loopback()
    async with fleet(stuck, other, patience=0.5) as client:
        tasks = [asyncio.create_task(ask(client, f"{i}")) for i in range(2)]
        await until(lambda: gate.waiting == 1)
        hang.set()
        assert [len((await task).tokens) for task in tasks] == [4, 4]
        assert out(client) == [stuck.url]
        await until(lambda: stuck.hung_up > 0)


async def test_one_answer_that_comes_too_late_is_no_fault():
    """It may be us who were late to read it."""
    late = iter([1.5])

    async def health(body: Any) -> Any:
        await asyncio.sleep(next(late, 0))
        return 200, None

    server, restarted = Loopback(**{"/health": health}), list[str]()

    async def restart(url: str) -> None:
        restarted.append(url)

    async with fleet(server, patience=1.0, restart=restart) as client:
        await until(lambda: server.asked["/health"] > 3)
        assert not out(client)
    assert not restarted


async def test_while_no_server_is_well_calls_wait():
    server = Loopback()
    async with fleet(server) as client:
        await server.stop()
        await until(lambda: out(client) == [server.url])
        task = asyncio.create_task(ask(client, "a"))
        await asyncio.sleep(0.05)
        assert not task.done()
        await server.start()
        assert len((await task).tokens) == 4


async def test_the_deadline_ends_the_waiting():
    gate = Gate()
    server = Loopback(**{TOKENS: gate})
    async with fleet(server, deadline=0.2) as client:
        with pytest.raises(InferenceError, match=r"session a: not done after 0\.2 s"):
            await ask(client, "a")
        await until(lambda: server.hung_up == 1)
        await server.stop()
        await until(lambda: out(client) == [server.url])
        with pytest.raises(InferenceError, match=f"not done after 0.2 s; out of service: {server.url}"):
            await ask(client, "a")


async def test_cancelling_hangs_up_and_leaves_nothing():
    gate = Gate()
    server = Loopback(**{TOKENS: gate})
    async with fleet(server, concurrency=2) as client:
        tasks = [asyncio.create_task(ask(client, f"{i}")) for i in range(4)]
        await until(lambda: gate.waiting == 2)
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        await until(lambda: server.hung_up == 2)
        assert client.servers[0].load == 0
        gate.open.set()
        assert len((await ask(client, "after")).tokens) == 4


async def test_closing_fails_the_calls_that_are_left():
    gate = Gate()
    busy, down = Loopback(**{TOKENS: gate}), Loopback()
    async with fleet(busy, concurrency=2) as client:
        running = [asyncio.create_task(ask(client, f"{i}")) for i in range(4)]
        await until(lambda: gate.waiting == 2)
    async with fleet(down) as client:
        await down.stop()
        await until(lambda: out(client) == [down.url])
        running.append(asyncio.create_task(ask(client, "waiting")))
        await asyncio.sleep(0.01)
    errors = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(error, InferenceError) and "closed" in str(error) for error in errors), errors


class Weights:
    """Servers with weights. `push(version)` gives them; `started(server)` is what a server has after its start.

    pushes: URL and version of every push that was begun
    """

    def __init__(self, *servers: Loopback) -> None:
        self.servers = dict.fromkeys(servers, "default")
        self.pushes: list[tuple[str, int]] = []
        self.refusing = asyncio.Event()
        for server in servers:
            server.answers["/weight_info"] = partial(self._told, server)

    async def _told(self, server: Loopback, body: Any) -> Any:
        return 200, {"weight_version": self.servers[server]}

    def push(self, version: int) -> Callable[[str], Awaitable[None]]:
        async def give(url: str) -> None:
            self.pushes.append((url, version))
            await asyncio.sleep(0.02)
            if self.refusing.is_set():
                raise InferenceError(f"{url}: HTTP 500: no room")
            [server] = [server for server in self.servers if server.url == url]
            self.servers[server] = str(version)

        return give


async def test_after_an_update_every_server_has_the_weights():
    a, b = Loopback(), Loopback()
    weights = Weights(a, b)
    async with fleet(a, b) as client:
        for version in (1, 2):
            await client.update(weights.push(version), version)
            assert set(weights.servers.values()) == {str(version)}
            for session in "ab":
                await ask(client, session)
            assert {server.bodies[-1]["cache_salt"] for server in (a, b)} == {f"version {version}"}
        assert len(weights.pushes) == 4, "each server is given each version once"


async def test_the_same_version_of_other_weights_is_given_too():
    server = Loopback()
    weights = Weights(server)
    async with fleet(server) as client:
        for _ in range(2):
            await client.update(weights.push(0), 0)
        assert weights.pushes == [(server.url, 0)] * 2


async def test_an_update_passes_over_a_server_that_is_out_and_makes_up_for_it():
    mortal, other = Loopback(), Loopback()
    weights = Weights(mortal, other)
    async with fleet(mortal, other) as client:
        await client.update(weights.push(1), 1)
        await mortal.stop()
        await until(lambda: out(client) == [mortal.url])
        await client.update(weights.push(2), 2)
        assert weights.servers == {mortal: "1", other: "2"}
        weights.servers[mortal] = "default"
        await mortal.start()
        await until(lambda: not out(client))
        assert weights.servers[mortal] == "2"
        before = mortal.asked[TOKENS]
        for i in range(4):
            await ask(client, f"{i}")
        assert mortal.asked[TOKENS] > before
        assert mortal.bodies[-1]["cache_salt"] == "version 2"


async def test_an_update_waits_for_a_server_that_is_well():
    server = Loopback()
    weights = Weights(server)
    async with fleet(server) as client:
        await server.stop()
        await until(lambda: out(client) == [server.url])
        task = asyncio.create_task(client.update(weights.push(1), 1))
        await asyncio.sleep(0.05)
        assert not task.done()
        await server.start()
        await task
        assert weights.servers[server] == "1"


async def test_a_push_that_fails_is_made_again():
    server = Loopback()
    weights = Weights(server)
    async with fleet(server) as client:
        weights.refusing.set()
        task = asyncio.create_task(client.update(weights.push(1), 1))
        await until(lambda: len(weights.pushes) == 2)
        weights.refusing.clear()
        await task
        assert (weights.servers[server], out(client)) == ("1", [])


async def test_an_update_that_every_server_refuses_is_an_error_with_the_reason():
    server = Loopback()
    weights = Weights(server)
    async with fleet(server) as client:
        weights.refusing.set()
        with pytest.raises(InferenceError, match=f"no server takes version 1: {server.url}: .*HTTP 500: no room"):
            await client.update(weights.push(1), 1)
        assert len(weights.pushes) == PUSHES


async def test_after_a_failed_push_a_server_is_given_the_weights_whatever_it_says():
    server = Loopback()
    weights = Weights(server)
    async with fleet(server) as client:
        await client.update(weights.push(1), 1)
        weights.refusing.set()
        weights.servers[server] = "default"
        await until(lambda: out(client) == [server.url])
        weights.servers[server] = "1"
        weights.refusing.clear()
        made = len(weights.pushes)
        await until(lambda: not out(client))
        assert len(weights.pushes) > made


async def test_a_server_that_was_left_paused_is_given_the_weights_again():
    server = Loopback(**{"/is_paused": (200, {"is_paused": False})})
    weights = Weights(server)
    async with fleet(server) as client:
        await client.update(weights.push(1), 1)
        server.answers["/is_paused"] = (200, {"is_paused": True})
        await until(lambda: len(weights.pushes) > 1)


async def test_of_two_updates_at_once_the_later_one_stays():
    server = Loopback()
    weights = Weights(server)
    async with fleet(server) as client:
        first = asyncio.create_task(client.update(weights.push(1), 1))
        await until(lambda: len(weights.pushes) == 1)
        await client.update(weights.push(2), 2)
        await first
        assert weights.servers[server] == "2"


async def test_an_engine_that_hangs_behind_a_healthy_front_is_found_out():
    async def hang(body: Any) -> Any:
        await asyncio.Event().wait()

    stuck, other = Loopback(**{"/is_paused": hang}), Loopback()
    async with fleet(stuck, other, patience=0.1) as client:
        await until(lambda: out(client) == [stuck.url])


class Restarter:
    """Starts a stopped server again, with the weights of its start, unless it is broken; counts how often it was asked to."""

    def __init__(self, server: Loopback) -> None:
        self.server, self.weights, self.asked, self.broken = server, Weights(server), 0, False

    async def __call__(self, url: str) -> None:
        assert url == self.server.url
        self.asked += 1
        if self.broken:
            raise InferenceError("vLLM ended instead of starting: no memory")
        self.weights.servers[self.server] = "0"
        await self.server.start()


@pytest.mark.parametrize("version", [0, 1])
async def test_a_server_of_our_own_is_started_again_and_given_the_weights(version: int):
    """Also where the weights of its start are called what the present ones are called."""
    gate = Gate()
    server = Loopback(**{TOKENS: gate})
    restarter = Restarter(server)
    async with fleet(server, restart=restarter) as client:
        await client.update(restarter.weights.push(version), version)
        task = asyncio.create_task(ask(client, "a"))
        await until(lambda: gate.waiting == 1)
        await server.stop()
        gate.open.set()
        assert len((await task).tokens) == 4
        assert restarter.weights.pushes == [(server.url, version)] * 2
        assert restarter.asked == 1


async def test_what_does_not_start_again_is_given_up_and_every_call_says_why():
    server = Loopback()
    restarter = Restarter(server)
    async with fleet(server, restart=restarter) as client:
        restarter.broken = True
        waiting = asyncio.create_task(ask(client, "waiting"))
        await server.stop()
        calls = [waiting, asyncio.create_task(ask(client, "later")), asyncio.create_task(client.update(restarter.weights.push(1), 1))]
        why = f"given up after {RESTARTS} restarts in a row: vLLM ended instead of starting: no memory"
        for error in (await asyncio.gather(*calls, return_exceptions=True))[1:]:
            assert isinstance(error, InferenceError)
            assert why in str(error)
        assert restarter.asked == RESTARTS


async def test_what_fails_after_every_restart_is_given_up():
    server = Loopback(**{"/health": (503, None)})
    restarter = Restarter(server)

    async def again(url: str) -> None:
        await server.stop()
        await restarter(url)

    async with fleet(server, restart=again) as client:
        await until(lambda: bool(out(client)))
        with pytest.raises(InferenceError, match=f"given up after {RESTARTS} restarts in a row: /health answers HTTP 503"):
            await ask(client, "a")
        assert restarter.asked == RESTARTS
