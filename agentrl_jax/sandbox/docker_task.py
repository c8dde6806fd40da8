"""Images of tasks: a Dockerfile's folder or an image's name, made fit for boxes. Built once, offline, under a tag of the content.

A box can write to `/workspace`, `/tmp` and `/dev/shm` only, and that stays so. Task folders say `/app`, `/tests`, `/solution` and `/logs`.
So the image gets one layer more, in which these paths are links: the image's WORKDIR to `/workspace`, the others into `/tmp`. What the
image has in its WORKDIR is unpacked into each new box, as the user's own. All else is as the Dockerfile has it, and read-only. Commands
start in `/workspace`, whatever the WORKDIR is called.

`FROM agentrl-jax-sandbox` in a Dockerfile is the backend's own image, whatever its tag. What was built stays with the engine, for the next
run; `docker image prune --all --filter label=agentrl_jax.task` removes what no container uses.
"""

import asyncio
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl_jax.sandbox.docker_image import REPOSITORY
from agentrl_jax.sandbox.protocol import ImageError, SandboxError

TASKS, LABEL = "agentrl-jax-task", "agentrl_jax.task"
SECONDS = 600.0  # in which a step of a build has to say something
LARGEST = 256 << 20  # bytes of a build's context, and of the files of a WORKDIR
LINKS = {"/tests": "/tmp/tests", "/solution": "/tmp/solution", "/logs": "/tmp/logs"}
SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr", "var")
LAYER = """
FROM {image}
USER 0
RUN ["python3", "-I", "-S", "-c", {script}]
"""
SCRIPT = """
import os, shutil, sys
assert sys.version_info >= (3, 11), sys.version
os.makedirs("/workspace", exist_ok=True)
for path, target in {links!r}.items():
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(target, path)
"""


@dataclass(frozen=True)
class TaskImage:
    """name: as the engine knows it; files: a tar of what a new box has in `/workspace`."""

    name: str
    files: bytes


class TaskImages:
    """Those of one backend, whose own image is `base`. Each is made once, and one that does not build is not tried again."""

    def __init__(self, client: Any, base: str) -> None:
        self._client, self._base = client, base
        self._making: dict[str | Path, asyncio.Future[TaskImage]] = {}

    async def find(self, image: str | Path) -> TaskImage:
        """Made where it is not there. A wait that is cancelled leaves the build to others. Raises ImageError, SandboxError."""
        making = self._making.get(image)
        if making is None or (making.done() and (making.cancelled() or not isinstance(making.exception(), ImageError | None))):
            making = self._making[image] = asyncio.ensure_future(asyncio.to_thread(make, self._client, image, self._base))
            making.add_done_callback(lambda done: done.cancelled() or done.exception())  # one that nobody waits for is no warning
        return await asyncio.shield(making)

    async def close(self) -> None:
        """Wait for what is being built: a thread cannot be stopped."""
        if self._making:
            await asyncio.wait(self._making.values())


def make(client: Any, image: str | Path, base: str) -> TaskImage:
    """Blocks."""
    from docker import errors

    try:
        name = _build(client, image, base) if isinstance(image, Path) else image
        facts = client.inspect_image(name)
        folder = PurePosixPath("/", facts["Config"]["WorkingDir"] or "/")
        _check(image, facts["Config"], folder)
        script = SCRIPT.format(links=_links(folder))
        fit = f"{TASKS}:{_digest(facts['Id'].encode(), script.encode())}"
        if not _there(client, fit):
            dockerfile = LAYER.format(image=facts["Id"], script=_quoted(script))
            if problem := _problem(client, fit, _archive({"Dockerfile": dockerfile.encode()})):
                raise ImageError(f"{_place(image)}: boxes need an image with python3 >= 3.11, found as the first in PATH ({problem})")
        return TaskImage(fit, _files(client, image, facts["Id"], folder))
    except errors.ImageNotFound as error:
        raise ImageError(f"the Docker engine has no image {image}: `docker pull` it, or give the folder of a Dockerfile") from error
    except (errors.DockerException, OSError) as error:
        raise SandboxError(f"Docker: {error}") from error


def _place(image: str | Path) -> str:
    return str(image / "Dockerfile") if isinstance(image, Path) else f"image {image}"


def _check(image: str | Path, config: Any, folder: PurePosixPath) -> None:
    """Whether the hardening of boxes holds for this image."""
    if config.get("Volumes"):
        raise ImageError(f"{_place(image)}: VOLUME {', '.join(config['Volumes'])} would be a disk without limit; remove the line")
    if len(folder.parts) == 2 and folder.parts[1] in SYSTEM:
        raise ImageError(f"{_place(image)}: WORKDIR {folder} belongs to the system; name a folder of its own, such as /app")


