"""What a command sees, what comes back of it, and where its limits are."""

import asyncio
import textwrap

import pytest

from agentrl_jax.sandbox.protocol import Backend, Limits, Sandbox


def python(code: str) -> list[str]:
    return ["python3", "-c", textwrap.dedent(code)]


async def test_output_and_exit_code(box: Sandbox):
    result = await box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.output, result.timed_out, result.killed, result.dropped) == (3, b"out\nerr\n", False, None, 0)


async def test_signal_is_a_negative_exit_code(box: Sandbox):
    assert (await box.exec(["sh", "-c", "kill -SEGV $$"])).exit_code == -11


@pytest.mark.parametrize(
    ("argv", "code"), [(["no-such-program"], 127), (["/etc/passwd"], 126), ([], 126), (["echo", "a\0b"], 126), (["echo", "\ud800"], 126)]
)
async def test_what_cannot_start_is_a_result(box: Sandbox, argv: list[str], code: int):
    result = await box.exec(argv)
    assert result.exit_code == code
    assert result.output


async def test_standard_input_environment_and_folder(box: Sandbox):
    script = "cat; echo $GREETING; pwd; id -u"
    result = await box.exec(["sh", "-c", script], stdin=b"x" * 300_000 + b"\n", env={"GREETING": "hej"})
    assert result.output[-26:] == b"xxx\nhej\n/workspace\n1000\n".rjust(26, b"x")
    assert (await box.exec(["sh", "-c", "read line; echo $GREETING$?"])).output == b"1\n", "nothing is left of the command before"


async def test_standard_input_cannot_be_made_to_fill_the_hosts_memory(box: Sandbox):
    result = await box.exec(["python3", "-c", "import os; os.write(0, b'x')"], stdin=b"a")
    assert "Operation not permitted" in result.text


async def test_bytes_that_are_not_utf8(box: Sandbox):
    result = await box.exec(["printf", r"\377\376\000\303"])
    assert result.output == b"\xff\xfe\x00\xc3"
    assert result.text == "��\0�"
    assert (await box.exec(["printf", "%s", "\udcff"])).output == b"\xff", "arguments may be any bytes"


async def test_head_and_tail_of_long_output(backend: Backend):
    box = await backend.start(limits=Limits(output=1000))
    result = await box.exec(["seq", "100000"])
    assert result.exit_code == 0
    assert len(result.output) == 1000
    assert len(result.output) + result.dropped == 588895
    assert result.output.startswith(b"1\n2\n")
    assert result.output.endswith(b"99999\n100000\n")


async def test_flood_is_killed(box: Sandbox):
    result = await box.exec(["yes"])
    assert (result.exit_code, result.killed, result.timed_out) == (None, "output", False)
    assert result.dropped > 10 << 20
    assert (await box.exec(["echo", "alive"])).output == b"alive\n"


async def test_time_limit_keeps_what_was_said_and_kills_all(box: Sandbox):
    await box.put({"survivor.sh": b"trap '' TERM HUP; while :; do date +%N > next; mv next beat; sleep 0.02; done"})
    script = "echo early; setsid sh survivor.sh & sleep 60"
    result = await box.exec(["sh", "-c", script], seconds=1.5)
    assert (result.exit_code, result.timed_out, result.killed, result.output) == (None, True, None, b"early\n")
    beat = await box.get("beat")
    await asyncio.sleep(0.2)
    assert beat
    assert await box.get("beat") == beat


async def test_background_process_does_not_hold_up_its_command(box: Sandbox):
    result = await box.exec(["sh", "-c", "sleep 30 & until grep -q sleep /proc/$!/comm; do sleep 0.01; done; echo done"])
    assert (result.exit_code, result.output) == (0, b"done\n")
    assert result.seconds < 20
    assert b"sleep" in (await box.exec(["ps", "-e"])).output, "and it is still there"


async def test_orphans_are_reaped(box: Sandbox):
    await box.exec(["sh", "-c", "for i in $(seq 10); do (setsid sleep 0.01 &) ; done; sleep 0.1"])
    async with asyncio.timeout(20):
        while b"defunct" in (await box.exec(["ps", "-e"])).output:
            await asyncio.sleep(0.05)


