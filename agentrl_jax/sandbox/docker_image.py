"""The default image: python:3.12-slim and some tools where a registry answers, else the root of the embedded sandbox (rootfs.py).

python -m agentrl_jax.sandbox.docker_image      # build it if it is not there, and print its name
"""

import hashlib
import io
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.sandbox import distributions, rootfs
from agentrl_jax.sandbox.docker_engine import connect
from agentrl_jax.sandbox.protocol import SandboxError

REPOSITORY = "agentrl-jax-sandbox"
SECONDS = 180.0  # for a build that needs the network
DOCKERFILE = """
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git patch procps && rm -rf /var/lib/apt/lists/*
RUN mkdir -p /workspace && ln -s workspace /app && ln -s tmp/tests tmp/solution tmp/logs /
"""
SETTINGS = ["ENV PATH=/usr/bin", "ENV LANG=C.UTF-8"]


def find_image(client: Any, packages: Sequence[str] = ()) -> str:
    """The name of the default image, built if it is not there: in about 10 s of this host's files. Raises SandboxError. Blocks.

    packages: as in `rootfs.find_rootfs`; from a registry in the versions that are installed here
    """
    from docker import errors

    pins = distributions.pins(distributions.resolve(packages))
    install = f"RUN pip install --no-cache-dir {' '.join(pins)}\n" if pins else ""
    recipe = (DOCKERFILE + install, SETTINGS, Path(rootfs.__file__).read_bytes())
    tag = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    name = f"{REPOSITORY}:{tag}"
    try:
        client.inspect_image(name)
    except errors.ImageNotFound:
        if problem := build(client, name, DOCKERFILE + install):
            import_root(client, tag, packages, problem)
    return name


def build(client: Any, name: str, dockerfile: str) -> str | None:
    """Build from the registry; what kept that from happening, or None."""
    from docker import errors

    problem = None
    try:
        for line in client.build(fileobj=io.BytesIO(dockerfile.encode()), tag=name, rm=True, forcerm=True, decode=True, timeout=SECONDS):
            problem = line.get("error", problem)
    except (errors.DockerException, OSError) as error:
        problem = str(error)
    return problem


def import_root(client: Any, tag: str, packages: Sequence[str], problem: str) -> None:
    """Make an image of the embedded sandbox's root."""
    from docker import errors

    try:
        root = rootfs.find_rootfs(packages)
        client.import_image_from_data(archive(root), repository=REPOSITORY, tag=tag, changes=SETTINGS)
    except (SandboxError, errors.DockerException, OSError) as error:
        raise SandboxError(f"no default image: {error}; nor from a registry: {problem}; name an image: Docker(image)") from error


def archive(root: Path) -> bytes:
    """A tar of a folder in which everything belongs to root, as a command's user could change it otherwise."""

    def as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as target:
        target.add(root, ".", filter=as_root)
    return buffer.getvalue()


if __name__ == "__main__":
    try:
        print(find_image(connect()))  # noqa: T201 - the program's output
    except SandboxError as error:
        sys.exit(str(error))
