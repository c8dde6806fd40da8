"""A box as those see it who work in a shell, and its files as the host sees them: one picture, in which nothing in the box has a say."""

import asyncio
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl_jax.chat.tools import Tool
from agentrl_jax.envs.protocol import Observation
from agentrl_jax.sandbox.protocol import Sandbox

TOOLS = (Tool("run", "Run a shell command.", {"command": "string"}), Tool("submit", "Hand in the files as they are."))
LONGEST = 2000  # characters of an observation's output
LARGEST = 4 << 20  # bytes of a file that are looked at: a sparse one may be as long as it likes


@dataclass(frozen=True)
class Entry:
    """What lies at a path.

    kind:    "file" | "folder" | "link" | "other"
    mode:    permission bits
    content: of a file, its first `LARGEST` bytes; of a link, where it leads
    size:    bytes of a file
    """

    kind: str
    mode: int
    content: bytes = b""
    size: int = 0


async def step(name: str, arguments: Mapping[str, Any], box: Sandbox, env: Mapping[str, str] | None = None) -> Observation:
    """Do one tool call. An observation is the exit code, or what ended the command, and its output, the middle left out if that is long."""
    if name == "submit":
        return Observation("", done=True)
    if name != "run":
        return Observation(f"error: no tool {name[:40]}", count="tool_errors")
    result = await box.exec(["sh", "-c", str(arguments.get("command", ""))], env=env)
    text = clip(result.text.rstrip("\n"))
    if result.timed_out:
        return Observation(f"timeout\n{text}".rstrip("\n"), count="tool_timeouts")
    if result.killed:
        return Observation(f"error: killed ({result.killed})\n{text}".rstrip("\n"), count="tool_errors")
    return Observation(f"exit code {result.exit_code}\n{text}".rstrip("\n"))


def clip(text: str) -> str:
    """Head and tail of a text that is too long."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


async def tree(box: Sandbox) -> dict[str, Entry] | None:
    """What the box holds, path -> entry, as "workspace/a/b" and "tmp/c"; None where its files have names that no archive can carry."""
    return await asyncio.to_thread(read_tree, await box.snapshot())


def read_tree(archive: bytes) -> dict[str, Entry] | None:
    """The entries of a snapshot. Links are not followed: what lies behind one is at no path of its own."""
    found: dict[str, Entry] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as source:
            for member in source:
                path = member.name.rstrip("/")
                if member.islnk():
                    found[path] = found[member.linkname]
                elif member.issym():
                    found[path] = Entry("link", 0o777, member.linkname.encode("utf-8", "surrogateescape"))
                elif member.isreg():
                    file = source.extractfile(member)
                    assert file is not None
                    found[path] = Entry("file", member.mode & 0o7777, file.read(LARGEST), member.size)
                else:
                    found[path] = Entry("folder" if member.isdir() else "other", member.mode & 0o7777)
    except (tarfile.TarError, OSError, KeyError, ValueError, EOFError):
        return None
    return found


async def state(box: Sandbox) -> str:
    """Hash of `/workspace`: paths, kinds, permissions and contents."""
    entries = await tree(box)
    digest = hashlib.blake2b(digest_size=8)
    for path, entry in sorted((entries or {}).items()):
        if path.startswith("workspace/"):
            digest.update(f"{path}\0{entry.kind}\0{entry.mode}\0{entry.size}\0".encode("utf-8", "surrogateescape"))
            digest.update(hashlib.blake2b(entry.content).digest())
    return digest.hexdigest() if entries is not None else "?"
