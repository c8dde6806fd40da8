"""What runs the tests of one file inside the box: `python3 -c <the text of this file>`, a child of `referee`.

stdin is one Python literal: (test file, options of pytest, descriptor of the report, token). A line of the report is the token and the
literal (test id, outcome), or (None, what is wrong). The code under test shares this process, see `swe` for what that leaves it.
"""
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false

import os
import sys

WATCHED = ("_pytest", "pluggy", "unittest", "builtins")
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
    path, options, descriptor, token = eval(sys.stdin.read())  # noqa: S307

    def write(name: str | None, outcome: str) -> None:
        os.write(descriptor, f"{token}{(name, outcome)!a}\n".encode())

    try:
        import pytest
    except ImportError:
        write(None, "no pytest in the box: Bubblewrap(packages=('pytest',))")
        return
    before = framework()
    pytest.main([*options, path], plugins=[Reporter(write)])
    if patched(before):
        write(None, "runner")


if __name__ == "__main__":
    main()
