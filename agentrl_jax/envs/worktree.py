"""What runs inside the box for the tools of a repository: `python3 -c <the text of this file>`, one command a process.

stdin is one Python literal: (command, arguments...). stdout is the state of the work tree, NUL, and the answer. Imports are few, because
a process is started for every call.
"""

import os
import stat
import sys

UNSEEN = (".git", "__pycache__", ".pytest_cache")  # what commands leave behind without changing the work


def state() -> str:
    """Hash of the files of the work tree, their kinds and contents. Links are not followed."""
    from _blake2 import blake2b  # `hashlib` would load OpenSSL

    digest = blake2b(digest_size=8)
    for folder, folders, files in os.walk("."):
        folders[:] = sorted(name for name in folders if name not in UNSEEN)
        for name in sorted([*files, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]):
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
                digest.update(b"%b\0%o\0" % (os.fsencode(path), mode))
                if stat.S_ISLNK(mode):
                    digest.update(os.fsencode(os.readlink(path)))
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        while block := file.read(1 << 20):
                            digest.update(block)
            except OSError:  # no right to read it
                digest.update(b"?")
    return digest.hexdigest()


def edit(path: str, old: str, new: str) -> str:
    """Replace the one `old` in a file by `new`."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        text = file.read()
    count = text.count(old) if old else 0
    if count != 1:
        return f"error: old found {count} times in {path}" if count else f"error: old not found in {path}"
    if old == new:
        return "error: old and new are the same"
    return write(path, text.replace(old, new))


def write(path: str, text: str) -> str:
    """Write a file, with the folders that it lies in."""
    data = text.encode("utf-8", "surrogateescape")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return "ok"


def main() -> None:
    """One command."""
    command, *arguments = eval(sys.stdin.read())  # noqa: S307
    try:
        answer = {"state": str, "edit": edit, "write": write}[command](*arguments)
    except OSError as error:
        answer = f"error: {error.strerror}: {arguments[0]}"
    except ValueError as error:
        answer = f"error: {error}"
    sys.stdout.buffer.write(f"{state()}\0{answer}".encode(errors="replace"))


if __name__ == "__main__":
    main()
