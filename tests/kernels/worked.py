"""The worked examples in `worked_examples.json`: what is one, and which test checks it.

Each example is some inputs and what they give under one or several conventions, worked out in float64 from the formulas.

    @example("1a_group_R1011")
    def test_group(x):
        np.testing.assert_allclose(group_relative(array(x.R), ...), x.pop_eps0)

A test runs in float64 and fails unless it has looked at every number of its example. `NAMES` are the examples that have a test.
"""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

NUMBERS = json.loads((Path(__file__).parent / "worked_examples.json").read_text("utf-8"))
NAMES: set[str] = set()


class Example:
    """Attributes are the example's numbers; it knows which of them were looked at."""

    def __init__(self, name: str) -> None:
        self._name, self._seen = name, {"note"}

    def __getattr__(self, field):
        if field not in NUMBERS[self._name]:
            raise AttributeError(f"example {self._name} has no {field}; it has {', '.join(NUMBERS[self._name])}")
        self._seen.add(field)
        return NUMBERS[self._name][field]

    def unseen(self) -> set[str]:
        return NUMBERS[self._name].keys() - self._seen


def example(*names: str) -> Callable:
    """The test's first arguments are these examples, one argument each."""

    def register(test):
        NAMES.update(names)

        @functools.wraps(test)
        def run(**fixtures):
            examples = [Example(name) for name in names]
            with jax.enable_x64(True):
                test(*examples, **fixtures)
            for one in examples:
                assert not one.unseen(), f"example {one._name}: nobody looked at {', '.join(sorted(one.unseen()))}"

        del run.__wrapped__  # pytest would take the examples for fixtures
        parameters = list(inspect.signature(test).parameters.values())[len(names) :]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return run

    return register


def array(x):
    """Floats of a JSON list, in float64."""
    return jnp.asarray(np.asarray(x, float))


def boolean(x):
    return jnp.asarray(np.asarray(x) != 0)


def close(found, expected, *, rtol=1e-9, atol=1e-12):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, float), rtol=rtol, atol=atol)


def same_group(n):
    """Group numbers and statistics' mask of one group of n."""
    return jnp.zeros(n, jnp.int32), jnp.ones(n, bool)
