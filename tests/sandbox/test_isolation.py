"""What a command cannot reach: the host, the network, other boxes, and the process that reports on it."""

import asyncio
import os
import textwrap
from pathlib import Path

from agentrl_jax.sandbox.protocol import Backend, Sandbox


def python(code: str) -> list[str]:
    return ["python3", "-c", textwrap.dedent(code)]


async def test_host_files_and_variables_are_invisible(box: Sandbox, tmp_path: Path, monkeypatch):
    (tmp_path / "secret").write_text("secret")
    assert (await box.exec(["cat", str(tmp_path / "secret")])).exit_code == 1
    names = (await box.exec(["ls", "/"])).output.split()
    assert {b"boxes", b"image", b"home", b"root", b"work"}.isdisjoint(names)
    seen = await box.exec(["sh", "-c", "cat /proc/*/environ /proc/*/cmdline /proc/mounts 2>/dev/null | tr '\\0' '\\n'"])
    assert os.environ["HOME"].encode() + b"/" not in seen.output
    assert b"HOME=" + os.environ["HOME"].encode() + b"\n" not in seen.output


async def test_the_root_is_read_only(box: Sandbox):
    for path in ("/etc/passwd", "/usr/bin/python3", "/new", "/dev/new", "/usr/lib/new", "/proc/sys/kernel/hostname"):
        assert (await box.exec(["sh", "-c", f"echo x >> {path}"])).exit_code != 0, path
    assert (await box.exec(["sh", "-c", "echo x > /dev/null && head -c 2 /dev/urandom | wc -c"])).output == b"2\n"


async def test_no_network_but_loopback(box: Sandbox):
    assert (await box.exec(["sh", "-c", "ls /sys/class/net 2> /dev/null"])).output in (b"", b"lo\n")
    result = await box.exec(["sh", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1; wc -l < /proc/net/route"])
    assert result.output.split() == [b"lo", b"1"]
    code = """
        import socket
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            print("loopback")
        try:
            socket.create_connection(("1.1.1.1", 53), timeout=2)
        except OSError as error:
            print(error.strerror)
    """
    assert (await box.exec(python(code))).output == b"loopback\nNetwork is unreachable\n"


async def test_no_capabilities_and_none_to_gain(box: Sandbox):
    status = dict(line.split(b":\t") for line in (await box.exec(["cat", "/proc/self/status"])).output.splitlines())
    assert [int(status[name], 16) for name in (b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb")] == [0] * 5
    assert status[b"NoNewPrivs"].strip() == b"1"
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"  # CLONE_NEWUSER
    assert (await box.exec(["python3", "-c", code])).output == b"-1\n"


async def test_boxes_do_not_see_each_other(backend: Backend):
    first, second = [await backend.start() for _ in range(2)]
    await first.exec(["sh", "-c", "echo secret > /tmp/a; sleep 12345 > /dev/null 2>&1 &"])
    assert b"12345" not in (await second.exec(["ps", "-ef"])).output
    assert (await second.exec(["find", "/tmp", "/workspace", "-type", "f"])).output == b""


async def test_results_cannot_be_forged(box: Sandbox):
    """A command finds nothing of the process that reports on it: no descriptor, no memory, no way to trace it."""
    code = """
        import ctypes, os
        print(os.path.exists("/proc/1/cmdline"))
        for attempt in (
            lambda: os.listdir("/proc/1/fd"),
            lambda: open("/proc/1/mem", "rb"),
            lambda: open("/proc/1/environ", "rb"),
        ):
            try:
                attempt()
                print("open")
            except PermissionError:
                print("denied")
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.ptrace(16, 1, 0, 0))                       # PTRACE_ATTACH
        print(libc.syscall(438, os.pidfd_open(1), 3, 0))      # pidfd_getfd
    """
    for run in (box.exec, box.exec_fresh):
        result = await run(python(code))
        assert result.output.split() == [b"True", b"denied", b"denied", b"denied", b"-1", b"-1"], result
    assert (await box.exec(["sh", "-c", "exit 9"])).exit_code == 9


async def test_commands_inherit_no_descriptor(box: Sandbox):
    for run in (box.exec, box.exec_fresh):
        for argv in (["ls", "/proc/self/fd"], ["python3", "-c", "import os; print(*os.listdir('/proc/self/fd'))"]):
            assert (await run(argv)).output.split() == [b"0", b"1", b"2", b"3"], "3: the listing itself"


async def test_writing_to_every_descriptor_forges_nothing(box: Sandbox):
    code = "import os\nfor fd in range(256):\n    try: os.write(fd, b'0')\n    except OSError: pass\nos._exit(4)"
    assert (await box.exec(["python3", "-c", code])).exit_code == 4
    assert (await box.exec(["echo", "next"])).output == b"next\n"


async def test_get_returns_regular_files_of_the_box_only(box: Sandbox):
    await box.put({"file": b"text", "-n": b"dash", "folder/inner": b"deep"})
    await box.exec(["sh", "-c", "mkfifo fifo; ln -s /etc/shadow shadow; ln -s file link; truncate -s 1T sparse; mkdir d; ln -s loop loop"])
    assert await box.get("file") == b"text"
    assert await box.get("-n") == b"dash"
    assert await box.get("link") == b"text"
    assert await box.get("folder/inner", limit=4) == b"deep"
    assert await box.get("folder/inner", limit=3) is None
    for path in ("fifo", "shadow", "sparse", "d", "loop", "missing", "a\0b", "\ud800", "x" * 5000, "", "/dev/zero", "../proc/1/mem"):
        assert await box.get(path) is None, path
    assert await box.get("../etc/passwd") == await box.get("/etc/passwd"), "the box's own, not the host's"


async def test_put_does_not_leave_the_box(box: Sandbox, tmp_path: Path):
    await box.exec(["sh", "-c", f"ln -s {tmp_path} out; ln -s /etc etc; mkfifo fifo"])
    await asyncio.gather(*(box.put({path: b"x"}) for path in ("out/file", "etc/passwd")))
    assert list(tmp_path.iterdir()) == []
    assert b"root:x" in (await box.exec(["cat", "/etc/passwd"])).output
    assert (await box.put({"fifo": b"x"})).exit_code == 0
    assert await box.get("fifo") == b"x", "what was there is replaced, not opened"
    assert (await box.put({"fifo/below": b"x"})).exit_code != 0
