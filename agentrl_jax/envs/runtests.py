"""What runs inside the box for the tests of a task folder: `python3 -c <the text of this file> clear|keep`.

stdin is a tar of /tests. Then this process becomes /tests/test.sh, which writes its reward below /logs/verifier. Both are links to /tmp.
"""

import os
import shutil
import sys
import tarfile

TESTS, LOGS = "/tmp/tests", "/tmp/logs"


def clear(path: str) -> None:
    """Remove whatever is there; what the policy has locked is its own, and so can be unlocked."""
    if os.path.islink(path) or not os.path.isdir(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    os.chmod(path, 0o700)
    for folder, folders, _ in os.walk(path):
        for name in folders:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o700)
    shutil.rmtree(path)


def main() -> None:
    """Become the tests."""
    if sys.argv[1] == "clear":
        clear(TESTS)
        clear(LOGS)
    os.makedirs(f"{LOGS}/verifier", exist_ok=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extraction_filter = lambda member, _: member
        archive.extractall(TESTS)
    os.chdir("/workspace")
    os.execvp("bash", ["bash", "/tests/test.sh"])


if __name__ == "__main__":
    main()
