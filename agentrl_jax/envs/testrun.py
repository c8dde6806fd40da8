"""What runs the tests of one file inside the box: `python3 -c <the text of this file>`, a child of `referee`.

stdin is one Python literal: (test file, options of pytest, token). A line of the report, at descriptor 3, is the token and the literal
(test id, outcome), or (None, what is wrong). The code under test shares this process, see `swe` for what that leaves it.
"""
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN205
# pyright: basic, reportMissingParameterType=false, reportIncompatibleMethodOverride=false, reportCallIssue=false

import ast
import os
import sys

REPORT = 3
WATCHED = ("_pytest", "pluggy", "unittest", "builtins", "__main__")
KINDS = (type(lambda: 0), type, property, classmethod, staticmethod, type(len))


def framework() -> dict[tuple[str, str, str], object]:
    """The functions and classes of the test framework as they are now: (module, name, "" or attribute of the class) -> what is there."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in WATCHED:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, KINDS):
                found[name, key, ""] = getattr(value, "__code__", value)
            if isinstance(value, type):
                found.update({(name, key, k): getattr(v, "__code__", v) for k, v in vars(value).items() if isinstance(v, KINDS)})
    return found


def patched(before: dict[tuple[str, str, str], object]) -> bool:
    """Whether something in the framework was replaced, or put into a class of it. Modules that were loaded since are no matter."""
    now = framework()
    classes = {key[:2] for key in before if key[2]}
    added = any(key[2] and key[:2] in classes and key not in before for key in now)
    return added or any(now.get(key) is not value for key, value in before.items())


class Checked(ast.NodeTransformer):
    """Has test code look at what it compares: `a == b` becomes `@honest(a) == @honest(b)`, and so do the arguments of assertEqual."""

    def visit_Compare(self, node):
        self.generic_visit(node)
        node.left, node.comparators = self.checked(node.left), [self.checked(other) for other in node.comparators]
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert"):
            node.args = [arg if isinstance(arg, ast.Starred) else self.checked(arg) for arg in node.args]
        return node

    @staticmethod
    def checked(node):
        call = ast.Call(ast.Name("@honest", ast.Load()), [node], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def honesty(write):
    """What `@honest` is: it gives its argument back, unless that is an object of the repository's that equals anything whatever."""
    folder, plain = os.getcwd(), type(lambda: 0)

    def honest(value, depth=3):
        if type(value) in (list, tuple) and depth:
            for part in value[:1000]:
                honest(part, depth - 1)
        equal = type(value).__eq__
        if type(equal) is plain and equal.__code__.co_filename.startswith(folder) and equal(value, object()) is True:
            write(None, "equality")
            raise AssertionError("this equals anything")
        return value

    return honest


def check(honest) -> None:
    """Have pytest rewrite test files by `Checked` before it rewrites their assertions."""
    import builtins

    from _pytest.assertion import rewrite

    original = rewrite.rewrite_asserts

    def rewrite_asserts(mod, *arguments, **named) -> None:
        Checked().visit(mod)
        original(mod, *arguments, **named)

    rewrite.rewrite_asserts = rewrite_asserts
    setattr(builtins, "@honest", honest)


class Reporter:
    """A plugin of pytest. A test passes where its set-up, its call and its tear-down do, and it was not expected to fail."""

    def __init__(self, write) -> None:
        self.write = write
        self.seen: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report) -> None:
        outcome = "unexpected" if hasattr(report, "wasxfail") else report.outcome
        self.seen.setdefault(report.nodeid, set()).add(outcome)
        if report.when == "teardown":
            self.write(report.nodeid, "passed" if self.seen[report.nodeid] == {"passed"} else "failed")


def main() -> None:
    """Run the tests of one file."""
    path, options, token = eval(sys.stdin.read())  # noqa: S307
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)  # what was read there could be read again

    put = os.write  # as it is before anybody can replace it

    def write(name: str | None, outcome: str) -> None:
        put(REPORT, f"{token}{(name, outcome)!a}\n".encode())

    try:
        import pytest
    except ImportError:
        write(None, "no pytest in the box: Bubblewrap(packages=('pytest',))")
        return
    check(honesty(write))
    before, reporter = framework(), Reporter(write)
    pytest.main([*options, path], plugins=[reporter])
    if patched(before) or vars(reporter).get("write") is not write:
        write(None, "runner")


if __name__ == "__main__":
    main()