def _links(folder: PurePosixPath) -> dict[str, str]:
    own = {} if folder == PurePosixPath("/") or folder.parts[1] in ("workspace", "tmp") else {str(folder): "/workspace"}
    return own | LINKS


def _build(client: Any, folder: Path, base: str) -> str:
    """The tag of a Dockerfile's image, built if it is not there."""
    dockerfile = folder / "Dockerfile"
    try:
        own = re.sub(rb"(?im)^(\s*FROM\s+)%b(?=\s|$)" % REPOSITORY.encode(), rb"\g<1>" + base.encode(), dockerfile.read_bytes())
        context = _context(folder, own)
    except OSError as error:
        raise ImageError(f"{error.filename or dockerfile}: {error.strerror}") from error
    name = f"{TASKS}:{_digest(context)}"
    if not _there(client, name) and (problem := _problem(client, name, context)):
        raise ImageError(f"{dockerfile} does not build: {problem}")
    return name


def _problem(client: Any, name: str, context: bytes) -> str | None:
    """Build an image, its commands without a network; the step that failed and why, or None."""
    from docker import errors

    step, output = "", ""
    options = {"custom_context": True, "rm": True, "forcerm": True, "network_mode": "none", "timeout": int(SECONDS), "labels": {LABEL: ""}}
    try:
        for line in client.build(fileobj=io.BytesIO(context), tag=name, decode=True, **options):
            text = line.get("stream", "").strip()
            if found := re.fullmatch(r"Step (\d+)/\d+ : (.*)", text, re.DOTALL):
                step, output = f"step {found[1]}, {found[2]}", ""
            elif text and not text.startswith(("--->", "Removing intermediate")):
                output = text
            if "error" in line:
                return ": ".join(part for part in (step, line["error"].strip(), output[-200:]) if part)
    except errors.APIError as error:
        if error.is_client_error():  # the Dockerfile cannot be read
            return str(error.explanation)
        raise
    return None


def _there(client: Any, name: str) -> bool:
    from docker import errors

    try:
        client.inspect_image(name)
    except errors.ImageNotFound:
        return False
    return True


def _files(client: Any, image: str | Path, name: str, folder: PurePosixPath) -> bytes:
    """A tar of the WORKDIR's files as those of `/workspace`; empty where there is none."""
    if folder == PurePosixPath("/"):
        return b""
    if folder.parts[1] == "workspace":  # its other files are hidden by the box's too
        folder = PurePosixPath("/workspace")
    from docker import errors

    container = client.create_container(name, ["true"])["Id"]
    try:
        stream, _ = client.get_archive(container, f"{folder}/.")  # of what a link leads to
        data = _joined(stream, f"{_place(image)}: the files of WORKDIR {folder}")
    except errors.NotFound:
        return b""
    finally:
        client.remove_container(container, v=True, force=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source, tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for entry in source:
            if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                continue
            for part in ("name", "linkname") if entry.islnk() else ("name",):
                setattr(entry, part, str(PurePosixPath("workspace", getattr(entry, part))))
            entry.mode &= 0o777
            entry.mode |= 0o700 if entry.isdir() else 0o600  # the user's own, as root's they were to whoever wrote the image
            entry.size, entry.pax_headers = entry.size if entry.isreg() else 0, {}
            target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
    return buffer.getvalue()


def _joined(pieces: Iterator[bytes], what: str) -> bytes:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > LARGEST:
            raise ImageError(f"{what} are more than {LARGEST >> 20} MiB")
    return bytes(data)


def _context(folder: Path, dockerfile: bytes) -> bytes:
    """A tar of a folder with this Dockerfile, the same for the same paths, contents and modes."""
    buffer, size = io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for path in sorted(folder.rglob("*")):
            entry = target.gettarinfo(path, str(path.relative_to(folder)))
            if entry is None:  # pyright: ignore[reportUnnecessaryComparison] - a socket
                continue
            entry.mtime = entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            size += entry.size
            if size > LARGEST:
                raise ImageError(f"{folder} holds more than {LARGEST >> 20} MiB, which is the most that an image is built of")
            if path == folder / "Dockerfile":
                entry.size = len(dockerfile)
                target.addfile(entry, io.BytesIO(dockerfile))
            elif entry.isreg():
                with path.open("rb") as file:
                    target.addfile(entry, file)
            else:
                target.addfile(entry)
    return buffer.getvalue()


def _archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as target:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            target.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _quoted(script: str) -> str:
    """As the JSON string that Dockerfiles have arguments in."""
    return json.dumps(script)
