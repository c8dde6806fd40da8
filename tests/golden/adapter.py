"""How a case of a golden folder meets this package.

An adapter maps the arguments of one reference function to calls of ours and the results back to the names the case stores. It may relabel,
shift, negate, invert a bound; it reduces nothing and looks at no case's name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One stored call. `inputs` are float64/int/bool/str arrays by name, None where the reference was given None."""

    id: str
    function: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    compare: str
    precision: str
    raises: str | None


@dataclass(frozen=True)
class Adapter:
    """`call(inputs, params) -> {output name: array or scalar}`.

    gradients: stored gradient -> (input it is with respect to, output that is differentiated), where the names do not say so:
               `grad_NAME` is with respect to NAME, of `loss`, else of the only output
    sets:      outputs whose order means nothing
    """

    call: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    gradients: dict[str, tuple[str, str]] = field(default_factory=dict)
    sets: tuple[str, ...] = ()


ADAPTERS: dict[str, Adapter] = {}

UNSUPPORTED: dict[tuple[str, str], str] = {}
"""(function or case id, output or "*") -> why the reference's number is not ours to give. Each entry is a reference's bug in NOTES."""


def adapter(
    *functions: str, gradients: dict[str, tuple[str, str]] | None = None, sets: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `call` for reference functions."""

    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            ADAPTERS[function] = Adapter(call, gradients or {}, sets)
        return call

    return register


def unsupported(reason: str, *names: str, output: str = "*") -> None:
    """Say why cases (by function or by id), or one output of theirs, are left out."""
    for name in names:
        UNSUPPORTED[name, output] = reason
