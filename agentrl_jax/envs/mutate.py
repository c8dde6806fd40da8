"""Small mistakes in Python functions: replacements of whole tokens on one line, found in the syntax tree.

Nearly every operator is its own inverse or has one in the table, so the fix of a mutant is itself a mutation of the mutant,
and a wrong guess at a fix looks just like a right one.
"""

import ast
import io
import itertools
import keyword
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_COMPARE: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-", "*")),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+",)),
    ast.FloorDiv: ("//", ("%",)),
    ast.Mod: ("%", ("//",)),
}
_PAIRS = ("min max", "any all", "lower upper", "isdigit isalpha", "isupper islower", "find rfind", "zfill ljust")
_SIBLINGS = {name: other for pair in _PAIRS for name, other in itertools.permutations(pair.split(), 2)}

MAX_FRAGMENT = 24  # characters


@dataclass(frozen=True)
class Mutation:
    """Replace `source[start:end]` by `text`; `operator` names the kind of mistake."""

    start: int
    end: int
    text: str
    operator: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def inverse(self, source: str) -> "Mutation":
        """What turns `apply(source)` back into `source`."""
        return Mutation(self.start, self.start + len(self.text), source[self.start : self.end], self.operator)


@lru_cache(maxsize=4096)
def mutations(source: str) -> tuple[Mutation, ...]:
    """All mutations of a function, in the order of the text. `source` is ASCII and parses."""
    assert source.isascii(), "columns of the syntax tree are bytes"
    found = {(m.start, m.end, m.text): m for m in _Finder(source).all()}
    return tuple(found[key] for key in sorted(found) if source[key[0] : key[1]] != key[2])


