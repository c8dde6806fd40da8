"""The pool: what it promises under any timing, with a backend whose timing the test decides, and what it does with real boxes."""

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.pool import Pool
from agentrl_jax.sandbox.protocol import Backend, ImageError, Limits, Result, Sandbox, SandboxError
from tests.processes import descendants, until_gone

OTHER = Limits(disk=1 << 20)


class Timed:
    """A `Backend` of timing only: its boxes hold a dict. Everything takes some turns of the event loop, and fails as often as told."""

    def __init__(self, seed: int = 0, *, turns: int = 3, fail: float = 0.0) -> None:
        self._random, self._turns, self.fail = random.Random(seed), turns, fail
        self.live = self.most_live = self.starting = self.most_starting = self.asked = 0
        self.boxes: list[TimedBox] = []
        self.order: list[bytes] = []
        self.open = False
        self.held: asyncio.Event | None = None  # holds up starts

    async def __aenter__(self) -> "Timed":
        self.open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.live == 0, "a pool ends its boxes, and waits for it, before it closes their backend"
        self.open = False

    async def start(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        snapshot: bytes | None = None,
        limits: Limits | None = None,
        image: str | Path | None = None,
    ) -> "TimedBox":
        if image is not None:
            raise ImageError(f"no image {image}")
        self.order += (files or {}).values()
        return await self.make(dict(files or {}))

    async def make(self, files: dict[str, bytes]) -> "TimedBox":
        assert self.open
        self.asked += 1
        self.live += 1
        self.starting += 1
        self.most_live, self.most_starting = max(self.live, self.most_live), max(self.starting, self.most_starting)
        try:
            await self.wait()
            if self.held:
                await self.held.wait()
            if self._random.random() < self.fail:
                raise SandboxError("out of order")
        except BaseException:
            self.live -= 1
            raise
        finally:
            self.starting -= 1
        self.boxes.append(TimedBox(self, files))
        return self.boxes[-1]

    async def wait(self) -> None:
        for _ in range(self._random.randint(0, self._turns)):
            await asyncio.sleep(0)


class TimedBox:
    def __init__(self, backend: Timed, files: dict[str, bytes]) -> None:
        self.backend, self.files, self.closes = backend, files, 0

    async def exec(self, argv: Any, **options: Any) -> Result:
        await self.backend.wait()
        return Result(0, b"")

    async def exec_fresh(self, argv: Any, **options: Any) -> Result:
        return await self.exec(argv)

    async def put(self, files: Mapping[str, bytes]) -> Result:
        self.backend.order += files.values()
        await self.backend.wait()
        self.files |= files
        return Result(0 if sum(map(len, files.values())) < 100 else 1, b"No space left")

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        await self.backend.wait()
        return self.files.get(path)

    async def fork(self) -> "TimedBox":
        return await self.backend.make(dict(self.files))

    async def snapshot(self) -> bytes:
        return b""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        self.closes += 1
        await self.backend.wait()
        self.backend.live -= 1


async def turns(count: int = 100) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def check_nothing_left(pool: Pool, *backends: Timed) -> None:
    stats = pool.stats
    assert (stats.live, stats.leaked, stats.waiting, stats.warm) == (0, 0, 0, 0)
    assert stats.started + stats.forked == stats.closed == sum(len(backend.boxes) for backend in backends)
    assert [box.closes for backend in backends for box in backend.boxes] == [1] * stats.closed


async def episode(pool: Pool, number: int, chance: random.Random) -> None:
    """Start, use, score in a fork, close; now and then a crash leaves the box to the pool."""
    files = {"me": b"%d" % number}
    box = await pool.start(files, snapshot=chance.choice([None, None, None, b"tar"]), limits=chance.choice([None, None, OTHER]))
    assert box.box.files == files, "an empty box that nobody used"
    if chance.random() < 0.1:
        return
    try:
        await box.exec(["true"])
        if chance.random() < 0.7:
            fork = await box.fork()
            try:
                assert await fork.get("me") == files["me"]
            finally:
                await fork.close()
    finally:
        await asyncio.gather(box.close(), box.close())


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    max_live = draw(st.integers(2, 6))
    forks = draw(st.integers(1, max_live - 1))
    warm = draw(st.integers(0, min(2, max_live - forks)))
    return {"max_live": max_live, "forks": forks, "warm": warm, "starts": draw(st.integers(1, 3))}


