"""What is Docker's own: containers are hardened, labelled and never left behind, and an engine's faults are named with their remedy."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrl_jax.sandbox import docker, docker_engine, docker_image, docker_link
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.docker_box import result_of
from agentrl_jax.sandbox.protocol import Limits, SandboxError

real = pytest.mark.real("docker")


@pytest.fixture
async def backend() -> AsyncIterator[Docker]:
    async with Docker() as opened:
        yield opened


@pytest.fixture
def client() -> Any:
    opened = docker_engine.connect()
    yield opened
    opened.close()


HERE = {"label": f"{docker_engine.PLACE}={docker_engine.place()}"}


def owned(client: Any, process: int) -> dict[str, str]:
    """Containers that a process of this machine has made, and their states."""
    found = client.containers(all=True, filters=HERE)
    return {one["Id"]: one["State"] for one in found if one["Labels"][docker_engine.OWNER].split()[0] == str(process)}


def volumes(client: Any, process: int) -> set[str]:
    found = client.volumes(filters=HERE)["Volumes"] or []
    return {one["Name"] for one in found if one["Labels"][docker_engine.OWNER].split()[0] == str(process)}


async def until(condition: Any) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return condition()


@real
async def test_the_container_is_hardened(backend: Docker, client: Any):
    box = await backend.start()
    (name,) = owned(client, os.getpid())
    host = client.inspect_container(name)["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["Privileged"], host["Binds"]) == ("none", True, False, None)
    assert (host["CapDrop"], host["SecurityOpt"], host["PidsLimit"]) == (["ALL"], ["no-new-privileges"], 34)
    assert host["Memory"] == host["MemorySwap"] == (256 + 3 * 16 + 64) << 20
    mounts = (await box.exec(["cat", "/proc/mounts"])).text
    for folder in ("/workspace", "/tmp"):
        line = next(line for line in mounts.splitlines() if f" {folder} tmpfs " in line)
        assert {"rw", "nosuid", "nodev", "size=16384k", "nr_inodes=4001"} <= set(line.split()[3].split(",")), line


FILL = b"""
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except BlockingIOError:
        time.sleep(0.001)
"""
HOG = """
import os, sys
memory = bytearray(150 << 20)
children = [os.fork() for _ in range(3)]
memory[::4096] = bytes([1]) * len(memory[::4096])
if all(children):
    sys.exit(128 + max(os.WTERMSIG(os.wait()[1]) for _ in children))
"""


@real
async def test_processes_at_their_limit_leave_the_box_usable(backend: Docker):
    box = await backend.start({"a": b"1", "fill.py": FILL}, limits=Limits(processes=4))
    await box.exec(["sh", "-c", "setsid python3 fill.py > /dev/null 2>&1 &"])
    async with asyncio.timeout(10):
        while (refused := await box.exec(["true"])).exit_code == 0:
            pass
    assert (refused.exit_code, refused.output) == (126, b"true: Resource temporarily unavailable\n")
    assert (await box.put({"b": b"2"})).exit_code == 0
    assert await box.get("b") == b"2"
    fork = await box.fork()
    assert (await fork.exec(["cat", "a", "b"])).output == b"12"
    assert (await box.exec_fresh(["cat", "a", "b"])).output == b"12"


ATTACK = b"""
import ctypes, os, time
libc = ctypes.CDLL(None)
root = [int(name) for name in os.listdir("/proc") if name.isdigit() and os.stat(f"/proc/{name}").st_uid == 0]
ways = [
    lambda process: os.kill(process, 9),
    lambda process: os.listdir(f"/proc/{process}/fd"),
    lambda process: open(f"/proc/{process}/mem", "r+b"),
    lambda process: os.setpriority(os.PRIO_PROCESS, process, 19),
    lambda process: os.sched_setaffinity(process, {0}),
    lambda process: libc.ptrace(16, process, 0, 0) == 0 or 1 / 0,
    lambda process: open(f"/proc/{process}/oom_score_adj", "w"),
]
open("began", "w").write(str(len(root)))
while True:
    for number, way in enumerate(ways):
        for process in root:
            try:
                way(process)
            except (OSError, ZeroDivisionError):
                continue
            open(f"reached_{number}", "w").close()