async def test_memory_limit(box: Sandbox):
    result = await box.exec(python("x = bytearray(1 << 30)"))
    assert (result.exit_code, b"MemoryError" in result.output) == (1, True)
    assert (await box.exec(python("x = bytearray(64 << 20)"))).exit_code == 0


async def test_process_limit_counts_this_box_only(backend: Backend):
    boxes = [await backend.start(limits=Limits(processes=10)) for _ in range(2)]
    code = """
        import os, time
        count = 0
        try:
            while count < 100:
                if os.fork() == 0:
                    time.sleep(60)
                count += 1
        except BlockingIOError:
            print(count)
    """
    for box in boxes:
        assert (await box.exec(python(code))).output == b"9\n"


async def test_fork_bomb_is_the_commands_own_trouble(box: Sandbox):
    result = await box.exec(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 60"], seconds=1)
    assert result.exit_code != 0
    again = await box.exec(["python3", "-c", "print('alive')"])
    assert again.output == b"alive\n"


async def test_disk_limit(backend: Backend):
    box = await backend.start(limits=Limits(disk=1 << 20))
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        result = await box.exec(["dd", "if=/dev/zero", f"of={folder}/fill", "bs=64k", "count=1000"])
        assert result.exit_code == 1
        assert "No space left" in result.text
    refused = await box.put({"more": bytes(1 << 16)})
    assert refused.exit_code != 0
    assert "No space left" in refused.text
    assert (await box.exec(["echo", "alive"])).output == b"alive\n"


async def test_inode_limit(backend: Backend):
    box = await backend.start(limits=Limits(inodes=50))
    result = await box.exec(["sh", "-c", "for i in $(seq 60); do : > f$i || exit; done"])
    assert "No space left" in result.text
    assert (await box.exec(["sh", "-c", "ls | wc -l"])).output == b"50\n"


async def test_killing_everything_is_the_commands_own_trouble(box: Sandbox):
    await box.put({"kept": b"1"})
    for script in ("kill -9 -1", "kill -9 1; kill -INT 1; kill -STOP 1; kill -9 $$"):
        await box.exec(["sh", "-c", f"sleep 60 & {script}"])
        assert (await box.exec(["cat", "kept"])).output == b"1"


async def test_locking_oneself_out_is_not_an_infrastructure_fault(box: Sandbox):
    await box.exec(["chmod", "000", "/workspace", "/tmp"])
    await box.exec(["sleep", "60"], seconds=0.1)
    assert (await box.exec(["echo", "alive"])).output == b"alive\n"
    assert (await box.put({"a": b"1"})).exit_code == 0
    assert await box.get("a") == b"1"


async def test_a_fresh_command_shares_files_and_nothing_else(box: Sandbox):
    await box.exec(["sh", "-c", "echo 1 > a; sleep 60 > /dev/null 2>&1 &"])
    result = await box.exec_fresh(["sh", "-c", "cat; cat a; ps -e | grep -c sleep; exit 7"], stdin=b"in ", env={"A": "1"})
    assert (result.exit_code, result.output) == (7, b"in 1\n0\n")
    assert (await box.exec_fresh(["sh", "-c", "kill -TERM $$"])).exit_code == 128 + 15
    assert (await box.exec_fresh(["python3", "-c", "import os; os._exit(5)"])).exit_code == 5
    assert (await box.exec_fresh(["sleep", "60"], seconds=0.2)).timed_out
    assert (await box.exec_fresh(["yes"])).killed == "output"
    assert b"sleep" in (await box.exec(["ps", "-e"])).output


async def test_commands_wait_for_each_other(box: Sandbox):
    script = "[ -e lock ] && echo overlap; touch lock; sleep 0.05; rm lock"
    results = await asyncio.gather(*(box.exec(["sh", "-c", script]) for _ in range(4)))
    assert [result.output for result in results] == [b""] * 4


async def test_many_boxes_at_once(backend: Backend):
    async def use(number: int) -> bytes | None:
        box = await backend.start({"n": b"%d" % number})
        await box.exec(["sh", "-c", "cat n n > twice"], seconds=60)
        return await box.get("twice")

    assert await asyncio.gather(*map(use, range(64))) == [b"%d%d" % (n, n) for n in range(64)]