@hypothesis.given(settings(), st.integers(1, 3), st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.5]))
def test_bounds_hold_and_nothing_is_left_whatever_fails_or_is_cancelled(
    options: dict[str, Any], count: int, seed: int, fail: float, cancelled: float
):
    async def run() -> None:
        chance = random.Random(seed)
        backends = [Timed(seed + number, fail=fail if number == 0 else fail / 4) for number in range(count)]
        async with Pool(backends, **options, set_aside=0.001, fork_wait=20) as pool:
            tasks = []
            for number in range(30):
                tasks.append(asyncio.create_task(episode(pool, number, random.Random(seed + number))))
                await turns(chance.randint(0, 3))
                for task in tasks:
                    if chance.random() < cancelled / 5:
                        task.cancel()
            # What a crashed episode left takes its place until the end, so that the last ones may wait for ever.
            await asyncio.wait(tasks, timeout=0.02)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert pool.stats.waiting == 0
        check_nothing_left(pool, *backends)
        for backend in backends:
            assert backend.most_live <= options["max_live"]
            assert backend.most_starting <= options["starts"]
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                assert isinstance(outcome, SandboxError), repr(outcome)
                assert "out of order" in str(outcome)
                assert fail > 0

    asyncio.run(run())


@hypothesis.given(settings(), st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 2**32))
def test_first_come_first_served_whoever_gives_up(options: dict[str, Any], stays: list[bool], seed: int):
    async def run() -> None:
        backend = Timed(seed)
        async with Pool([backend], **options) as pool:
            await turns()
            held = [await pool.start(limits=OTHER) for _ in range(options["max_live"] - options["forks"])]
            tasks = []
            for number in range(len(stays)):
                tasks.append(asyncio.create_task(pool.start({"n": b"%d" % number})))
                await asyncio.sleep(0)
            assert pool.stats.waiting == len(stays)
            for task, stay in zip(tasks, stays, strict=True):
                if not stay:
                    task.cancel()
            for box in held:
                await box.close()
            for task, stay in zip(tasks, stays, strict=True):
                if stay:
                    await (await task).close()
            assert backend.order == [b"%d" % number for number, stay in enumerate(stays) if stay]
        check_nothing_left(pool, backend)

    asyncio.run(run())


