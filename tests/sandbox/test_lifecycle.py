"""Pausing, forking, snapshots, and that nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_jax.sandbox.box import pack
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.protocol import Backend, Limits, Sandbox, SandboxError
from tests.processes import descendants, until_gone

COUNTER = b"i=0; while :; do i=$((i+1)); echo $i > next; mv next count; sleep 0.01; done"  # whole at any moment
AWKWARD = """
    ln -s /nowhere dangling; ln file hard; mkfifo fifo; truncate -s 1T sparse
    mkdir -p d/e; echo é > 'd/a b
'; chmod 700 d; chmod 000 file; touch /tmp/t
"""


async def count(box: Sandbox) -> int:
    return int(await box.get("count") or b"")


async def goes_on(box: Sandbox, before: int) -> bool:
    """Whether it still counts; on a busy machine the next number may take a while."""
    async with asyncio.timeout(20):
        while await count(box) <= before:
            await asyncio.sleep(0.05)
    return True


async def counting(backend: Backend) -> Sandbox:
    box = await backend.start({"counter.sh": COUNTER})
    await box.exec(["sh", "-c", "setsid sh counter.sh > /dev/null 2>&1 & until [ -e count ]; do sleep 0.01; done"])
    return box


async def test_pause_stops_what_runs_and_resume_continues_it(backend: Backend):
    box = await counting(backend)
    await box.pause()
    before = await count(box)
    await asyncio.sleep(0.2)
    assert await count(box) == before
    with pytest.raises(RuntimeError, match="resume"):
        await box.exec(["true"])
    await box.put({"b": b"files can be used"})
    await box.resume()
    assert await goes_on(box, before)


async def test_forks_are_independent_copies_of_the_files(backend: Backend):
    box = await counting(backend)
    await box.put({"a": b"1"})
    fork = await box.fork()
    await fork.put({"a": b"fork"})
    await box.put({"b": b"box"})
    assert [await box.get("a"), await fork.get("b")] == [b"1", None]
    forked = await count(fork)
    await asyncio.sleep(0.2)
    assert await count(fork) == forked, "processes are not forked"
    assert await goes_on(box, forked), "and those of the box go on"
    await box.close()
    assert (await fork.exec(["cat", "a"])).output == b"fork"


async def test_fork_of_a_paused_box_runs_and_leaves_it_paused(backend: Backend):
    box = await counting(backend)
    await box.pause()
    fork = await box.fork()
    assert (await fork.exec(["echo", "runs"])).output == b"runs\n"
    before = await count(box)
    await asyncio.sleep(0.2)
    assert await count(box) == before


async def test_copies_preserve_awkward_files(backend: Backend):
    box = await backend.start({"file": b"text"}, limits=Limits(disk=1 << 20))
    assert (await box.exec(["sh", "-c", AWKWARD])).exit_code == 0
    listing = ["find", "/workspace", "/tmp", "-mindepth", "1", "-printf", r"%p %y %m %s %n %l\n"]
    expected = (await box.exec(listing)).output.splitlines()
    assert len(expected) == 9
    restored = await backend.start(snapshot=await box.snapshot(), limits=Limits(disk=1 << 20))
    for copy in (await box.fork(), restored):
        assert sorted((await copy.exec(listing)).output.splitlines()) == sorted(expected)


async def test_snapshots_of_the_same_files_are_the_same(box: Sandbox):
    await box.put({"b": b"1", "a": b"2"})
    assert await box.snapshot() == await box.snapshot()


async def test_names_that_no_path_can_reach_break_nothing(backend: Backend):
    box = await backend.start({"kept": b"1"}, limits=Limits(inodes=2000))
    dig = "import os\nfor _ in range(1500):\n    os.mkdir('d' * 200); os.chdir('d' * 200)"
    assert (await box.exec(["python3", "-c", dig], seconds=30)).exit_code == 0
    for copy in (await box.fork(), await backend.start(snapshot=await box.snapshot())):
        assert await copy.get("kept") == b"1"


async def test_what_does_not_fit_at_the_start_is_an_error_of_the_caller(backend: Backend):
    with pytest.raises(ValueError, match="do not unpack within"):
        await backend.start({"big": bytes(2 << 20)}, limits=Limits(disk=1 << 20))
    with pytest.raises(ValueError, match="unpack"):
        await backend.start(snapshot=b"no tar at all" * 100)
    for path in ("/etc/x", "../x", "a/../../x", "", ".", "a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"below /workspace|NUL|surrogates"):
            await backend.start({path: b""})


async def test_a_closed_box_says_so_and_closes_twice(box: Sandbox):
    await box.exec(["true"])
    await box.close()
    await box.close()
    for use in (box.exec(["true"]), box.get("a"), box.put({"a": b""}), box.fork(), box.snapshot()):
        with pytest.raises(SandboxError, match="closed"):
            await use


async def test_closing_ends_a_running_command(box: Sandbox):
    running = asyncio.create_task(box.exec(["sleep", "60"], seconds=60))
    await asyncio.sleep(0.3)
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await running


async def test_cancelling_a_command_ends_it_and_spares_the_box(box: Sandbox):
    await box.put({"counter.sh": COUNTER, "count": b"0"})
    for run in (box.exec, box.exec_fresh):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run(["sh", "counter.sh"], seconds=60), 0.5)
        before = await count(box)
        await asyncio.sleep(0.2)
        assert await count(box) == before
        assert (await box.exec(["echo", "alive"])).output == b"alive\n"


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01, 0.03, 0.1])
async def test_cancelling_at_any_moment_leaves_a_usable_box(backend: Backend, delay: float):
    box = await backend.start({"a": b"1"})
    for use in (box.exec(["cat", "a"]), box.exec_fresh(["cat", "a"]), box.get("a"), box.put({"b": b"2"}), box.snapshot(), box.fork()):
        task = asyncio.create_task(use)
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await box.exec(["cat", "a"])).output == b"1"


def command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def mounted() -> list[str]:
    """What is mounted, but for the containers of an engine that runs beside."""
    return [line for line in Path("/proc/mounts").read_text().splitlines() if "docker" not in line]


@pytest.mark.real("bwrap")
async def test_the_backend_leaves_no_process_and_no_descriptor():
    async def use(box: Sandbox) -> None:
        await box.exec(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo"])
        await box.exec(["sleep", "60"], seconds=0.1)
        await box.exec_fresh(["true"])
        await (await box.fork()).get("a")
        await box.exec(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo"])

    async with Bubblewrap() as warm:  # the event loop keeps a descriptor or two of its own from the first process on
        await warm.start({"a": b"1"})
    before, descriptors, mounts = descendants(os.getpid()), os.listdir("/proc/self/fd"), mounted()
    async with Bubblewrap() as backend:
        boxes = [await backend.start({"a": b"1"}) for _ in range(4)]
        await asyncio.gather(*map(use, boxes))
        started = descendants(os.getpid()) - before
        await boxes[0].close()
        open_boxes = len(descendants(os.getpid()) - before)
        assert 0 < open_boxes < len(started)
        started |= descendants(os.getpid()) - before
    assert until_gone(started) == set()
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert mounted() == mounts


CLIENT = """
import asyncio
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

