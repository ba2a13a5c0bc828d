"""Programs that the command line starts: in sessions of their own, signalled on purpose only.

A terminal's Ctrl-C reaches every process of its group at once; a child in its own session gets
exactly the signals passed on here, so that the first one drains and the second one stops.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from hypergpu.privacy import public_environment, rotate_log

_LOOK_UP_S = 0.2
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(
    command: Sequence[str],
    *,
    secret: str | None = None,
    log: Path | None = None,
    is_read: bool = False,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a program in a session of its own.

    Args:
        command: As `hypergpu.command_line.program` gives it.
        secret: Written to its stdin, which then ends. Never seen in a list of processes.
        log: Gets its stderr, and its stdout unless that is read.
        is_read: Whether the caller reads its stdout.
        environment: Added to those of our variables that hold no secret.
    """
    sink: IO[bytes] | None = log.open("ab") if log is not None else None
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if secret is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_read else sink,
            stderr=sink,
            text=True,
            start_new_session=True,
            env={**public_environment(), **(environment or {})},
        )
    finally:
        if sink is not None:
            sink.close()
    if secret is not None and child.stdin is not None:
        # A broken pipe: it has ended already, and its exit status says why.
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(secret + "\n")
            child.stdin.close()
    return child


def signal_passed_on(child: subprocess.Popen[str]) -> None:
    """From now on our signals are the child's: SIGINT and SIGHUP arrive there as SIGTERM."""

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)

    for number in PASSED_ON:
        signal.signal(number, pass_on)


def repeat(
    child: subprocess.Popen[str], say: Callable[[str], None], logs: Sequence[Path] = ()
) -> None:
    """Say what a child prints until it ends, let signals through meanwhile, and keep logs short.

    A signal that arrives just before a blocking read is handled only after it, which may be never.
    So the reading is left to a thread, and this one looks up several times a second.
    """

    def read() -> None:
        for line in child.stdout or ():
            say(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while reader.is_alive():
        reader.join(_LOOK_UP_S)
        for log in logs:
            with contextlib.suppress(OSError):
                rotate_log(log)


def exit_status(child: subprocess.Popen[str]) -> int:
    """Wait for a child; a death by signal reads as shells show it."""
    status = child.wait()
    return 128 - status if status < 0 else status


def kill_group(child: subprocess.Popen[str]) -> None:
    """End a child and everything it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
