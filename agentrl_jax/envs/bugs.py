"""The library's functions with inputs and results, and the bugs that can be put into them.

Computed on first use, function by function, and the same on every machine. Only code of this package and its mutants runs here,
on the host; what a policy writes runs in a sandbox.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from random import Random
from types import CodeType

from agentrl_jax.envs import inbox
from agentrl_jax.envs.inputs import SAMPLERS
from agentrl_jax.envs.mutate import fragment, mutations

POOL = 40  # inputs per function, or as many different ones as its sampler finds
LOOPS = 2000  # rounds of all loops together that one call may take
UNSEEN = 0.15  # share of the functions kept for "held_out_functions"
HELD_OUT = 0.1  # share of the bugs kept for "held_out_bugs", and of the tasks for "held_out"
LONGER = "longer"  # the module whose functions only the higher levels use


@dataclass(frozen=True)
class Function:
    """A function of the library.

    source: its text, `def` to the last line
    pool:   source texts of argument tuples, all different
    wants:  `inbox.outcome` of the right function on each
    unseen: kept for the split "held_out_functions"
    """

    name: str
    source: str
    pool: tuple[str, ...]
    wants: tuple[str, ...]
    longer: bool
    unseen: bool


@dataclass(frozen=True)
class Bug:
    """A mutant of a function that at least two inputs of its pool tell from the right one.

    old, new: the edit that mends it: `old` is in `source` once
    fails:    indices into the pool where it differs
    held_out: kept for the split "held_out_bugs"
    """

    function: str
    source: str
    operator: str
    old: str
    new: str
    fails: frozenset[int]
    held_out: bool


@cache
def functions() -> dict[str, Function]:
    """All functions of the library by name."""
    found = {}
    for path in sorted((Path(__file__).parent / "library").glob("*.py")):
        for part in inbox.split(path.read_text(encoding="utf-8"))[1:]:
            name = part.partition("(")[0]
            found[name] = _function(name, f"def {part.rstrip()}\n", path.stem == LONGER)
    if found.keys() != SAMPLERS.keys():
        raise ValueError(
            f"inputs.SAMPLERS and the library differ in {sorted(found.keys() ^ SAMPLERS.keys())}: each function needs a sampler"
        )
    return found


def _function(name: str, source: str, longer: bool) -> Function:
    rng = Random(name)
    pool = tuple(dict.fromkeys(repr(SAMPLERS[name](rng)) for _ in range(10 * POOL)))[:POOL]
    return Function(name, source, pool, tuple(evaluate(source, name, pool)), longer, unseen=share(name) < UNSEEN)


@cache
def bugs(name: str) -> tuple[Bug, ...]:
    """The bugs of a function."""
    function = functions()[name]
    found: dict[str, Bug] = {}
    for mutation in mutations(function.source):
        source = mutation.apply(function.source)
        edit = fragment(source, mutation.inverse(function.source))
        if edit is None or source in found:
            continue
        results = evaluate(source, name, function.pool)
        fails = frozenset(i for i, (got, want) in enumerate(zip(results, function.wants, strict=True)) if got != want)
        # One that never returns is found without thinking; one that a single input shows could not be both tested and hidden.
        if len(fails) >= 2 and not all(result[0] == "!" for result in results):
            found[source] = Bug(name, source, mutation.operator, *edit, fails, held_out=share(source) < HELD_OUT)
    return tuple(found.values())


def evaluate(source: str, name: str, pool: tuple[str, ...]) -> list[str]:
    """`inbox.outcome` of a function on each of the arguments; an endless loop is `!Timeout`."""
    tree = _Counted().visit(ast.parse(source))
    namespace: dict[str, object] = {}
    exec(compile(ast.fix_missing_locations(tree), name, "exec"), namespace)  # noqa: S102 - our own functions and their mutants
    results = []
    for arguments in pool:
        namespace[_ROUNDS] = _rounds()
        results.append(inbox.outcome(namespace[name], eval(_literal(arguments))))  # noqa: S307 - fresh: a mutant may change its arguments
    return results


@cache
def _literal(text: str) -> CodeType:
    return compile(text, "arguments", "eval")


_ROUNDS = "__rounds__"


class Timeout(BaseException):
    """A call went round its loops too often. No `except Exception` of the code stops it."""


def _rounds() -> Iterator[None]:
    yield from repeat(None, LOOPS)
    raise Timeout


class _Counted(ast.NodeTransformer):
    """Each round of a loop begins with `next(__rounds__)`: much cheaper than tracing lines."""

    def visit_While(self, node: ast.While | ast.For) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(ast.Call(ast.Name("next", ast.Load()), [ast.Name(_ROUNDS, ast.Load())], [])))
        return node

    visit_For = visit_While  # noqa: N815


def share(text: str) -> float:
    """A number in [0, 1) drawn by the text itself."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
