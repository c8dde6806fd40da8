"""A sample of the faults that `make chaos` makes of sandboxes; each audits itself. Here no engine is stopped."""

import pytest

from experiments.chaos import sandboxes
from experiments.chaos.sandboxes import BUBBLEWRAP, DOCKER

pytestmark = pytest.mark.slow


@pytest.mark.real("bwrap")
async def test_no_command_in_bubblewrap_is_a_fault_of_infrastructure():
    row = await sandboxes.hostile(BUBBLEWRAP, 1)
    assert (row.episodes, row.retried, row.excluded) == (2 * len(sandboxes.HOSTILE), 0, 0)


@pytest.mark.real("bwrap")
async def test_episodes_whose_boxes_are_killed_are_made_again():
    row = await sandboxes.struck(BUBBLEWRAP, "every process of its boxes, SIGKILL", 1, sandboxes.kill_boxes)
    assert (row.episodes, row.excluded) == (sandboxes.JOBS, 0)
    assert row.retried > 0


@pytest.mark.real("bwrap")
async def test_a_cancelled_collection_gives_everything_back():
    row = await sandboxes.cancelled(BUBBLEWRAP, 2)
    assert row.excluded > 0


@pytest.mark.real("docker")
async def test_episodes_whose_containers_are_killed_are_made_again():
    row = await sandboxes.struck(DOCKER, "every other container, SIGKILL", 1, sandboxes.kill_containers)
    assert (row.episodes, row.excluded) == (sandboxes.JOBS, 0)


@pytest.mark.real("docker")
async def test_nothing_of_a_killed_client_is_left():
    row = await sandboxes.client_killed(DOCKER, 1)
    assert row.seen["unfinished"] + row.episodes > 0
