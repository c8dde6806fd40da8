"""Process 1 of a keeper's namespace: holds the files of its boxes and starts their processes.

Why it exists: a tmpfs with a size, so that a full disk is really full, can be mounted without privileges only inside a user namespace;
someone has to stay there while processes come and go. It sees nothing of the host but the sandbox's read-only root. All ends with it: the
kernel kills a process namespace with its process 1, and the mounts go with the last process.

Messages on the SOCK_SEQPACKET socket at descriptor 0 are fields that end in NUL: an id, a verb, arguments. Each but `kill` is answered
once by b"<id> <status> <error text>":
    make BOX BYTES INODES   mount the files of a box; status 0
    drop BOX                unmount them; status 0
    spawn BOX ARGUMENTS...  start a process, its descriptors 0, 1, ... being those that came along; exit status, -n for signal n
    kill                    SIGKILL the process spawned under this id, and wait for nothing
"""

import array
import contextlib
import ctypes
import os
import select
import signal
import socket
from collections import deque

MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
OWN_INODES = 3  # the root of the file system and its two folders
FOLDERS = {"workspace": 0o755, "tmp": 0o1777}

libc = ctypes.CDLL(None, use_errno=True)
running: dict[int, bytes] = {}  # process -> id


def checked(result: int) -> None:
    """Raise the error of a call of the C library."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def make(box: str, size: str, inodes: str) -> None:
    """Mount the files of a box."""
    path = f"/boxes/{box}"
    os.mkdir(path)
    options = f"size={size},nr_inodes={int(inodes) + OWN_INODES},mode=0755"
    checked(libc.mount(b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()))
    for name in FOLDERS:
        os.mkdir(f"{path}/{name}")


def drop(box: str) -> None:
    """Unmount them, even while processes use them."""
    checked(libc.umount2(f"/boxes/{box}".encode(), MNT_DETACH))
    os.rmdir(f"/boxes/{box}")


def spawn(box: str, argv: list[str], descriptors: list[int]) -> int:
    """Start a process over the files of a box."""
    for name, mode in FOLDERS.items():  # a command may have locked everybody out, which must not look like a broken sandbox
        os.chmod(f"/boxes/{box}/{name}", mode)
    moves = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(descriptors)]
    return os.posix_spawn(argv[0], argv, {}, file_actions=moves, setsigdef=[signal.SIGPIPE])


def kill(key: bytes) -> None:
    """bwrap's child goes first: bwrap then ends when the whole box is gone, as the process 1 of a namespace is the last to go."""
    for process in [process for process, owner in running.items() if owner == key]:
        with open(f"/proc/{process}/task/{process}/children") as file:
            children = [int(child) for child in file.read().split()]
        for target in children or [process]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next message and its descriptors. Not by `socket.recv_fds`: it ignores its flags, and each box would inherit all of them."""
    message, ancillary, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(8 * 4), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
    return message, descriptors.tolist()


def handle(message: bytes, descriptors: list[int]) -> bytes | None:
    """Do what a message says; the answer, if it is known already."""
    key, verb, *arguments = os.fsdecode(message).split("\0")[:-1]
    try:
        if verb == "spawn":
            running[spawn(arguments[0], arguments[1:], descriptors)] = key.encode()
            return None
        if verb == "kill":
            return kill(key.encode())
        {"make": make, "drop": drop}[verb](*arguments)
        return f"{key} 0 ".encode()
    except OSError as error:
        return f"{key} 1 {verb} failed: {error}".encode()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def reap() -> list[bytes]:
    """Answers for the processes that have ended. Orphans of killed boxes land here too and have no id."""
    answers = []
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            break
        if key := running.pop(process, None):
            answers.append(b"%s %d " % (key, os.waitstatus_to_exitcode(status)))
    return answers


def send(control: socket.socket, answers: deque[bytes]) -> bool:
    """Send what can be sent without waiting; whether that was all. Waiting could be for a host that waits for us to read."""
    while answers:
        try:
            control.send(answers[0], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        answers.popleft()
    return True


def main() -> None:
    """Serve until the host hangs up."""
    control = socket.socket(fileno=os.dup(0))
    answers = deque([b"ready"])
    ended, ended_write = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(ended_write, False)
    signal.set_wakeup_fd(ended_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    events = select.poll()
    events.register(ended, select.POLLIN)
    while True:
        events.register(control, select.POLLIN if send(control, answers) else select.POLLIN | select.POLLOUT)
        for descriptor, event in events.poll():
            if descriptor == ended:
                os.read(ended, 4096)
                answers.extend(reap())
            elif event != select.POLLOUT:
                message, descriptors = receive(control)
                if not message:
                    os._exit(0)
                if answer := handle(message, descriptors):
                    answers.append(answer)


if __name__ == "__main__":
    main()
