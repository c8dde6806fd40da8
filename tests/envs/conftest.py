"""Real boxes for tests marked `real("bwrap")`."""

from collections.abc import AsyncIterator

import pytest

from agentrl_jax.sandbox.bubblewrap import Bubblewrap


@pytest.fixture
async def backend() -> AsyncIterator[Bubblewrap]:
    async with Bubblewrap() as backend:
        yield backend
