"""Standard output and standard error of a program, whose failures must not end in a traceback."""

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from hypergpu.errors import HyperGPUError, Reason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def prepare_streams() -> None:
    """Let a failure of standard output end in one sentence, and one of standard error in none.

    Streams that are closed are opened on the null device: otherwise the next file or socket gets
    their number, and what is printed goes there. Streams that a test replaced stay as they are.

    Raises:
        HyperGPUError: FILE_UNUSABLE, standard output is closed.
    """
    is_closed = sys.__stdout__ is None
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Guarded(2, _ignore), sys.stderr)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Guarded(1, _refuse), sys.stdout)
    if is_closed:
        raise _unusable("it is closed")


class _Guarded(io.FileIO):
    """A standard stream whose first failed write is handled and whose others vanish."""

    def __init__(self, number: int, on_failure: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._on_failure = on_failure

    def write(self, piece: "ReadableBuffer", /) -> int:
        try:
            return super().write(piece)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self.fileno() == 1:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self._on_failure(error)
            return memoryview(piece).nbytes


def _refuse(broken: OSError) -> None:
    raise _unusable(str(broken.strerror)) from broken


def _ignore(broken: OSError) -> None:
    """There is nowhere left to say it."""


def _unusable(why: str) -> HyperGPUError:
    detail = f"standard output cannot be written: {why}"
    fix = "send it to a file with space left, or to /dev/null"
    return HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)


def _text(raw: _Guarded, former: TextIO | None) -> io.TextIOWrapper:
    """Text over a stream as Python makes it: by lines on terminals and on standard error."""
    encoding, errors = (former.encoding, former.errors) if former else ("utf-8", "replace")
    is_by_line = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_by_line)
