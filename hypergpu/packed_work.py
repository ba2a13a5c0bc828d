"""Work of a kind, and its result, as they travel between processes: bytes of a struct that only the
kind knows. Whoever passes them on knows the kind's name and the size, and reads nothing else.
"""

from typing import TypeVar

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Milliseconds

BODY_BYTES_MOST = 65_536
"""A body is journalled and kept in memory by both ends. No kind has larger inputs or results."""
KIND_LENGTH_MOST = 64
CONTENT_BYTES_MOST = 65_536
"""A result's blob of at most so many bytes travels beside the result: no ticket is asked for."""
_Content = TypeVar("_Content")


class WorkAmount(msgspec.Struct, frozen=True):
    """How much work a result is: what its node signs, and whoever passes it on may read."""

    units: int = 0
    """Whole units of the job; 0: the result is not counted, and not signed."""
    compute_ms: Milliseconds = Milliseconds(0)


_UNCOUNTED = WorkAmount()


class PackedWork(msgspec.Struct, frozen=True):
    """Work of one kind, or its result."""

    kind: str
    """Name of the kind."""
    body: bytes
    """The kind's own struct as msgpack."""
    amount: WorkAmount = _UNCOUNTED
    """Work of a result, told within one machine; it does not travel, as the struct says it too."""

    def check_size(self) -> None:
        """Refuse work that is too large, before anything of it is read.

        Raises:
            HyperGPUError: REQUEST_INVALID, with the size.
        """
        if len(self.kind) > KIND_LENGTH_MOST:
            detail = f"a kind of work has {KIND_LENGTH_MOST} characters at most"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        if len(self.body) > BODY_BYTES_MOST:
            detail = f"work of kind {self.kind!r} has {len(self.body)} bytes"
            raise HyperGPUError(
                Reason.REQUEST_INVALID,
                f"{detail}, and {BODY_BYTES_MOST} at most",
                fix="divide the work into smaller pieces",
            )


def pack_work(kind: str, content: object, amount: WorkAmount = _UNCOUNTED) -> PackedWork:
    """Pack a struct of a kind.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large.
    """
    work = PackedWork(kind, msgspec.msgpack.encode(content), amount)
    work.check_size()
    return work


def unpack_work(packed: PackedWork, kind: str, form: type[_Content]) -> _Content:
    """Read a struct of a kind.

    Args:
        packed: Whatever the other side sent.
        kind: The only kind that is expected.
        form: The struct.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large, of another kind or malformed.
    """
    packed.check_size()
    if packed.kind != kind:
        detail = f"this is work of kind {packed.kind!r}, not {kind!r}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    try:
        return msgspec.msgpack.decode(packed.body, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"work of kind {kind!r} is malformed: {error}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail) from error
