"""Where the passphrase of a key file comes from: a file, the terminal, or a file made for it.

It is never an argument, and no representation shows it.
"""

import getpass
import os
import secrets
import stat
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason

TERMINAL = Path("-")
"""Stands for: ask whoever sits there."""
NAME_A_FILE = (
    "write a passphrase to a file that only this user can read, and name it: --passphrase-file FILE"
)
_BYTES_MAX = 4096
_MADE_BYTES = 32


class Passphrase:
    """What a key is encrypted under."""

    __slots__ = ("is_made", "octets", "source")

    def __init__(self, octets: bytes, source: str, *, is_made: bool) -> None:
        """Take over a passphrase.

        Args:
            octets: As UTF-8.
            source: What to call it where it does not fit.
            is_made: It is 256 random bits, which nobody guesses however fast the guessing is.
        """
        self.octets = octets
        self.source = source
        self.is_made = is_made

    def __repr__(self) -> str:
        """Say where it comes from and nothing else."""
        return f"Passphrase(from {self.source})"


def passphrase_of_text(text: str, source: str) -> Passphrase:
    """A passphrase that came as text, as from the environment. Blanks at its ends do not count.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is empty or longer than 4,096 bytes.
    """
    octets = text.strip().encode()
    if not octets or len(octets) > _BYTES_MAX:
        what = f"the passphrase from {source} has {len(octets)} bytes, not 1 to {_BYTES_MAX}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix="give one line of text")
    return Passphrase(octets, source, is_made=False)


def passphrase_of_file(path: Path) -> Passphrase:
    """A passphrase that an operator keeps in a file, or types where ``path`` is `TERMINAL`.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read, others can read it, or it is no line of
            text; or there is nobody to ask.
    """
    if path == TERMINAL:
        return _ask()
    return passphrase_of_text(_read(path), str(path))


def kept_passphrase(path: Path) -> Passphrase:
    """The passphrase in a file that was made for it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read, or others can read it.
    """
    return Passphrase(_read(path).strip().encode(), str(path), is_made=True)


def made_passphrase(path: Path) -> Passphrase:
    """The passphrase in a file that was made for it, or that is made now.

    A daemon so starts without anybody's doing, while a copy of the folder with the key alone opens
    nothing.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file can be neither read nor made, or others can read it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return kept_passphrase(path)
    except OSError as broken:
        what = f"no passphrase can be kept in {path}: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix=NAME_A_FILE) from broken
    text = secrets.token_hex(_MADE_BYTES)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    return Passphrase(text.encode(), str(path), is_made=True)


def refuse_shared(path: Path, what: str) -> None:
    """Refuse a secret that others can read.

    Raises:
        HyperGPUError: FILE_UNUSABLE, they can.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        detail = f"others can read {what} {path} (mode {mode:o})"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=f"chmod 600 {path}")


def _read(path: Path) -> str:
    try:
        refuse_shared(path, "the passphrase")
        with path.open("rb") as file:
            return file.read(_BYTES_MAX + 2).decode()
    except OSError as broken:
        what = f"the passphrase {path} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from broken
    except UnicodeDecodeError as broken:
        what = f"the passphrase {path} is no text"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix="give one line of text") from broken


def _ask() -> Passphrase:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError as broken:
        what = "there is no terminal to ask for the passphrase on"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix=NAME_A_FILE) from broken
    return passphrase_of_text(getpass.getpass("Passphrase of the key: "), "the terminal")
