"""The backends that have to behave alike: every test that asks for `backend` or `box` runs over each of them."""

from collections.abc import AsyncIterator

import pytest

from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.pool import Pool
from agentrl_jax.sandbox.protocol import Backend, Sandbox


@pytest.fixture(
    params=[
        pytest.param(Bubblewrap, id="bubblewrap", marks=pytest.mark.real("bwrap")),
        pytest.param(Docker, id="docker", marks=pytest.mark.real("docker")),
        pytest.param(lambda: Pool([Bubblewrap()], max_live=80, warm=2), id="pool", marks=pytest.mark.real("bwrap")),
    ]
)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async with request.param() as opened:
        yield opened


@pytest.fixture
async def box(backend: Backend) -> AsyncIterator[Sandbox]:
    opened = await backend.start()
    yield opened
    await opened.close()
