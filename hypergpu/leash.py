"""`python -m hypergpu.leash COMMAND` becomes the command, which dies with its starter.

For processes that must not outlive a runner which is killed: the kernel sends them SIGKILL.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
PARENT_VARIABLE = "HYPERGPU_LEASH"
"""The process id of whoever holds the leash."""


def leash_command(command: list[str]) -> list[str]:
    """What to start instead of ``command``, from the main thread of this process."""
    holder = f"{PARENT_VARIABLE}={os.getpid()}"
    return ["env", holder, sys.executable, "-P", "-m", "hypergpu.leash", *command]


def main() -> None:
    """Become the command, or end at once when the parent is gone already."""
    holder = os.environ.pop(PARENT_VARIABLE, "")
    # Other systems have nothing like it: there a runner that is killed leaves its programs behind.
    if sys.platform == "linux":
        _die_with_parent()
    if holder and os.getppid() != int(holder):
        sys.exit("hypergpu: whoever started this is gone")
    command = sys.argv[1:]
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command is the caller's own
    except OSError as error:
        sys.stderr.write(f"hypergpu: {command[0]} cannot be started: {error.strerror}\n")
        sys.exit(127)


def _die_with_parent() -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"hypergpu: no leash: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
