"""What runs the tests of one file inside the box: `python3 -c <the text of this file>`, a child of `referee`.

stdin is one Python literal: (test file, options of pytest, descriptor of the report, token). A line of the report is the token and the
literal (test id, outcome). The code under test shares this process, see `swe` for what that leaves it.
"""
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false

import os
import sys

WATCHED = ("_pytest", "pluggy", "unittest", "builtins")


def functions() -> dict[tuple[str, str, str], object]:
    """The functions of the test framework as they are now, those of its classes included."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in WATCHED:
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[name, key, ""] = getattr(value, "__code__", value)
                if isinstance(value, type):
                    found.update({(name, key, k): getattr(v, "__code__", v) for k, v in vars(value).items() if callable(v)})
    return found


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

    def write(name: str, outcome: str) -> None:
        os.write(descriptor, f"{token}{(name, outcome)!a}\n".encode())

    import pytest

    reporter = Reporter(write)
    before = functions()
    pytest.main([*options, path], plugins=[reporter])
    now = functions()
    if any(now.get(key) is not value for key, value in before.items()):
        write(path, "patched")


if __name__ == "__main__":
    main()
