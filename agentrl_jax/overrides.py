"""Settings as text: set by `path=value`, written out as `{path: value}`, and the one read back as the other.

A path walks through anything that says what it was made of: an object through the parameters of its class (kept as attributes of
the same name), a function through its keyword-only parameters. So `rollout.groups=16`, `environment.level=2` and
`advantage.std=none` are the same thing. A value is read by the type its parameter declares; a function or object is named
`module:name` or `path/to/file.py:name`. Nothing is evaluated.
"""

import collections.abc
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

Node = TypeVar("Node")


class ConfigError(ValueError):
    """What is wrong with a setting, where, and what to write instead."""


class _MismatchError(ConfigError):
    """The text is not of the declared type; another type of a union may still take it."""


def override(node: Node, assignments: Iterable[str]) -> Node:
    """A copy of `node` with every `path=value` applied, the later of two for one path. Raises ConfigError.

    What is checked of several fields together (`reduction=constant horizon=512`) is checked when all of them are set.
    """
    edits = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"override {assignment!r}: write path=value, such as optimizer.learning_rate=1e-3")
        edits.append(_Edit(assignment, path, tuple(path.split(".")), text))
    return _edited(node, edits, node)


def describe(node: object) -> dict[str, Any]:
    """`{path: value}` of everything a node is made of, as JSON holds it; functions and classes by name."""
    described: dict[str, Any] = {}
    for name, (hint, value) in _parameters(node).items():
        described |= _describe(name, hint, value)
    return described


def assignments(described: Mapping[str, Any]) -> list[str]:
    """The overrides that bring any node of the same type to what was described."""
    return [f"{path}={_spell(value)}" for path, value in described.items()]


def differences(then: Mapping[str, Any], now: Mapping[str, Any], *, free: Iterable[str] = ()) -> list[str]:
    """One line per path where two descriptions differ, but for paths that are or begin with a `free` one."""
    free = tuple(free)
    paths = [path for path in {**then, **now} if not any(path == f or path.startswith(f"{f}.") for f in free)]
    pairs = [(path, then.get(path, "(not set)"), now.get(path, "(not set)")) for path in paths]
    return [f"{path}: was {_spell(old)}, now {_spell(new)}" for path, old, new in pairs if old != new]


def accepts(hint: Any, value: object) -> bool:
    """Whether a value is of the type that a parameter declares. An int is a float; a bool is neither."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(accepts(argument, value) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(accepts(arguments[0], item) for item in value)
    if origin is collections.abc.Callable:
        return callable(value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def expected(hint: Any) -> str:
    """The type a parameter declares, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(expected(argument) for argument in arguments)
    if origin is Literal:
        return " | ".join(map(_spell, arguments))
    if origin is tuple:
        return f"{expected(arguments[0])}s separated by commas"
    if origin is collections.abc.Callable:
        return "module:function or file.py:function"
    plain = {bool: "true or false", types.NoneType: "none", int: "int", float: "float", str: "str"}
    return plain.get(hint, "module:name or file.py:name")


def load_attribute(name: str) -> Any:
    """What `module:name` or `path/to/file.py:name` names. Raises ConfigError."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not attribute:
        raise ConfigError(f"{name!r} is not module:name or file.py:name")
    if module.endswith(".py"):
        namespace = load_file(Path(module))
    else:
        try:
            namespace = importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"cannot import {module!r}: {error}") from error
    value: Any = namespace
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [n for n in vars(value) if not n.startswith("_")]
            raise ConfigError(f"{module} has no {part!r}{_suggest(part, public)}")
        value = getattr(value, part)
    return value


def load_file(path: Path) -> types.ModuleType:
    """Run a Python file as a module named by its path, afresh each time. Raises ConfigError with file, line and cause."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file{_suggest(path.name, [p.name for p in path.parent.glob('*.py')])}")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        cause = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}:{line or 1}: {cause}") from error
    return module


