"""The embedded backend: bubblewrap boxes over memory files. Linux only; needs no root, no daemon and no image.

Bubblewrap ── Namespace ══ keeper.py      process 1 of its own user, mount and process namespace; holds the files of some 50 boxes
   └── Box ── Guest ═════════ └─ bwrap ── guest.py      process 1 of the box's own namespaces
                                            └─ a command
rootfs.py makes the read-only root that all of them see; `══` is a socket.

python -m agentrl_jax.sandbox.bubblewrap      # does it work here, and how fast is it?
"""

import asyncio
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from agentrl_jax.sandbox.box import Box, filled, pack
from agentrl_jax.sandbox.namespace import Namespace
from agentrl_jax.sandbox.protocol import ImageError, Limits, SandboxError
from agentrl_jax.sandbox.rootfs import bwrap_version, find_bwrap, find_rootfs, held

BOXES_PER_NAMESPACE = 48  # each start of a process copies the namespace's mounts; forks join their parent and may exceed this


class Bubblewrap:
    """A `Backend`. Its boxes end with `__aexit__`, or with this process however it ends.

    packages: what Python in the boxes can import besides the standard library, as ("numpy", "pandas"): copied, with all that it requires,
              from the environment that this process runs in. Such imports take address space: see `Limits.memory`

    A command sees a read-only root with tools of the host, `/workspace` and `/tmp` on one size-limited file system in memory, the box's
    processes, and no network. Memory is limited for each process; a box as a whole, and its CPU, could be limited by cgroups only, which
    need rights. System calls are not filtered.

    `__aenter__` raises SandboxError, naming the cause and the remedy, where boxes cannot run. There is no fall-back without isolation.
    """

    def __init__(self, *, packages: tuple[str, ...] = ()) -> None:
        self._packages = packages
        self._held = ExitStack()
        self._namespaces: list[Namespace] = []
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "Bubblewrap":
        if sys.platform != "linux":
            raise SandboxError(f"the embedded sandbox needs Linux, and this is {platform.system()}: use the Docker backend")
        self._root = await asyncio.to_thread(find_rootfs, self._packages)
        self._held.enter_context(held(self._root))
        try:
            await self._namespace()
        except BaseException:
            self._held.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with self._lock:
            self._held.close()
            closing, self._namespaces = self._namespaces, []
            await asyncio.gather(*(namespace.close() for namespace in closing))

    async def start(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        snapshot: bytes | None = None,
        limits: Limits | None = None,
        image: str | Path | None = None,
    ) -> Box:
        if image is not None:
            raise ImageError(f"the embedded sandbox has one root for all boxes and cannot start {image}: use the Docker backend")
        limits = limits or Limits()
        archives = snapshot, pack(files) if files else None
        return await filled(await Box.make(await self._namespace(), limits), archives, limits)

    async def _namespace(self) -> Namespace:
        async with self._lock:
            for namespace in self._namespaces:
                if not namespace.closed and len(namespace.boxes) < BOXES_PER_NAMESPACE:
                    return namespace
            self._namespaces.append(await Namespace.open(self._root))
            return self._namespaces[-1]


async def preflight(repeats: int = 20) -> str:
    """Use real boxes and say in one line what they cost. Raises SandboxError, naming the cause and the remedy, where that fails."""
    async with Bubblewrap() as backend:
        began = time.perf_counter()
        boxes = [await backend.start({"a": b"1"}) for _ in range(repeats)]
        results = [await box.exec(["cat", "a"]) for box in boxes]
        started = time.perf_counter()
        results += [await boxes[0].exec(["python3", "-c", "print(1, end='')"]) for _ in range(repeats)]
        ended = time.perf_counter()
        if wrong := [result for result in results if (result.exit_code, result.output) != (0, b"1")]:
            raise SandboxError(f"a box starts, but a simple command in it gives {wrong[0]}; use the Docker backend")
    bwrap = find_bwrap()
    return (
        f"ok: bubblewrap {bwrap_version(bwrap)} ({bwrap}), Python {platform.python_version()}, Linux {platform.release()}; "
        f"{(started - began) / repeats * 1e3:.0f} ms per box with its first command, "
        f"{(ended - started) / repeats * 1e3:.1f} ms per Python command"
    )


if __name__ == "__main__":
    try:
        print(asyncio.run(preflight()))  # noqa: T201 - the program's output
    except SandboxError as error:
        sys.exit(str(error))