"""


@real
async def test_the_root_process_cannot_be_reached_even_while_it_handles_files(backend: Docker):
    box = await backend.start({"attack.py": ATTACK})
    began = await box.exec(["sh", "-c", "python3 attack.py > /dev/null 2>&1 & until [ -s began ]; do sleep 0.01; done"], seconds=60)
    assert began.exit_code == 0, began
    assert await box.get("began") == b"2", "init and the root process"
    for _ in range(30):
        assert (await box.put({f"folder/{number}": bytes(1000) for number in range(50)})).exit_code == 0
        await box.snapshot()
        assert await box.get("folder/0") == bytes(1000)
    assert b"reached" not in (await box.exec(["ls"])).output


@real
async def test_memory_of_the_box_is_limited_and_spares_its_root_process(backend: Docker):
    box = await backend.start({"a": b"1"})
    result = await box.exec(["python3", "-c", HOG], seconds=30)
    assert (result.exit_code, result.killed, result.timed_out) == (None, "memory", False)
    assert (await box.exec(["cat", "a"])).output == b"1"


@real
async def test_full_files_leave_memory_for_commands(backend: Docker):
    box = await backend.start(limits=Limits(disk=64 << 20, memory=64 << 20))
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        full = await box.exec(["dd", "if=/dev/zero", f"of={folder}/fill", "bs=1M"], seconds=60)
        assert (full.exit_code, full.killed) == (1, None), full
    assert (await box.exec(["echo", "alive"])).output == b"alive\n"


def test_a_memory_kill_that_the_command_survived_is_not_its_end():
    told = {"cause": "exit", "oom": True, "dropped": 0, "seconds": 1.0}
    assert [(result.exit_code, result.killed) for result in (result_of({**told, "code": code}, b"") for code in (0, 1, 137, -9))] == [
        *((0, None), (1, None)),
        *((None, "memory"), (None, "memory")),
    ]


@real
async def test_the_backend_leaves_no_container_and_no_volume(client: Any):
    async with Docker() as backend:
        boxes = [await backend.start({"a": b"1"}) for _ in range(2)]
        await boxes[0].pause()
        await boxes[1].exec(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
        await boxes[1].exec_fresh(["true"])
        assert list(owned(client, os.getpid()).values()) == ["running"] * 2
        assert len(volumes(client, os.getpid())) == 4
        starting = [asyncio.create_task(backend.start()) for _ in range(6)]
        await asyncio.sleep(0.4)
        for task in starting:
            task.cancel()
        ended = await asyncio.gather(*starting, return_exceptions=True)
        assert any(isinstance(result, asyncio.CancelledError) for result in ended)
    assert await until(lambda: not owned(client, os.getpid()))
    assert await until(lambda: not volumes(client, os.getpid()))


@real
async def test_forks_take_the_container_kept_ready_once(backend: Docker, client: Any):
    box = await backend.start({"a": b"1"})
    await box.fork()
    assert await until(lambda: list(owned(client, os.getpid()).values()) == ["running"] * 3)
    made = set(owned(client, os.getpid()))
    forks = await asyncio.gather(*(box.fork() for _ in range(3)))
    await asyncio.gather(*(fork.put({"a": str(number).encode()}) for number, fork in enumerate(forks)))
    assert [await fork.get("a") for fork in forks] == [b"0", b"1", b"2"]
    assert await until(lambda: list(owned(client, os.getpid()).values()) == ["running"] * 6)
    assert made < set(owned(client, os.getpid()))


@real
async def test_a_container_kept_ready_that_does_not_do_is_not_used(backend: Docker, client: Any):
    box = await backend.start({"a": b"1"})
    before = set(owned(client, os.getpid()))
    fork = await box.fork()
    assert await until(lambda: list(owned(client, os.getpid()).values()) == ["running"] * 3)
    for name in set(owned(client, os.getpid())) - before:  # of them one is the fork
        client.remove_container(name, v=True, force=True)
    assert await (await box.fork()).get("a") == b"1"
    await fork.close()
    small = await backend.start(limits=Limits(disk=1 << 20))
    assert (await (await small.fork()).put({"big": bytes(2 << 20)})).exit_code != 0
    assert (await (await box.fork()).put({"big": bytes(2 << 20)})).exit_code == 0


@real
async def test_cancelled_forks_leave_nothing(client: Any):
    async with Docker() as backend:
        box = await backend.start({"a": b"1"})
        for pause in (0.0, 0.001, 0.01, 0.1, 0.2, 0.3):
            forks = [asyncio.create_task(box.fork()) for _ in range(2)]
            await asyncio.sleep(pause)
            for fork in forks:
                fork.cancel()
            for made in await asyncio.gather(*forks, return_exceptions=True):
                if not isinstance(made, BaseException):
                    await made.close()
        assert await (await box.fork()).get("a") == b"1"
        assert await until(lambda: len(owned(client, os.getpid())) == 3), "the box, its fork and a spare"
    assert not owned(client, os.getpid())
    assert await until(lambda: not volumes(client, os.getpid()))


@real
async def test_a_fresh_command_in_an_unused_box_leaves_no_process(backend: Docker, client: Any):
    box = await backend.start({"a": b"1"})
    result = await box.exec_fresh(["sh", "-c", "cat a; setsid sleep 1000 > /dev/null 2>&1 & exit 3"])
    assert (result.exit_code, result.output) == (3, b"1")
    assert b"sleep" not in (await box.exec(["ps", "-e"])).output
    await box.exec(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
    assert b"sleep" not in (await box.exec_fresh(["ps", "-e"])).output, "it was used meanwhile"


@real
async def test_the_backend_leaves_no_descriptor():
    async def use() -> None:
        async with Docker() as backend:
            box = await backend.start({"a": b"1"})
            for run in (box.exec, box.exec_fresh):
                await run(["true"])
            await (await box.fork()).close()
            task = asyncio.create_task(box.fork())
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await use()  # the event loop keeps a descriptor or two of its own from the first use on
    before = len(os.listdir("/proc/self/fd"))
    await use()
    assert await until(lambda: len(os.listdir("/proc/self/fd")) == before)


CLIENT = """
import asyncio
from agentrl_jax.sandbox.docker import Docker