@pytest.mark.parametrize("warm", [0, 2])
async def test_cancelling_at_any_await_gives_everything_back(warm: int):
    backend = Timed(turns=2)
    async with Pool([backend], max_live=4, forks=2, warm=warm) as pool:
        await turns()
        holder = await pool.start({"a": b"1"})

        async def started() -> Sandbox:
            return await pool.start({"b": b"2"})

        for moment in range(12):
            for use in (started, holder.fork):
                await turns()
                task = asyncio.create_task(use())
                await turns(moment)
                task.cancel()
                (made,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(made, Sandbox):
                    await made.close()
                await turns()
                assert pool.stats.live == 1 + pool.stats.warm
                assert backend.live == pool.stats.live
    check_nothing_left(pool, backend)


@pytest.mark.parametrize("limits", [None, OTHER], ids=["warm box", "place"])
async def test_what_is_granted_in_the_moment_of_a_cancellation_is_given_back(limits: Limits | None):
    backend = Timed(turns=4)
    async with Pool([backend], max_live=2, warm=1) as pool:
        start = asyncio.create_task(pool.start(limits=limits))
        await asyncio.sleep(0)
        assert pool.stats.waiting == 1, "while the one place is taken by a box that is not ready yet"
        while pool.stats.waiting:
            await asyncio.sleep(0)
        start.cancel()
        await turns()
        assert start.cancelled()
        assert (pool.stats.live, pool.stats.warm) == (1, 1)
        await (await pool.start()).close()
    check_nothing_left(pool, backend)


async def test_a_cancelled_close_goes_on():
    backend = Timed()
    async with Pool([backend], max_live=2) as pool:
        box = await pool.start()
        closing = asyncio.create_task(box.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await (await pool.start()).close()
        await box.close()
    check_nothing_left(pool, backend)


async def test_forks_go_before_starts_and_do_not_wait_for_episodes():
    backend = Timed()
    async with Pool([backend], max_live=3, forks=1) as pool:
        holders = [await pool.start() for _ in range(2)]
        starts = [asyncio.create_task(pool.start()) for _ in range(5)]
        await turns()
        assert pool.stats.waiting == 5
        first = await holders[0].fork()
        second = asyncio.create_task(holders[1].fork())
        await turns()
        assert (pool.stats.waiting, pool.stats.live) == (6, 3)
        await first.close()
        await (await second).close()
        assert not any(start.done() for start in starts), "the place that is kept is for forks"
        await holders[0].close()
        for start in starts:
            await (await start).close()
    check_nothing_left(pool, backend)


async def test_forks_that_are_held_forever_are_an_error_that_says_so():
    backend = Timed()
    async with Pool([backend], max_live=2, fork_wait=0.01) as pool:
        box = await pool.start()
        await box.fork()
        with pytest.raises(SandboxError, match=r"backend 0 \(Timed\) had no place for a fork within 0.01 s"):
            await box.fork()
    check_nothing_left(pool, backend)


async def test_a_task_without_an_image_is_no_fault_of_a_backend():
    pool = Pool([Timed()], max_live=4)
    async with pool:
        for _ in range(9):
            with pytest.raises(ImageError, match="no image nowhere"):
                await pool.start(image="nowhere")
        assert pool.stats.set_aside == ()
        await (await pool.start()).close()


async def test_warm_boxes_serve_starts_and_make_room_for_what_they_do_not_serve():
    backend = Timed()
    async with Pool([backend], max_live=3, forks=1, warm=2) as pool:
        await turns()
        assert (pool.stats.warm, pool.stats.started) == (2, 2)
        box = await pool.start({"a": b"1"})
        assert (pool.stats.warm_hits, await box.get("a")) == (1, b"1")
        assert box.box is backend.boxes[0]
        other = await pool.start(limits=OTHER)
        assert (pool.stats.warm, pool.stats.closed, pool.stats.warm_hits) == (0, 1, 1)
        forks = [await other.fork()]
        await box.close()
        await turns()
        assert pool.stats.warm == 1
        forks.append(await other.fork())
        assert (pool.stats.warm, pool.stats.live) == (0, 3)
    check_nothing_left(pool, backend)


async def test_a_warm_box_is_lent_while_other_starts_wait_for_their_turn():
    backend = Timed()
    async with Pool([backend], max_live=6, starts=1, warm=1) as pool:
        await turns()
        backend.held = asyncio.Event()
        starts = [asyncio.create_task(pool.start(limits=OTHER)) for _ in range(3)]
        await turns()
        assert (pool.stats.waiting, pool.stats.warm) == (2, 1)
        await pool.start()
        backend.held.set()
        await asyncio.gather(*starts)
    check_nothing_left(pool, backend)


async def test_no_more_warm_boxes_make_room_than_must():
    backend = Timed(turns=50)
    async with Pool([backend], max_live=3, forks=1, warm=2) as pool:
        await turns()
        starts = [asyncio.create_task(pool.start(limits=OTHER)) for _ in range(2)]
        await asyncio.sleep(0)
        starts[1].cancel()
        await starts[0]
        assert (pool.stats.warm, pool.stats.closed) == (1, 1)
    check_nothing_left(pool, backend)


async def test_files_that_do_not_fit_a_warm_box_are_an_error_of_the_caller():
    backend = Timed()
    async with Pool([backend], max_live=3, warm=1) as pool:
        await turns()
        with pytest.raises(ValueError, match=r"do not unpack within Limits.*No space left"):
            await pool.start({"a": bytes(100)})
    check_nothing_left(pool, backend)


async def test_starts_go_to_the_backend_with_the_fewest_boxes():
    backends = [Timed(1), Timed(2), Timed(3)]
    async with Pool(backends, max_live=4) as pool:
        boxes = await asyncio.gather(*(pool.start() for _ in range(6)))
        assert [backend.live for backend in backends] == [2, 2, 2]
        for box in boxes:
            if box.box.backend is backends[1]:
                await box.close()
        await asyncio.gather(*(pool.start() for _ in range(2)))
        assert [backend.live for backend in backends] == [2, 2, 2]
    check_nothing_left(pool, *backends)


async def test_a_failing_backend_is_set_aside_and_loses_no_start():
    broken, sound = Timed(1, fail=1.0), Timed(2)
    async with Pool([broken, sound], max_live=20, starts=1, set_aside=60) as pool:
        boxes = await asyncio.gather(*(pool.start() for _ in range(10)))
        assert {box.box.backend for box in boxes} == {sound}
        assert pool.stats.set_aside == ("backend 0 (Timed)",)
        assert (broken.asked, pool.stats.failed) == (3, 3)
    check_nothing_left(pool, broken, sound)


@pytest.mark.parametrize("warm", [0, 1])
async def test_a_backend_set_aside_is_tried_again(warm: int):
    broken, sound = Timed(1, fail=1.0), Timed(2)
    async with Pool([broken, sound], max_live=4, warm=warm, set_aside=0.01) as pool:
        while not pool.stats.set_aside:
            await (await pool.start(limits=OTHER)).close()
        broken.fail = 0.0
        for _ in range(6):
            await pool.start(limits=OTHER)
        assert (broken.live, sound.live) == (3, 3), "the last ones waited for it"
    check_nothing_left(pool, broken, sound)


async def test_failures_count_only_in_a_row():
    backend = Timed()
    async with Pool([backend]) as pool:
        for fail in (1.0, 1.0, 0.0, 1.0, 1.0, 0.0):
            backend.fail = fail
            await asyncio.gather(pool.start(), return_exceptions=True)
        assert (pool.stats.failed, pool.stats.started, pool.stats.set_aside) == (4, 2, ())
    check_nothing_left(pool, backend)


async def test_starts_that_only_a_failing_backend_could_serve_fail_with_its_trial():
    backend = Timed(fail=1.0)
    async with Pool([backend], set_aside=0.02) as pool:
        message = r"no backend of the pool starts a box \(backend 0 \(Timed\): out of order\)"
        for _ in range(3):
            with pytest.raises(SandboxError, match=message):
                await pool.start()
        waiting = [asyncio.create_task(pool.start()) for _ in range(20)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"no backend of the pool starts a box (backend 0 (Timed): out of order)"}
        assert backend.asked == 4, "one start decided for all that waited"
        backend.fail = 0.0
        await pool.start()
        assert pool.stats.set_aside == ()
    check_nothing_left(pool, backend)


async def test_closing_ends_boxes_waits_and_starts_under_way():
    backend = Timed(turns=20)
    async with Pool([backend], max_live=3, starts=2, warm=1) as pool:
        box = await pool.start()
        starts = [asyncio.create_task(pool.start(limits=OTHER)) for _ in range(4)]
        fork = asyncio.create_task(box.fork())
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*starts, fork, return_exceptions=True)
    assert all(isinstance(outcome, SandboxError) for outcome in outcomes), outcomes
    check_nothing_left(pool, backend)
    with pytest.raises(SandboxError, match="not open"):
        await pool.start()


async def test_closing_waits_for_a_start_under_way_and_ends_its_box():
    backend = Timed()
    async with Pool([backend], max_live=3) as pool:
        backend.held = asyncio.Event()
        start = asyncio.create_task(pool.start())
        await turns()
        asyncio.get_running_loop().call_later(0.02, backend.held.set)
    with pytest.raises(SandboxError, match="not open"):
        await start
    check_nothing_left(pool, backend)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backends": []}, r"Pool.backends is empty"),
        ({"max_live": 1}, r"Pool.forks must be at least 1 and less than max_live, got forks 1 and max_live 1"),
        ({"starts": 0}, r"Pool.starts must be at least 1, got 0"),
        ({"max_live": 8, "warm": 8}, r"Pool.warm must be from 0 to max_live - forks = 7, got 8"),
    ],
)
def test_bad_settings_say_what_is_wrong(options: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        Pool(**{"backends": [Timed()], **options})


async def play(pool: Backend, number: int) -> bytes | None:
    box = await pool.start({"n": b"%d" % number})
    try:
        assert (await box.exec(["sh", "-c", "cat n n > twice"], seconds=60)).exit_code == 0
        fork = await box.fork()
        try:
            assert (await fork.exec_fresh(["grep", "-q", "x", "twice"], seconds=60)).exit_code == 1
            return await fork.get("twice")
        finally:
            await fork.close()
    finally:
        await box.close()


@pytest.mark.slow
@pytest.mark.real("bwrap")
@pytest.mark.parametrize("options", [{"max_live": 64, "warm": 4}, {"max_live": 9, "forks": 1, "warm": 1}], ids=["roomy", "narrow"])
async def test_real_boxes_for_64_episodes_at_once(options: dict[str, int]):
    before = descendants(os.getpid())
    async with Pool([Bubblewrap(), Bubblewrap()], **options) as pool:
        assert isinstance(pool, Backend)
        assert await asyncio.gather(*(play(pool, n) for n in range(64))) == [b"%d%d" % (n, n) for n in range(64)]
        assert (pool.stats.started >= 64, pool.stats.forked, pool.stats.failed) == (True, 64, 0)
        assert pool.stats.warm_hits > 0
        processes = descendants(os.getpid()) - before
    assert pool.stats.live == pool.stats.leaked == 0
    assert pool.stats.started + pool.stats.forked == pool.stats.closed
    assert until_gone(processes) == set()


@pytest.mark.slow
@pytest.mark.real("docker")
async def test_real_containers_for_12_episodes_at_once():
    async with Pool([Docker()], max_live=6, warm=1) as pool:
        assert await asyncio.gather(*(play(pool, n) for n in range(12))) == [b"%d%d" % (n, n) for n in range(12)]
        assert (pool.stats.forked, pool.stats.failed) == (12, 0)
    assert pool.stats.live == pool.stats.leaked == 0
    assert pool.stats.started + pool.stats.forked == pool.stats.closed


@pytest.mark.slow
@pytest.mark.real("bwrap")
async def test_real_boxes_survive_cancelled_episodes():
    chance = random.Random(0)
    async with Pool([Bubblewrap()], max_live=6, warm=2) as pool:
        tasks = [asyncio.create_task(play(pool, n)) for n in range(32)]
        for task in tasks[::2]:
            await asyncio.sleep(chance.uniform(0, 0.05))
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes[1::2] == [b"%d%d" % (n, n) for n in range(1, 32, 2)]
        assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) > 4
    assert pool.stats.live == pool.stats.leaked == 0
    assert pool.stats.started + pool.stats.forked == pool.stats.closed


@pytest.mark.real("bwrap")
async def test_a_box_of_the_pool_is_whole_and_its_snapshot_starts_another():
    async with Pool([Bubblewrap()], warm=1) as pool:
        box = await pool.start({"a": b"1"})
        await box.put({"b": b"2"})
        copy = await pool.start({"c": b"3"}, snapshot=await box.snapshot())
        assert [await copy.get(name) for name in "abc"] == [b"1", b"2", b"3"]
        await box.pause()
        with pytest.raises(RuntimeError, match="resume"):
            await box.exec(["true"])
        await box.resume()
        assert (await box.exec(["cat"], stdin=b"in", env={"A": "1"}, seconds=3)).output == b"in"
        assert isinstance(box, Sandbox)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.fork()