async def main():
    async with Bubblewrap() as backend:
        boxes = [await backend.start() for _ in range(3)]
        for box in boxes:
            await box.exec(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo"])
        await boxes[0].pause()
        print("ready", flush=True)
        await boxes[1].exec(["sleep", "1000"], seconds=1000)

asyncio.run(main())
"""


@pytest.mark.real("bwrap")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_client_that_dies_leaves_no_process(number: signal.Signals):
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        started = descendants(client.pid)
        assert len(started) >= 8
        client.send_signal(number)
        client.wait(60)
    assert until_gone(started) == set()


@pytest.mark.real("bwrap")
async def test_a_dead_keeper_is_an_infrastructure_fault_and_the_next_box_gets_a_new_one():
    async with Bubblewrap() as backend:
        before = descendants(os.getpid())
        box = await backend.start({"a": b"1"})
        running = asyncio.create_task(box.exec(["sleep", "60"], seconds=60))
        await asyncio.sleep(0.3)
        for process in before:
            os.kill(process, signal.SIGKILL)
        for use in (running, box.exec(["true"]), box.get("a"), box.fork()):
            with pytest.raises(SandboxError):
                await use
        await box.close()
        assert await (await backend.start({"a": b"2"})).get("a") == b"2"


@pytest.mark.real("bwrap")
async def test_a_guest_that_dies_is_reported_and_replaced():
    """Only the host's memory killer could do this: seen from inside, process 1 of a box cannot be killed."""
    async with Bubblewrap() as backend:
        box = await backend.start({"a": b"1"})
        before = descendants(os.getpid())
        running = asyncio.create_task(box.exec(["sh", "-c", "echo said; sleep 60"], seconds=60))
        async with asyncio.timeout(20):
            while b"sleep\x0060\0" not in map(command_line, descendants(os.getpid()) - before):
                await asyncio.sleep(0.02)
        for process in descendants(os.getpid()) - before:
            if command_line(process).startswith(b"/usr/bin/python3\0-s\0"):
                os.kill(process, signal.SIGKILL)
        result = await running
        assert (result.exit_code, result.killed, result.output) == (None, "box", b"said\n")
        assert (await box.exec(["cat", "a"])).output == b"1"


def test_pack_is_the_same_for_the_same_files():
    assert pack({"a": b"1"}) == pack({"a": b"1"})
