"""Settings as text, for records and functions of any kind."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from agentrl_jax.overrides import ConfigError, assignments, describe, override


@dataclass(frozen=True)
class Inner:
    ladder: tuple[int, ...] = (64, 128)
    names: tuple[str, ...] = ()
    note: str | None = None
    horizon: int | float | None = None


class Plain:
    """Not a dataclass; keeps its parameter under its name."""

    def __init__(self, level: int = 1) -> None:
        self.level = level


def rule(values: Any, *, omega: float = 1.0, untyped=2) -> Any:
    return values * omega


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    plain: Any = field(default_factory=Plain)
    rule: Any = field(default_factory=lambda: partial(rule, omega=0.5))


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("inner.ladder=32,64,256", "inner.ladder", [32, 64, 256]),
        ("inner.ladder=", "inner.ladder", []),
        ("inner.names=a,b", "inner.names", ["a", "b"]),
        ("inner.note=none", "inner.note", None),
        ("inner.note=a=b", "inner.note", "a=b"),
        ("inner.horizon=3", "inner.horizon", 3),
        ("inner.horizon=3.5", "inner.horizon", 3.5),
        ("inner.horizon=none", "inner.horizon", None),
        ("plain.level=4", "plain.level", 4),
        ("rule.omega=2", "rule.omega", 2.0),
        ("rule.untyped=7", "rule.untyped", 7),
    ],
)
def test_a_value_is_read_by_the_type_its_parameter_declares(text, path, value):
    described = describe(override(Outer(), [text]))
    assert described[path] == value
    assert type(described[path]) is type(value)


def test_a_partial_keeps_what_it_was_given():
    changed = override(Outer(), ["rule.untyped=3"])
    assert changed.rule.keywords == {"omega": 0.5, "untyped": 3}
    assert changed.rule(4.0) == 2.0


def test_later_overrides_see_earlier_ones():
    changed = override(Outer(), ["rule=operator:neg", f"rule={__name__}:rule", "rule.omega=3"])
    assert changed.rule(2.0) == 6.0


def test_a_function_of_a_file_that_is_not_on_the_path(tmp_path):
    path = tmp_path / "my_rule.py"
    path.write_text("def rule(x, *, by: float = 1.0):\n    return x + by\n")
    changed = override(Outer(), [f"rule={path}:rule", "rule.by=2"])
    assert changed.rule(1.0) == 3.0
    described = describe(changed)
    assert described["rule"] == f"{path}:rule"
    assert describe(override(Outer(), assignments(described))) == described


def test_a_union_that_nothing_fits():
    with pytest.raises(ConfigError, match=r"inner\.horizon must be int or float or none, got 'x'"):
        override(Outer(), ["inner.horizon=x"])


class Forgetful(Plain):
    def __init__(self, level: int = 1, seed: int = 0) -> None:
        super().__init__(level)


def test_an_object_that_forgets_a_parameter_is_not_made_anew():
    with pytest.raises(ConfigError, match="Forgetful must keep seed as"):
        override(Outer(plain=Forgetful(seed=3)), ["plain.level=2"])


def test_types_that_only_a_type_checker_knows():
    def rule(batch: "NoSuchType", *, omega: float = 1.0) -> float:  # noqa: F821
        return omega

    assert override(Outer(rule=rule), ["rule.omega=2.5"]).rule(None) == 2.5
