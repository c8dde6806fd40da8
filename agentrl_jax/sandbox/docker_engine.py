"""Containers of a Docker engine: made hardened, labelled with their owner, and removed when the owner is gone.

The SDK's calls block, so they run in threads; the stream to a container does not go through it (docker_link.py).
"""

import asyncio
import os
import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl_jax.sandbox.docker_link import Link, address, program
from agentrl_jax.sandbox.protocol import Limits, SandboxError

T = TypeVar("T")
STARTS_AT_ONCE = 4  # an engine starts no more containers a second when asked for more at once
START = 60.0  # seconds for what should take less than one
OWNER, PLACE, MAKER = "agentrl_jax.owner", "agentrl_jax.place", "agentrl_jax.maker"
FIXED_PROCESSES = 2  # init and the root process, within the container's limit
SPARE = 64 << 20  # bytes of memory for the root process and the kernel, so that full files never leave too little for a command
BOOT = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"


def connect() -> Any:
    """A client of the engine that DOCKER_HOST names, at a version that both know. Raises SandboxError with the remedy. Blocks."""
    where = address()
    try:
        from docker import APIClient, errors, utils
    except ImportError as error:
        raise SandboxError("the Docker backend needs the Docker SDK: `pip install docker`") from error
    try:
        with socket.socket(socket.AF_UNIX) if isinstance(where, str) else socket.create_connection(where, START) as probe:
            if isinstance(where, str):
                probe.connect(where)  # here first, as the SDK does not close a socket that cannot connect
        return APIClient(version="auto", timeout=int(START), **utils.kwargs_from_env())
    except (errors.DockerException, OSError) as error:
        host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        raise SandboxError(f"no Docker engine answers at {host}: start it, join the group docker, or set DOCKER_HOST ({error})") from error


