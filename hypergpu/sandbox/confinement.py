"""Confines this process by itself, for good: landlock closes the file system but for named paths,
a seccomp filter denies sockets. For machines where no other program may set up a sandbox.

The structures are those of linux/landlock.h, linux/seccomp.h and linux/filter.h.
"""

import ctypes
import json
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

VARIABLE = "HYPERGPU_WORKER_CONFINEMENT"
"""Environment variable with a `Confinement` as JSON; without it a process confines nothing."""

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_IOCTL_DEVICE = 1 << 15
"""Stays allowed: GPU drivers are spoken to by it, and devices are closed by their paths."""
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
"""Rights over files that each version of landlock knows; no later one knows more but ioctl."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14
_READABLE = _EXECUTE | _READ_FILE | _READ_FOLDER
_DEVICE = _READ_FILE | _READ_FOLDER | _WRITE_FILE | 1 << 14
_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_TCP_VERSION, _SCOPE_VERSION = 4, 6

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_BENEATH_PATH = 1
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | 1  # EPERM
_LOAD, _IS_EQUAL, _IS_ABOVE, _RETURN = 0x20, 0x15, 0x25, 0x06

# socket, ptrace, process_vm_readv, process_vm_writev, add_key, request_key, keyctl, and
# io_uring_setup, which opens sockets too. A socketpair reaches nobody else and stays allowed.
_DENIED = {
    "x86_64": (0xC000003E, (41, 101, 310, 311, 248, 249, 250, 425)),
    "aarch64": (0xC00000B7, (198, 117, 270, 271, 217, 218, 219, 425)),
}
_OTHER_ABI = 0x3FFFFFFF
"""Above it lie the calls of x32, a second table of the same machine."""


class Confinement(msgspec.Struct, frozen=True):
    """Paths that stay open to a process, with all that lies beneath them."""

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    devices: tuple[str, ...] = ()
    """Read and written, and nothing is made beneath them."""


class ConfinementError(OSError):
    """The kernel does not confine this process. The text says which call failed."""


class _Instruction(NamedTuple):
    code: int
    if_true: int
    if_false: int
    operand: int


def confine_if_told() -> None:
    """Confine this process as its environment says.

    Raises:
        ConfinementError: The kernel does not do it. A worker must not go on.
    """
    if text := os.environ.pop(VARIABLE, ""):
        confine(msgspec.json.decode(text, type=Confinement))


def confinement_text(
    readable: Iterable[Path], writable: Iterable[Path], devices: Iterable[Path]
) -> str:
    """The value of the variable."""
    paths = {"readable": readable, "writable": writable, "devices": devices}
    return json.dumps({name: [str(each) for each in some] for name, some in paths.items()})


def confine(confinement: Confinement) -> None:
    """Confine this thread and all that it starts, for good.

    Paths that are not there are left out.

    Raises:
        ConfinementError: The kernel does not do it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise _failure("prctl(PR_SET_NO_NEW_PRIVS)")
    _close_files(libc, confinement)
    _deny_sockets(libc)


def _close_files(libc: ctypes.CDLL, confinement: Confinement) -> None:
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise _failure("landlock")
    handled_rights = _RIGHTS[min(version, max(_RIGHTS))]
    attributes = struct.pack(
        "=QQQ",
        handled_rights,
        _TCP if version >= _TCP_VERSION else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPE_VERSION else 0,
    )
    # An older kernel knows a shorter structure, and takes no more of it.
    known_bytes = 24 if version >= _SCOPE_VERSION else 16 if version >= _TCP_VERSION else 8
    ruleset = libc.syscall(_CREATE_RULESET, attributes[:known_bytes], known_bytes, 0)
    if ruleset < 0:
        raise _failure("landlock_create_ruleset")
    for path in confinement.readable:
        _open_path(libc, ruleset, path, handled_rights & _READABLE)
    for path in confinement.devices:
        _open_path(libc, ruleset, path, handled_rights & _DEVICE)
    for path in confinement.writable:
        _open_path(libc, ruleset, path, handled_rights)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise _failure("landlock_restrict_self")
    os.close(ruleset)


def _open_path(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not Path(path).is_dir():
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, _BENEATH_PATH, rule, 0):
            raise _failure(f"landlock_add_rule for {path}")
    finally:
        os.close(descriptor)


def _deny_sockets(libc: ctypes.CDLL) -> None:
    machine = platform.machine()
    if machine not in _DENIED:
        raise ConfinementError(f"no filter is known for the calls of {machine}")
    filter_bytes = b"".join(struct.pack("=HBBI", *each) for each in _filter(*_DENIED[machine]))
    instructions = ctypes.create_string_buffer(filter_bytes, len(filter_bytes))
    count = len(filter_bytes) // 8
    program = struct.pack("@HP", count, ctypes.addressof(instructions))
    if libc.prctl(_SET_SECCOMP, _FILTER_MODE, program, 0, 0):
        raise _failure("prctl(PR_SET_SECCOMP)")


def _filter(architecture: int, denied: tuple[int, ...]) -> list[_Instruction]:
    """Calls of another architecture, of x32 and the denied ones fail; all others are made."""
    after = len(denied) + 1
    return [
        _Instruction(_LOAD, 0, 0, 4),
        _Instruction(_IS_EQUAL, 0, after + 2, architecture),
        _Instruction(_LOAD, 0, 0, 0),
        _Instruction(_IS_ABOVE, after, 0, _OTHER_ABI),
        *(
            _Instruction(_IS_EQUAL, len(denied) - place, 0, number)
            for place, number in enumerate(denied)
        ),
        _Instruction(_RETURN, 0, 0, _ALLOW),
        _Instruction(_RETURN, 0, 0, _DENY),
    ]


def _failure(call: str) -> ConfinementError:
    number = ctypes.get_errno()
    return ConfinementError(f"{call}: {os.strerror(number) if number else 'not known here'}")
