"""Network namespaces by name: made, entered, set up and removed with whatever runs in them."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from netsim.error import NetsimError

FOLDER = Path("/run/netns")
CLONE_NEWNET = 0x40000000
KILLS = 200
KILL_WAIT_S = 0.01
_libc = ctypes.CDLL(None, use_errno=True)


def require_free(names: Sequence[str]) -> None:
    """Refuse names that exist; a run's own leftovers are gone by then."""
    for name in names:
        if (FOLDER / name).exists():
            raise NetsimError(
                f"a network namespace {name!r} exists and was not made by netsim",
                f"remove it: ip netns delete {name}",
            )


def create(names: Sequence[str]) -> None:
    """Make empty namespaces."""
    ip_batch([f"netns add {name}" for name in names])


def destroy(names: Sequence[str]) -> list[str]:
    """Kill what runs in the namespaces and remove them; those that are gone already are no error.

    Returns:
        The namespaces that were there.
    """
    present = [name for name in names if (FOLDER / name).exists()]
    # While they are open, their numbers cannot come to belong to somebody else's.
    held = [os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC) for name in present]
    try:
        numbers = {os.fstat(descriptor).st_ino for descriptor in held}
        _empty(numbers)
        for name in present:
            # Not in one batch: the router and its owner may both be at it.
            if (FOLDER / name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        # A command that was on its way in when we looked is in by now.
        _empty(numbers)
    finally:
        for descriptor in held:
            os.close(descriptor)
    return present


def _empty(numbers: set[int]) -> None:
    """Kill all processes of these namespaces, also those that they start meanwhile."""
    for _ in range(KILLS):
        inside = _processes(numbers)
        if not inside:
            return
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_WAIT_S)


def _processes(numbers: set[int]) -> list[int]:
    """Return the processes whose network namespace is one of these, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "ns/net").stat().st_ino in numbers:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@contextmanager
def entered(name: str) -> Iterator[None]:
    """Work inside a namespace for a while. This moves the calling thread only."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    away = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(away)
        try:
            yield
        finally:
            _set_namespace(home)
    finally:
        os.close(home)
        os.close(away)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def ip_batch(lines: Sequence[str]) -> None:
    """Run lines of ``ip`` in one process, in the caller's namespace.

    Raises:
        NetsimError: One of them failed; those before it stay done.
    """
    outcome = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(lines).encode() + b"\n",
        capture_output=True,
        check=False,
    )
    if outcome.returncode:
        said = outcome.stderr.decode(errors="replace").strip().replace("\n", "; ")
        raise NetsimError(
            f"ip refused {lines[0]!r} or a line after it: {said}",
            "run as root on a kernel with network namespaces, or use the proxy",
        )