class _Finder:
    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self.lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
        stored = [n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        parameters = [n.arg for n in ast.walk(self.tree) if isinstance(n, ast.arg)]
        self.variables = sorted({*stored, *parameters} - {"_"})

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        return self.source[self.start(node) : self.end(node)]

    def all(self) -> Iterator[Mutation]:
        for node in ast.walk(self.tree):
            for start, end, text, operator in self.of(node):
                if "\n" not in self.source[start:end]:
                    yield Mutation(start, end, text, operator)

    def of(self, node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        """(start, end, text, operator) of each mutation at one node of the tree."""
        match node:
            case ast.Compare(left, ops, comparators):
                for a, op, b in zip([left, *comparators], ops, comparators, strict=False):
                    yield from self.between(a, b, *_COMPARE[type(op)], "comparison")
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                yield from self.between(left, right, *_ARITHMETIC[type(op)], "arithmetic")
                if isinstance(right, ast.Constant) and right.value == 1 and isinstance(op, ast.Add | ast.Sub):
                    yield self.end(left) - 1, self.end(right), self.source[self.end(left) - 1], "off by one"
            case ast.AugAssign(target, op, value) if type(op) in _ARITHMETIC:
                sign, others = _ARITHMETIC[type(op)]
                yield from self.between(target, value, sign + "=", tuple(o + "=" for o in others), "arithmetic")
            case ast.BoolOp(op, values):
                sign, other = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for a, b in itertools.pairwise(values):
                    yield from self.between(a, b, sign, (other,), "boolean")
            case ast.UnaryOp(ast.Not(), operand):
                yield *self.first_word(node, operand), "negation"
            case ast.Constant(value) if isinstance(value, bool):
                yield self.start(node), self.end(node), str(not value), "constant"
            case ast.Constant(value) if isinstance(value, int):
                for other in {abs(value - 1), value + 1}:
                    yield self.start(node), self.end(node), str(other), "constant"
            case ast.Name(name, ast.Load()):
                for other in self.variables if name in self.variables else ():
                    yield self.start(node), self.end(node), other, "variable"
                yield from self.sibling(name, self.end(node))
            case ast.Attribute(attr=name):
                yield from self.sibling(name, self.end(node))
            case ast.Return(ast.expr() as value):
                yield *self.first_word(node, value), "return"
            case ast.Expr(value) if not isinstance(value, ast.Call):
                yield self.start(value), self.start(value) + 1, "return " + self.source[self.start(value)], "return"
        match node:
            case ast.If(test) | ast.While(test) | ast.IfExp(test) if isinstance(test, ast.Name | ast.Call | ast.Compare):
                yield self.start(test), self.start(test) + 1, "not " + self.source[self.start(test)], "negation"
            case ast.Call(args=[a, b, *_]) | ast.Tuple([a, b, *_], ast.Load()):
                yield self.start(a), self.end(b), self.text(b) + self.source[self.end(a) : self.start(b)] + self.text(a), "swap"
            case ast.Slice(lower, upper):
                for bound in (lower, upper):
                    yield from self.off_by_one(bound)
            case ast.Subscript(slice=index):
                yield from self.off_by_one(index)
            case ast.Call(ast.Name("range"), args):
                for bound in args:
                    yield from self.off_by_one(bound)

    def between(self, a: ast.expr, b: ast.expr, sign: str, others: tuple[str, ...], operator: str) -> Iterator[tuple[int, int, str, str]]:
        """Other signs in the place of the one between two operands (brackets may be there as well)."""
        start = self.source.index(sign, self.end(a), self.start(b))
        for other in others:
            yield start, start + len(sign), other, operator

    def first_word(self, node: ast.expr | ast.stmt, rest: ast.expr) -> tuple[int, int, str]:
        """Drop the keyword a node begins with: from the node to the first character of what follows."""
        return self.start(node), self.start(rest) + 1, self.source[self.start(rest)]

    def sibling(self, name: str, end: int) -> Iterator[tuple[int, int, str, str]]:
        if name in _SIBLINGS:
            yield end - len(name), end, _SIBLINGS[name], "call"

    def off_by_one(self, bound: ast.expr | None) -> Iterator[tuple[int, int, str, str]]:
        if isinstance(bound, ast.Name | ast.Call):
            end = self.end(bound)
            for tail in (" - 1", " + 1"):
                yield end - 1, end, self.source[end - 1] + tail, "off by one"


@dataclass(frozen=True)
class Token:
    """`source[start:end]`; an operand is a name or a literal, not an operator, bracket or keyword."""

    start: int
    end: int
    operand: bool


@lru_cache(maxsize=4096)
def tokens(source: str) -> tuple[tuple[Token, ...], ...]:
    """The tokens of each line that has any."""
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    lines: dict[int, list[Token]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            operand = token.type != tokenize.OP and not keyword.iskeyword(token.string)
            lines.setdefault(token.start[0], []).append(Token(start, end, operand))
    return tuple(tuple(line) for line in lines.values())


def fragment(source: str, mutation: Mutation) -> tuple[str, str] | None:
    """The mutation as an edit by text: (old, new), where `old` occurs once in `source`; None where no short one exists.

    `old` is the fewest whole tokens of the line around the change that are unique: at least two and three characters. An operator
    takes its right neighbour first and an operand its left one, so both ask for the same text: ` > 12`. The space before it belongs
    to it, as in the source: a byte-level BPE reads ` >` and `>` as different tokens, and a policy should be able to copy what it read.
    """
    line = next(line for line in tokens(source) if line[0].start <= mutation.start < line[-1].end)
    inside = [i for i, token in enumerate(line) if token.end > mutation.start and token.start < mutation.end]
    first, last = inside[0], inside[-1]
    for extra in range(len(line)):
        lefts = range(extra + 1)
        for left in reversed(lefts) if line[first].operand else lefts:
            a, b = first - left, last + extra - left
            if a < 0 or b >= len(line):
                continue
            start, end = line[a].start - (a > 0 and source[line[a].start - 1] == " "), line[b].end
            old = source[start:end]
            if b > a and 3 <= len(old) <= MAX_FRAGMENT and source.count(old) == 1:
                return old, source[start : mutation.start] + mutation.text + source[mutation.end : end]
    return None