def _parameters(node: object) -> dict[str, tuple[Any, Any]]:
    """Name -> (declared type, value) of what a node is made of; nothing for plain values."""
    if node is None or isinstance(node, (bool, int, float, str, tuple)):
        return {}
    if isinstance(node, functools.partial) or hasattr(node, "__qualname__"):
        function, given = _unwrap(node)
        hints = _hints(function)
        keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return {p.name: (hints.get(p.name, Any), given.get(p.name, p.default)) for p in keywords}
    hints, names = _hints(type(node)), inspect.signature(type(node)).parameters
    return {name: (hints.get(name, Any), getattr(node, name)) for name in names if hasattr(node, name)}


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Declared types of what is passed; none where a name in them exists for type checkers only."""
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    except NameError:
        return {}


def _unwrap(function: Any) -> tuple[Any, dict[str, Any]]:
    """A function or partial as the function and the keywords given."""
    if isinstance(function, functools.partial):
        return function.func, dict(function.keywords)
    return function, {}


@dataclass(frozen=True)
class _Edit:
    """An assignment, its path, those names of it that are still to be walked, and the text of the value."""

    assignment: str
    path: str
    names: tuple[str, ...]
    text: str


def _edited(node: Any, edits: Sequence[_Edit], root: Any) -> Any:
    """A copy of `node` with all edits, made once."""
    if not edits:
        return node
    parameters, changed = _parameters(node), {}
    for name in dict.fromkeys(edit.names[0] for edit in edits):
        own = [edit for edit in edits if edit.names[0] == name]
        with _told(own[0]):
            if name not in parameters:
                raise ConfigError(f"there is no {own[0].path}{_suggest_path(own[0].path, name, list(parameters), root)}")
        hint, value = parameters[name]
        deeper: list[_Edit] = []
        for edit in own:
            if len(edit.names) == 1:
                with _told(edit):
                    value, deeper = _read(hint, edit.text, value, edit.path), []
            else:
                deeper.append(replace(edit, names=edit.names[1:]))
        if deeper and value is None:
            value = _by_default(hint)
        changed[name] = _edited(value, deeper, root)
    with _told(*edits):
        return _made_anew(node, parameters, changed)


def _by_default(hint: Any) -> Any:
    """Of `Record | None` the record, so that setting a field of it switches it on; None for other types."""
    records = [argument for argument in typing.get_args(hint) if is_dataclass(argument)]
    return records[0]() if len(records) == 1 and isinstance(records[0], type) else None


@contextmanager
def _told(*edits: _Edit) -> Iterator[None]:
    """What goes wrong inside is told as the fault of these assignments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        cause = None if isinstance(error, ConfigError) else error
        raise ConfigError(f"override {' '.join(edit.assignment for edit in edits)!r}: {error}") from cause


def _made_anew(node: Any, parameters: Mapping[str, tuple[Any, Any]], changed: Mapping[str, Any]) -> Any:
    """A copy of `node` in which some parameters are others."""
    if isinstance(node, functools.partial):
        return functools.partial(node.func, *node.args, **{**node.keywords, **changed})
    if hasattr(node, "__qualname__"):
        return functools.partial(node, **changed)
    if lost := [key for key in inspect.signature(type(node)).parameters if key not in parameters]:
        raise ConfigError(f"{type(node).__name__} must keep {', '.join(lost)} as attributes, or it cannot be made anew")
    return type(node)(**{key: current for key, (_, current) in parameters.items()} | dict(changed))


def _read(hint: Any, text: str, current: Any, path: str) -> Any:
    """The value that `text` spells, of the type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    wrong = _MismatchError(f"{path} must be {expected(hint)}, got {text!r}")
    if origin in (Union, types.UnionType):
        # What is exact comes first, none before all; str and module:name take almost anything.
        order = sorted(arguments, key=lambda a: (a is not types.NoneType, a is str, typing.get_origin(a) is collections.abc.Callable))
        for argument in order:
            try:
                return _read(argument, text, current, path)
            except _MismatchError:
                continue
        raise wrong
    if origin is Literal:
        for argument in arguments:
            if text == _spell(argument):
                return argument
        raise wrong
    if origin is tuple:
        return tuple(_read(arguments[0], item, current, path) for item in text.split(",") if item)
    if hint is bool or hint is types.NoneType:
        constants = {"true": True, "false": False} if hint is bool else {"none": None}
        if text.lower() not in constants:
            raise wrong
        return constants[text.lower()]
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise wrong from None
    if hint is str:
        return text
    if hint is Any and (current is None or isinstance(current, (bool, int, float, str))):
        return _read(type(current), text, current, path)
    if type(current) is hint and _parameters(current):
        raise ConfigError(f"{path} is a group of settings; set one of {', '.join(f'{path}.{name}' for name in _parameters(current))}")
    value = load_attribute(text)
    if isinstance(value, type) and origin is not collections.abc.Callable:
        value = value()
    if not accepts(hint, value):
        raise wrong
    return value


def _describe(path: str, hint: Any, value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return {path: value}
    if isinstance(value, tuple):
        return {path: list(typing.cast("tuple[Any, ...]", value))}
    if isinstance(value, functools.partial) or hasattr(value, "__qualname__"):
        function, given = _unwrap(value)
        described = {path: _name(function)}
        inner = {name: entry for name, entry in _parameters(value).items() if name in given}
    else:
        described = {} if hint is type(value) else {path: _name(type(value))}
        inner = _parameters(value)
    for name, (inner_hint, inner_value) in inner.items():
        described |= _describe(f"{path}.{name}", inner_hint, inner_value)
    return described


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _spell(value: object) -> str:
    """A described value as the text of an override."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_spell, typing.cast("list[object]", value)))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}" if known else ""


def _suggest_path(path: str, name: str, siblings: list[str], root: object) -> str:
    """The nearest path of all, or else what there is where the path went wrong."""
    last = path.rpartition(".")[2]
    everywhere = list(describe(root))
    same = [known for known in everywhere if known.rpartition(".")[2] == last]
    close = same or difflib.get_close_matches(path, everywhere, n=1)
    return f"; did you mean {' or '.join(close)}?" if close else _suggest(name, siblings)
