"""Text to search: what the standard library of this Python says of itself, read from its sources without importing any of it.

Each public class, function and method is a passage: its first line as in the source, which exceptions it raises, its docstring.
What questions ask about (bases, defaults, exceptions, modules) is read from the same syntax tree, so their answers are exact.

The text is that of the Python that runs: another version has other passages, and `Corpus.digest`, which is part of the ids of
tasks, tells them apart. Computed on first use, in a second or two; the same in every process.
"""

import ast
import hashlib
import inspect
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

LONGEST = 1000  # characters of a passage
# Not for reading, or not installed everywhere, or tables.
_LEFT_OUT = {
    "antigravity",
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "this",
    "tkinter",
    "turtle",
    "turtledemo",
}
_NAMED = re.compile(r"[^\W_]\w*(\.[^\W_]\w*)*")  # public names only: what a private one stands for is an inner matter
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Passage:
    """A piece of text. `id` is its title, and what tools call it by."""

    id: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Passages with different ids. `name` is a word for people."""

    name: str
    passages: tuple[Passage, ...]

    @cached_property
    def digest(self) -> str:
        """8 hex digits that tell this text from any other."""
        lines = "\0".join(f"{p.id}\0{p.text}" for p in self.passages)
        return hashlib.blake2b(lines.encode(), digest_size=4).hexdigest()

    @cached_property
    def by_id(self) -> dict[str, Passage]:
        return {p.id: p for p in self.passages}


@dataclass(frozen=True)
class Definition:
    """A public class, function or method, and what its source says for certain.

    id:       "module.Class.method"
    kind:     "class" | "function" | "method"
    module:   where it is defined
    name:     "Class.method"
    text:     of its passage
    summary:  first sentence of its docstring; "" where that is too short, too long, or gives the name away
    base:     the base as written, of a class that has one; else ""
    raises:   the exception as written, of a function that raises one and no other; else ""
    target:   id of the definition that `base` or `raises` means; "" where it is none of these
    defaults: parameter -> default, where that is a word, a text or a number above 1
    """

    id: str
    kind: str
    module: str
    name: str
    text: str
    summary: str = ""
    base: str = ""
    raises: str = ""
    target: str = ""
    defaults: Mapping[str, str] = field(default_factory=dict)


@cache
def standard_library() -> dict[str, Definition]:
    """All definitions by id, in order. Raises OSError where this Python has no sources."""
    root = Path(os.__file__).parent
    found: dict[str, Definition] = {}
    names: dict[str, dict[str, str]] = {}
    for module, path in _modules(root):
        tree = _parse(path)
        if tree is None:
            continue
        names[module] = _imports(tree, module, package=path.name == "__init__.py")
        found |= {d.id: d for d in _definitions(tree, module)}
    if not found:
        raise OSError(f"no sources of the standard library in {root}: use a Python that has them")
    return {d.id: _resolved(d, names[d.module], found) for d in found.values()}


@cache
def standard_corpus() -> Corpus:
    """The passages of `standard_library`."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Corpus(name, tuple(Passage(d.id, d.text) for d in standard_library().values()))


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, path) of the public modules."""
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if name.startswith("_"):
            continue
        if (root / f"{name}.py").is_file():
            yield name, root / f"{name}.py"
        for path in sorted((root / name).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") or part in ("test", "tests") for part in parts):
                yield ".".join(parts), path


def _parse(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in old modules
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, also where they depend on a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
            if isinstance(node, ast.Try):
                yield from _statements(statement for handler in node.handlers for statement in handler.body)


def _imports(tree: ast.Module, module: str, *, package: bool) -> dict[str, str]:
    """Names that a module imports -> what they stand for."""
    here = module.split(".")
    names = {}
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names if alias.asname or "." not in alias.name
            }
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + package] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
    return names


def _definitions(tree: ast.Module, module: str) -> Iterator[Definition]:
    for node in _public(tree.body):
        if isinstance(node, ast.ClassDef):
            yield _class(node, module)
            for method in _public(node.body):
                if isinstance(method, _FUNCTIONS):
                    yield _function(method, module, f"{node.name}.{method.name}", "method")
        else:
            yield _function(node, module, node.name, "function")


def _public(body: Sequence[ast.stmt]) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """What is defined here under a public name, once and under no condition: of the rest, nobody can say what it is without running it."""
    times = Counter(node.name for node in _statements(body) if isinstance(node, (ast.ClassDef, *_FUNCTIONS)))
    nodes = [node for node in body if isinstance(node, (ast.ClassDef, *_FUNCTIONS))]
    return [node for node in nodes if times[node.name] == 1 and not node.name.startswith("_")]


def _class(node: ast.ClassDef, module: str) -> Definition:
    base = ast.unparse(node.bases[0]) if len(node.bases) == 1 and isinstance(node.bases[0], ast.Name | ast.Attribute) else ""
    head = f"class {node.name}({', '.join(map(ast.unparse, node.bases))})" if node.bases else f"class {node.name}"
    text, summary = _text(node, head, [], node.name)
    return Definition(f"{module}.{node.name}", "class", module, node.name, text, summary, base=base)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, module: str, name: str, kind: str) -> Definition:
    raised = _raised(node)
    head = f"{'async def' if isinstance(node, ast.AsyncFunctionDef) else 'def'} {name}({ast.unparse(node.args)})"
    text, summary = _text(node, head, sorted(raised - {""}), node.name)
    only = next(iter(raised)) if len(raised) == 1 else ""
    return Definition(f"{module}.{name}", kind, module, name, text, summary, raises=only, defaults=_defaults(node.args))


def _text(node: ast.AST, head: str, raised: Sequence[str], name: str) -> tuple[str, str]:
    """(text of the passage, summary)"""
    doc = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")  # pyright: ignore[reportArgumentType]
    lines = [head, *([f"Raises {', '.join(raised)}."] if raised else []), *([doc] if doc else [])]
    sentence = " ".join(doc.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".:;")
    fits = 24 <= len(sentence) <= 160 and name.lower() not in sentence.lower() and '"' not in sentence
    # Lone surrogates cannot be written down: a few docstrings show them.
    return "\n".join(lines)[:LONGEST].encode("utf-8", "replace").decode(), sentence if fits and sentence.isprintable() else ""


def _raised(node: ast.AST) -> set[str]:
    """Exceptions that the body itself raises, as written; "" among them for one that is not known before it runs."""
    raised = set()
    inner = list(ast.iter_child_nodes(node))
    while inner:
        child = inner.pop()
        if isinstance(child, (ast.ClassDef, ast.Lambda, *_FUNCTIONS)):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            named = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            written = ast.unparse(named) if isinstance(named, ast.Name | ast.Attribute) else ""
            raised.add(written if written.rpartition(".")[2][:1].isupper() else "")
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            inner.extend(ast.iter_child_nodes(child))
    return raised


def _defaults(arguments: ast.arguments) -> dict[str, str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {name.arg: text for name, default in pairs if (text := _literal(default))}


def _literal(node: ast.expr | None) -> str:
    """The value as an answer; "" for none, and for what is easily guessed or looks alike without its signs."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and number > 1:
            return str(number)
        case ast.Constant(value=str(text)) if len(text) > 1 and text.isprintable() and any(map(str.isalnum, text)):
            return text
        case ast.Name() | ast.Attribute() if _NAMED.fullmatch(name := ast.unparse(node)):
            return name
        case _:
            return ""


def _resolved(definition: Definition, names: Mapping[str, str], found: Mapping[str, Definition]) -> Definition:
    """With `target`: what its base or exception, as written, means in its module."""
    first, dot, rest = (definition.base or definition.raises).partition(".")
    target = f"{names.get(first, f'{definition.module}.{first}')}{dot}{rest}"
    if not first or target not in found or found[target].kind != "class":
        return definition
    return replace(definition, target=target)
