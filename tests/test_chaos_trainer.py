"""A sample of `make chaos`: the trainer killed at random moments."""

import pytest

from experiments.chaos import trainer

pytestmark = [pytest.mark.real("bwrap"), pytest.mark.slow, pytest.mark.timeout(900)]  # a test is several runs


def test_a_run_that_was_killed_becomes_the_run_that_never_was(monkeypatch):
    for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):  # optax is not that strict, see tests/conftest.py
        monkeypatch.delenv(name)
    (row,) = trainer.run(times=2)
    assert row.times == 2
    assert row.episodes >= 20