def place() -> str:
    """This machine since it was started, and this process namespace: within it, a process id and its start time name one process."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def owner(process: int) -> str | None:
    """A process and when it started; None if there is none."""
    try:
        return f"{process} {Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return f"{process} 0"


@dataclass(frozen=True)
class Container:
    """A running container. name: as the engine knows it; link: to its root process; image: what it was made of."""

    name: str
    link: Link
    image: str


class Engine:
    """A connected client. `cpus`: processors that one container may use."""

    def __init__(self, client: Any, cpus: float) -> None:
        self._client, self._cpus = client, cpus
        self._threads = ThreadPoolExecutor(2 * STARTS_AT_ONCE, thread_name_prefix="docker")
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._source = program()
        # A process may have several of us.
        self._labels = {PLACE: place(), OWNER: owner(os.getpid()) or "", MAKER: secrets.token_hex(8)}

    async def start(self, limits: Limits, image: str, files_of: str | None = None) -> Container:
        """A new container, or one that sees the files of another. Raises SandboxError."""
        name, link = f"agentrl-{secrets.token_hex(8)}", None
        async with self._starts:
            try:
                await self._call(self._client.create_container_from_config, self._config(limits, image, files_of), name)
                async with asyncio.timeout(START):
                    link = await Link.attach(name, self._client.api_version)
                await self._call(self._client.start, name)
                async with asyncio.timeout(START):
                    await link.boot(self._source)
            except BaseException as error:
                if link:
                    link.close("it did not start")
                await self._remove(name)
                if isinstance(error, TimeoutError | OSError):
                    raise SandboxError(f"a container of the image {image} does not get ready within {START:g} s: {error}") from error
                raise
        return Container(name, link, image)

    async def remove(self, container: Container) -> None:
        """Kill and remove a container, with its files if no other uses them: the one that they were made for has to be the last to go."""
        try:
            await self._remove(container.name)
        finally:
            container.link.close("it was removed")

    async def _remove(self, name: str) -> None:
        if await self._unless(404, 409, self._client.remove_container, name, v=True, force=True) == 409:
            # The engine is at it already, as the container had ended.
            await self._unless(404, 0, self._client.wait, name, condition="removed")

    async def reap(self) -> None:
        """Remove the containers and files whose owner, a process here, is gone."""
        await self._sweep(PLACE, _orphaned)

    async def close(self) -> None:
        """Hang up. Before, remove what an engine that was restarted may have kept of ours, or was still making for an owner that died."""
        try:
            with suppress(SandboxError):  # an engine that is gone
                await self._sweep(MAKER, lambda _: True)
                await self.reap()
        finally:
            await asyncio.to_thread(self._threads.shutdown)
            self._client.close()

    async def _sweep(self, label: str, dead: Callable[[Mapping[str, str]], bool]) -> None:
        """Remove the containers and files that have this label as ours have it, if their labels say that they are dead."""
        like_ours = {"label": f"{label}={self._labels[label]}"}
        for container in await self._call(self._client.containers, all=True, filters=like_ours):
            if dead(container["Labels"]):
                await self._remove(container["Id"])
        for volume in (await self._call(self._client.volumes, filters=like_ours))["Volumes"] or ():
            if dead(volume["Labels"]):
                await self._unless(404, 409, self._client.remove_volume, volume["Name"])

    async def _unless(self, first: int, second: int, function: Callable[..., object], *args: object, **kwargs: object) -> int | None:
        """A call to which an HTTP error with one of two numbers is an answer; that number, or None."""
        from docker import errors

        try:
            await self._call(function, *args, **kwargs)
        except SandboxError as error:
            cause = error.__cause__
            if isinstance(cause, errors.APIError) and cause.status_code in (first, second):
                return cause.status_code
            raise
        return None

    async def _call(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Cancelled, it still waits for the end of the call, so that what the call made can be removed."""
        from docker import errors

        call = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        cancelled = None
        while not call.done():
            try:
                await asyncio.wait({call})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled:
            call.exception()
            raise cancelled
        try:
            return call.result()
        except errors.ImageNotFound as error:
            missing = str(error.explanation).rpartition(": ")[2]
            raise SandboxError(f"the Docker engine has no image {missing}: `docker pull` it, or name none for the default") from error
        except (errors.DockerException, OSError) as error:  # those of the SDK's HTTP library are OSErrors
            raise SandboxError(f"Docker: {error}") from error

    def _config(self, limits: Limits, image: str, files_of: str | None) -> dict[str, Any]:
        """What the engine is asked for, in its words. A file system in memory for each folder: the engine cannot put two on one."""
        memory = limits.memory + 3 * limits.disk + SPARE
        files = {"/workspace": "uid=1000,gid=1000,mode=0755", "/tmp": "mode=1777"}
        return {
            "Image": image,
            "User": "0:0",
            "WorkingDir": "/",
            "Hostname": "box",
            "Entrypoint": ["python3", "-I", "-S", "-c", BOOT, str(len(self._source))],
            "Cmd": [],
            "Healthcheck": {"Test": ["NONE"]},  # an image's own would run as root
            "Labels": self._labels,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "OpenStdin": True,
            "StdinOnce": True,  # it ends when our connection does, however we end
            "HostConfig": {
                "AutoRemove": True,  # and is then removed
                "NetworkMode": "none",
                "ReadonlyRootfs": True,
                "Init": True,
                "CapDrop": ["ALL"],
                "CapAdd": ["SETUID", "SETGID", "SETPCAP", "KILL"],
                "SecurityOpt": ["no-new-privileges"],
                "PidsLimit": limits.processes + FIXED_PROCESSES,
                "Memory": memory,
                "MemorySwap": memory,
                "NanoCpus": int(self._cpus * 1e9),
                "LogConfig": {"Type": "none"},
                "ShmSize": limits.disk,
                "Sysctls": {"kernel.shm_rmid_forced": "1"},  # shared memory ends with its last process
                "VolumesFrom": [files_of] if files_of else [],
                "Mounts": [] if files_of else [self._volume(path, limits, options) for path, options in files.items()],
            },
        }

    def _volume(self, path: str, limits: Limits, options: str) -> dict[str, Any]:
        """Files in memory as a volume without a name: unlike in `Tmpfs`, a second container can see them, and they go with the last."""
        options = f"size={limits.disk},nr_inodes={limits.inodes + 1},nosuid,nodev,{options}"
        driver = {"Name": "local", "Options": {"type": "tmpfs", "device": "tmpfs", "o": options}}
        return {"Type": "volume", "Target": path, "VolumeOptions": {"NoCopy": True, "Labels": self._labels, "DriverConfig": driver}}


def _orphaned(labels: Mapping[str, str]) -> bool:
    """Whether the owner in the labels, a process of this place, is gone."""
    label = labels.get(OWNER, "")
    return not label or owner(int(label.split()[0])) != label