async def main():
    async with Docker() as backend:
        boxes = [await backend.start() for _ in range(2)]
        await boxes[0].exec(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
        await boxes[0].pause()
        await boxes[1].fork()
        await boxes[1].exec(["true"])
        fresh = asyncio.create_task(boxes[1].exec_fresh(["sleep", "1000"], seconds=1000))
        print("ready", flush=True)
        await fresh

asyncio.run(main())
"""


@real
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_a_client_that_dies_leaves_no_container(client: Any, number: signal.Signals):
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        assert await until(lambda: list(owned(client, process.pid).values()) == ["running"] * 5), (
            "two boxes, a fork, a spare, and a fresh one"
        )
        process.send_signal(number)
        process.wait(20)
    assert await until(lambda: not owned(client, process.pid))
    async with Docker():  # two containers that end at once may leave the files that they shared
        assert not volumes(client, process.pid)


@real
async def test_containers_of_dead_owners_are_removed_at_the_start_and_no_others(client: Any):
    from docker.errors import APIError

    def make(labels: dict[str, str]) -> str:
        config = {
            "Image": docker_image.find_image(client),
            "Cmd": ["sleep", "1000"],
            "Labels": labels,
            "HostConfig": {"NetworkMode": "none"},
        }
        name = f"test-{secrets.token_hex(4)}"
        client.create_container_from_config(config, name)
        return name

    with subprocess.Popen(["true"]) as dead:
        owner = docker_engine.owner(dead.pid)
    assert owner is not None
    here, me = docker_engine.place(), docker_engine.owner(os.getpid())
    assert me is not None
    mine = {docker_engine.PLACE: here, docker_engine.OWNER: me}
    reused = {docker_engine.PLACE: here, docker_engine.OWNER: f"{os.getpid()} 1"}  # the number of a living process, which started later
    names = [
        make(labels)
        for labels in (
            {docker_engine.PLACE: here, docker_engine.OWNER: owner},
            reused,
            mine,
            {**mine, docker_engine.PLACE: "elsewhere"},
            {},
        )
    ]
    try:
        with contextlib.suppress(APIError):  # it is removed already, by what else uses Docker on this machine
            client.start(names[0])
            client.pause(names[0])
        async with Docker():
            left = {container["Names"][0].removeprefix("/") for container in client.containers(all=True)}
        assert [name in left for name in names] == [False, False, True, True, True]
    finally:
        for container in client.containers(all=True):
            if container["Names"][0].removeprefix("/") in names:
                client.remove_container(container["Id"], force=True)


@real
async def test_a_container_that_is_removed_is_an_infrastructure_fault(backend: Docker, client: Any):
    box = await backend.start({"a": b"1"})
    running = asyncio.create_task(box.exec(["sleep", "60"], seconds=60))
    await asyncio.sleep(0.3)
    for name in owned(client, os.getpid()):
        client.remove_container(name, v=True, force=True)
    for use in (running, box.exec(["true"]), box.get("a"), box.fork()):
        with pytest.raises(SandboxError, match="the container is gone"):
            await use
    await box.close()
    assert await (await backend.start({"a": b"2"})).get("a") == b"2"


@real
async def test_what_an_engine_kept_of_a_backend_goes_with_it_and_nothing_of_another(client: Any):
    async with Docker() as other:
        kept = await other.start({"a": b"1"})
        async with Docker() as backend:
            before = set(owned(client, os.getpid()))
            await backend.start()
            (name,) = set(owned(client, os.getpid())) - before
            labels = client.inspect_container(name)["Config"]["Labels"]
            config = {"Image": docker_image.find_image(client), "Cmd": ["sleep", "1000"], "Labels": labels}
            client.create_container_from_config(config, f"test-{secrets.token_hex(4)}")  # as after a restart: known to the engine alone
            client.create_volume(labels=labels)
        assert set(owned(client, os.getpid())) == before
        assert len(volumes(client, os.getpid())) == 2
        assert (await kept.exec(["cat", "a"])).output == b"1"


class Relay:
    """The engine as seen over TCP, until the line is cut."""

    async def __aenter__(self) -> "Relay":
        self._writers: list[asyncio.StreamWriter] = []
        self._engine = docker_link.address()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.host = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._engine, str):
            engine_reader, engine_writer = await asyncio.open_unix_connection(self._engine)
        else:
            engine_reader, engine_writer = await asyncio.open_connection(*self._engine)
        self._writers += [writer, engine_writer]
        await asyncio.gather(self._copy(reader, engine_writer), self._copy(engine_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()


@real
async def test_a_lost_engine_is_an_infrastructure_fault_and_leaves_no_container(client: Any, monkeypatch: pytest.MonkeyPatch):
    async with Relay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        async with Docker() as backend:
            box = await backend.start({"a": b"1"})
            assert (await box.exec(["cat", "a"])).output == b"1"
            running = asyncio.create_task(box.exec(["sleep", "60"], seconds=60))
            await asyncio.sleep(0.2)
            relay.cut()
            for use in (running, box.exec(["true"]), box.fork(), backend.start()):
                with pytest.raises(SandboxError):
                    await use
    assert await until(lambda: not owned(client, os.getpid()))


@real
@pytest.mark.real("bwrap")
async def test_snapshots_are_read_by_the_other_backend(backend: Docker):
    script = """
        mkdir d; echo 1 > d/é; ln d/é hard; ln -s hard soft; mkfifo /tmp/fifo; touch $(printf '\\377')
        truncate -s 1G sparse; echo end >> sparse; chmod 500 d
    """
    listing = ["find", "/workspace", "/tmp", "-mindepth", "1", "-printf", r"%p %y %m %s %n %l\n"]
    async with Bubblewrap() as other:
        for source, target in ((backend, other), (other, backend)):
            box = await source.start()
            assert (await box.exec(["sh", "-c", script])).exit_code == 0
            copy = await target.start(snapshot=await box.snapshot())
            expected, got = [sorted((await one.exec(listing)).output.splitlines()) for one in (box, copy)]
            assert got == expected
            assert (await copy.exec(["tail", "-c", "4", "sparse"])).output == b"end\n"


@real
async def test_an_image_that_is_not_there_or_has_no_python_is_named(client: Any):
    with pytest.raises(SandboxError, match="no image agentrl-none:1"):
        async with Docker("agentrl-none:1") as backend:
            await backend.start()
    client.import_image_from_data(bytes(10240), repository="agentrl-test-empty", tag="1")
    try:
        with pytest.raises(SandboxError, match="python3"):
            async with Docker("agentrl-test-empty:1") as backend:
                await backend.start()
        assert await until(lambda: not owned(client, os.getpid()))
    finally:
        client.remove_image("agentrl-test-empty:1")


@real
@pytest.mark.real("bwrap")
async def test_an_image_is_made_of_this_hosts_files(client: Any):
    name = f"{docker_image.REPOSITORY}:test"
    docker_image.import_root(client, "test", (), "no registry is asked")
    try:
        async with Docker(name) as backend:
            box = await backend.start()
            assert (await box.exec(["python3", "-c", "import ssl, sqlite3, ctypes, asyncio; print('ok')"], seconds=30)).output == b"ok\n"
            assert (await box.exec(["find", "/", "-xdev", "!", "-user", "root"], seconds=30)).output == b"/workspace\n"
    finally:
        client.remove_image(name, force=True)


@real
def test_preflight_says_what_it_costs():
    done = subprocess.run([sys.executable, "-m", docker.__name__], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert done.stdout.startswith("ok: Docker; median ")


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("unix:///nowhere/docker.sock", "start it, join the group docker, or set DOCKER_HOST"),
        ("tcp://127.0.0.1:1", "start it"),
        ("ssh://host", "ssh -NL"),
        ("npipe:////./pipe/docker_engine", "DOCKER_HOST=unix:///tmp/docker.sock"),
        ("tcp://host", "neither unix:///PATH nor tcp://HOST:PORT"),
    ],
)
async def test_no_engine_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, host: str, remedy: str):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(SandboxError, match=remedy):
        async with Docker():
            pass
