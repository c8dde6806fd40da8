"""What runs inside the box: `python3 -c <the text of this file>`, one command a process.

stdin is one Python literal: (command, arguments...). stdout is the report; the tools put the editable files, as they are, and a
NUL before it, so that every answer tells the state of the box as well. The host imports `outcome` from here: results are written
alike on both sides. It imports next to nothing (not even types), because a process is started for every call.
"""
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false

import os
import sys

LONGEST = 2000  # characters of one result


SCALARS = (int, str, bool, float, type(None))


def _plain(value: object) -> bool:
    if type(value) is list or type(value) is tuple:
        return all(type(part) in SCALARS or _plain(part) for part in value)
    return type(value) in SCALARS


def show(value: object) -> str:
    """A result as text. Equal texts are equal values of the same plain types: `True` is not `1`, `(1,)` not `[1]`."""
    return ascii(value)[:LONGEST] if _plain(value) else f"<{type(value).__name__[:40]}>"


def outcome(function, arguments) -> str:
    """What a call does, as text: `show` of its result, or `!` and the name of the exception."""
    try:
        value = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - exit() and the like are results too
        return "!" + type(error).__name__[:40]
    try:
        return show(value)
    except Exception:  # noqa: BLE001 - too deep, or too long an integer
        return "<unprintable>"


def split(text: str) -> list[str]:
    """The text before the first function, then each function without its `def `; `join` is the inverse."""
    return ("\n" + text).split("\ndef ")


def join(parts: list[str]) -> str:
    """The text of the parts."""
    return "\ndef ".join(parts)[1:]


def names(parts: list[str]) -> list[str]:
    """The functions of a text, in order."""
    return [part.partition("(")[0] for part in parts[1:]]


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read(texts: dict[str, str], function: str) -> str:
    """The present source of a function."""
    for text in texts.values():
        parts = split(text)
        if function in names(parts):
            return "def " + parts[1 + names(parts).index(function)].rstrip()
    return f"error: no function {function[:40]}"


def edit(texts: dict[str, str], function: str, old: str, new: str, original: str | None) -> str:
    """Replace the one `old` in a function by `new`, starting from its present text or from `original`."""
    for path, text in texts.items():
        parts = split(text)
        before = names(parts)
        if function not in before:
            continue
        index = 1 + before.index(function)
        present = "def " + parts[index]
        source = (original or present).rstrip()
        count = source.count(old) if old else 0
        if count != 1:
            return f"error: old found {count} times in {function}" if count else f"error: old not found in {function}"
        edited = source.replace(old, new)
        parts[index] = edited[4:] + present[len(present.rstrip()) :]
        if edited[:4] != "def " or names(split(join(parts))) != before:
            return "error: keep the def lines"
        if edited == source:
            return "error: old and new are the same"
        try:
            compile(join(parts), path, "exec")
        except Exception:  # noqa: BLE001 - besides SyntaxError: ValueError, RecursionError, MemoryError, UnicodeEncodeError
            return "error: not valid Python"
        with open(path, "w", encoding="utf-8") as file:
            file.write(join(parts))
        texts[path] = join(parts)
        return "ok"
    return f"error: no function {function[:40]}"


def load(texts: dict[str, str]) -> str | None:
    """Run the files as modules, first to last, past the import system: it would trust a stale .pyc of the same second."""
    for path, text in texts.items():
        name = path.removesuffix(".py")
        sys.modules[name] = module = type(sys)(name)
        try:
            exec(compile(text, path, "exec"), module.__dict__)  # noqa: S102
        except BaseException as error:  # noqa: BLE001
            return f"{path}: {type(error).__name__[:40]}"
    return None


def limit(seconds: float) -> None:
    """End this process after so many seconds of CPU, by a signal: a loop in the code under test, however slow the machine is.

    `_signal` is `signal` without its enums, whose import takes as long as the start of Python.
    """
    import _signal  # type: ignore[import-not-found]

    _signal.setitimer(_signal.ITIMER_PROF, seconds)


def test(texts: dict[str, str], path: str) -> str:
    """Run a file of visible tests: the count, or the first failure."""
    failed = load({**texts, path: _text(path)})
    cases = getattr(sys.modules.get(path.removesuffix(".py")), "CASES", None)
    if failed is not None or not cases:
        return f"FAIL {failed or 'no CASES in ' + path}"
    failures = []
    for function, arguments, want in cases:
        wanted = "!" + want.__name__ if isinstance(want, type) else show(want)
        call = f"{function.__name__}({', '.join(map(show, arguments))})"
        got = outcome(function, arguments)
        if got != wanted:
            failures.append(f"FAIL {call} {'raised ' + got[1:] if got[:1] == '!' else '= ' + got}, want {wanted.lstrip('!')}")
    if not failures:
        return f"ok: {len(cases)} passed"
    return f"{failures[0]} ({len(failures)} of {len(cases)} failed)"


def grade(out, texts, protected, cases) -> None:
    """Write a line of the protected files that differ, before anything else can; then a line of `outcome` per case, and `end`.

    protected: path -> text that it must still have
    cases:     (module, function, source text of the arguments); what is expected is not here
    """
    print(ascii([path for path, text in protected.items() if _text(path) != text]), file=out, flush=True)
    limit(0.5)
    failed = load(texts)
    for module, name, arguments in cases:
        function = getattr(sys.modules[module], name, None) if failed is None else None
        print(outcome(function, eval(arguments)), file=out)  # noqa: S307
    print("end", file=out, flush=True)


def main() -> None:
    """Files are given as path -> text; None stands for the text that the box has."""
    # What the code under test prints is dropped, so that it cannot get between the lines of the report.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    null = os.open(os.devnull, os.O_RDWR)
    command, files, *arguments = eval(sys.stdin.read())  # noqa: S307
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    texts = {path: _text(path) if text is None else text for path, text in files.items()}
    match command:
        case "grade":
            grade(out, texts, *arguments)
        case "test":
            print(*texts.values(), "", sep="\0", end="", file=out, flush=True)  # first: the tests may not come back
            limit(0.2)
            print(test(texts, *arguments), end="", file=out)
        case "read" | "edit" | "state":
            report = read(texts, *arguments) if command == "read" else edit(texts, *arguments) if command == "edit" else ""
            print(*texts.values(), report, sep="\0", end="", file=out)
    out.flush()
    os._exit(0)  # no exit handlers, no waiting for threads that the code under test left


if __name__ == "__main__":
    main()
