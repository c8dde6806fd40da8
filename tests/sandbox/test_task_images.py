"""Images of tasks in real containers: built of a Dockerfile, with the paths of task folders, and as hardened as any box."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.pool import Pool
from agentrl_jax.sandbox.protocol import ImageError, Limits, Sandbox

DOCKERFILE = """
FROM agentrl-jax-sandbox
ENV GREETING=hello
WORKDIR /app
COPY . .
RUN mkdir -p deep/er && echo made > deep/er/made && ln -s deep/er/made link && ln deep/er/made other && chmod 400 other
RUN mkdir -p /opt/kept && echo kept > /opt/kept/it
"""


def folder(at: Path, dockerfile: str = DOCKERFILE, **files: str) -> Path:
    at.mkdir()
    (at / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        (at / name).write_text(text)
    return at


async def say(box: Sandbox, command: str) -> str:
    result = await box.exec(["sh", "-c", command])
    return f"{result.exit_code} {result.text}".strip()


@pytest.mark.real("docker")
async def test_a_box_has_what_the_dockerfile_made(tmp_path: Path):
    async with Docker() as backend:
        box = await backend.start({"data": b"of the task"}, image=folder(tmp_path / "one", script="echo $GREETING"))
        assert await say(box, "cd /app && sh script && cat link other data /opt/kept/it") == "0 hello\nmade\nmade\nof the taskkept"
        assert await say(box, "echo more >> /app/deep/er/made && cat /workspace/other") == "0 made\nmore", "a hard link stays one"
        assert (
            await say(box, "mkdir -p /tmp/tests /tmp/logs && echo 1 > /tests/reward && cp /tests/reward /logs/ && cat /tmp/logs/*") == "0 1"
        )
        plain = await backend.start()
        assert (await say(plain, "cat /opt/kept/it")).startswith("1 "), "a box without an image is made of the default one"


@pytest.mark.real("docker")
async def test_forks_fresh_commands_and_snapshots_have_the_same_image(tmp_path: Path):
    async with Docker() as backend:
        image = folder(tmp_path / "one")
        box = await backend.start(image=image)
        await say(box, "echo changed > /app/deep/er/made; mkdir -p /tmp/tests; echo seen > /tests/it")
        fork = await box.fork()
        for one in (await fork.exec_fresh(["cat", "/app/link", "/opt/kept/it", "/tests/it"]), await fork.exec(["cat", "/app/link"])):
            assert one.text.startswith("changed"), one
        assert (await fork.exec_fresh(["cat", "/opt/kept/it", "/tests/it"])).text == "kept\nseen\n"
        again = await backend.start(image=image, snapshot=await box.snapshot())
        assert await say(again, "cat /app/link && ls /app") == "0 changed\nDockerfile\ndeep\nlink\nother", "not the image's files as well"


@pytest.mark.real("docker")
async def test_the_boxes_of_an_image_are_as_hardened_as_others(tmp_path: Path):
    async with Docker() as backend:
        health = "HEALTHCHECK --interval=1s CMD python3 -c \"open('/tmp/root', 'w')\"\n"
        box = await backend.start(image=folder(tmp_path / "one", f"{DOCKERFILE}USER 0\n{health}"), limits=Limits(disk=1 << 20))
        facts = "id -u; touch /opt/kept/new 2> /dev/null || echo read-only; grep -c CapEff:.*0000000000000000 /proc/self/status"
        assert await say(box, facts) == "0 1000\nread-only\n1"
        assert (await say(box, "head -c 2000000 /dev/zero > /app/large")).startswith("1 "), "the limit of the disk holds for WORKDIR"
        await asyncio.sleep(1.5)
        assert (await say(box, "ls /tmp/root")).startswith("2 "), "an image's health check would run as root"


@pytest.mark.real("docker")
@pytest.mark.parametrize(
    ("dockerfile", "problem"),
    [
        (
            "FROM agentrl-jax-sandbox\nRUN echo why && false\n",
            r"Dockerfile does not build: step 2, RUN echo why && false: .*code: 1: why",
        ),
        ("FROM agentrl-jax-sandbox\nWRONG x\n", r"Dockerfile does not build: .*line 2: unknown instruction: WRONG"),
        ("FROM agentrl-jax-sandbox\nCOPY nothing .\n", r"does not build: step 2, COPY nothing .: "),
        ("FROM agentrl-jax-sandbox\nVOLUME /data\n", r"Dockerfile: VOLUME /data would be a disk without limit"),
        ("FROM agentrl-jax-sandbox\nWORKDIR /usr\n", r"Dockerfile: WORKDIR /usr belongs to the system"),
        ("FROM scratch\nCOPY Dockerfile /\n", r"Dockerfile: boxes need an image with python3 >= 3.11"),
        (None, r"Dockerfile: No such file"),
    ],
)
async def test_what_is_wrong_with_a_dockerfile_is_one_error(tmp_path: Path, dockerfile: str | None, problem: str):
    at = folder(tmp_path / "bad", dockerfile or "")
    if dockerfile is None:
        (at / "Dockerfile").unlink()
    async with Pool([Docker()], max_live=4, warm=1) as backend:
        for _ in range(4):  # more often than what sets a backend aside
            with pytest.raises(ImageError, match=problem):
                await backend.start(image=at)
        assert not backend.stats.set_aside
        assert await say(await backend.start(), "echo alive") == "0 alive"
    with pytest.raises(ImageError, match="no image agentrl-none:1"):
        async with Docker() as docker:
            await docker.start(image="agentrl-none:1")


@pytest.mark.real("docker")
async def test_many_episodes_of_a_task_build_its_image_once(tmp_path: Path):
    counter = f"LABEL agentrl_test={tmp_path.name}\nRUN head -c 8 /dev/urandom | md5sum > count\n"
    async with Docker() as backend:
        image = folder(tmp_path / "one", f"{DOCKERFILE}{counter}", salt=str(tmp_path))
        cancelled = asyncio.create_task(backend.start(image=image))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        boxes = await asyncio.gather(*(backend.start(image=image) for _ in range(3)))
        assert len({await say(box, "cat /app/count") for box in boxes}) == 1
        (image / "salt").write_text("changed")
    async with Docker() as backend:
        assert await say(await backend.start(image=image), "cat /app/salt") == "0 changed", "another content is another image"
    label = f"label=agentrl_test={tmp_path.name}"
    subprocess.run(["docker", "image", "prune", "--all", "--force", "--filter", label], check=True, capture_output=True)


@pytest.mark.real("bwrap")
async def test_the_embedded_sandbox_refuses_images(tmp_path: Path):
    async with Bubblewrap() as backend:
        with pytest.raises(ImageError, match=r"one root for all boxes and cannot start .*one: use the Docker backend"):
            await backend.start(image=folder(tmp_path / "one"))
