"""A Docker engine of one's own, which may be stopped: it shares nothing with the system's but the kernel."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from agentrl_jax.sandbox import docker_engine, docker_image
from agentrl_jax.sandbox.protocol import SandboxError
from experiments.chaos.audit import require

START, GONE = 30.0, 15.0  # seconds
CONFIG = 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
QUIET = ("--iptables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none")  # no network of the host's is touched


def missing() -> str | None:
    """Why there can be no such engine here, or None."""
    if os.geteuid() != 0:
        return "not root"
    absent = [name for name in ("dockerd", "containerd") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} in PATH" if absent else None


class Dockerd:
    """While it is open, DOCKER_HOST names it. `image` is one of this host's files, for boxes. At the end nothing of it is left."""

    image = f"{docker_image.REPOSITORY}:chaos"

    async def __aenter__(self) -> "Dockerd":
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-dockerd-"))
        self._host_before = os.environ.get("DOCKER_HOST")
        self._engine: asyncio.subprocess.Process | None = None
        self._containerd: asyncio.subprocess.Process | None = None
        os.environ["DOCKER_HOST"] = f"unix://{self._folder}/socket"
        try:
            # Apart, as system managers have it: it and the containers outlive the engine's main process.
            (self._folder / "config").write_text(CONFIG)
            self._containerd = await self._spawn(
                *("containerd", "--config", f"{self._folder}/config", "--address", f"{self._folder}/containerd"),
                *("--root", f"{self._folder}/content", "--state", f"{self._folder}/state"),
            )
            await self.start()
            await asyncio.to_thread(self._import)
        except BaseException:
            await self._clear()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self.stop(signal.SIGTERM)
            if kind is None:
                await self._emptied()
        finally:
            await self._clear()

    async def _emptied(self) -> None:
        """Wait until nothing is left but containerd, which has the last processes of boxes to end."""
        own = f"{self._folder}/data"  # the engine mounts it on itself
        deadline = time.monotonic() + GONE
        containerd = self._containerd and self._containerd.pid
        while left := {process: name for process, name in self._processes().items() if process != containerd} or {*self._mounts()} - {own}:
            require(time.monotonic() < deadline, f"an engine that ends leaves no process and no mount, found {left}")
            await asyncio.sleep(0.05)

    async def start(self) -> None:
        """Start it and wait until it answers."""
        folder = self._folder
        self._engine = await self._spawn(
            *("dockerd", "--containerd", f"{folder}/containerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
            *("--pidfile", f"{folder}/pid", "--host", f"unix://{folder}/socket", *QUIET),
        )
        try:
            async with asyncio.timeout(START):
                while True:
                    with suppress(SandboxError):
                        return (await asyncio.to_thread(docker_engine.connect)).close()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise SandboxError(f"dockerd does not start: {(folder / 'log').read_text()[-2000:]}") from None

    async def stop(self, number: signal.Signals) -> None:
        """End its main process by a signal; SIGKILL leaves the containers to the next start."""
        await _end(self._engine, number)

    async def left(self) -> list[str]:
        """Containers and volumes that it has."""
        return await asyncio.to_thread(self._list)

    def _import(self) -> None:
        client: Any = docker_engine.connect()
        docker_image.import_root(client, "chaos", (), "no registry is asked")
        client.close()

    def _list(self) -> list[str]:
        client: Any = docker_engine.connect()
        found = [f"container {one['Names']} {one['State']}" for one in client.containers(all=True)]
        found += [f"volume {one['Name']}" for one in client.volumes()["Volumes"] or ()]
        client.close()
        return found

    def _processes(self) -> dict[int, str]:
        """Those that have its folder in their command line, and their programs: the engine, its containerd, and one per container."""
        found = {}
        for process in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
                if any(str(self._folder) in word for word in words):
                    found[process] = words[0]
        return found

    def _mounts(self) -> list[str]:
        """In its folder, the deepest first."""
        points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        return sorted((point for point in points if point.startswith(f"{self._folder}/")), key=len, reverse=True)

    async def _spawn(self, *command: str) -> asyncio.subprocess.Process:
        with open(self._folder / "log", "ab") as log:  # noqa: ASYNC230 - it is ours alone
            quiet = {"stdin": asyncio.subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            return await asyncio.create_subprocess_exec(*command, **quiet)

    async def _clear(self) -> None:
        """Whatever happened."""
        for process in (self._engine, self._containerd):
            await _end(process, signal.SIGKILL)
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for point in self._mounts():
            await (await asyncio.create_subprocess_exec("umount", "--lazy", point)).wait()
        os.environ.pop("DOCKER_HOST", None)
        if self._host_before is not None:
            os.environ["DOCKER_HOST"] = self._host_before
        await asyncio.to_thread(shutil.rmtree, self._folder)


async def _end(process: asyncio.subprocess.Process | None, number: signal.Signals) -> None:
    if process and process.returncode is None:
        process.send_signal(number)
        await process.wait()
