"""Digests of hidden states by position: what two stages say of the same rows can be compared, and
whoever compares reads no state.

Each row has a digest of its own, so that a draft that is rolled back costs its rows alone; rows of
a conversation have the digest of theirs one after another.
"""

from blake3 import blake3

ROW_DIGEST_BYTES = 32


def row_digests(content: bytes | bytearray, row_bytes: int) -> bytes:
    """The digests of rows, one after another.

    Args:
        content: Coded rows.
        row_bytes: Size of one.
    """
    view = memoryview(content)
    rows = (view[first : first + row_bytes] for first in range(0, len(view), row_bytes))
    return b"".join(blake3(row).digest() for row in rows)


def digest_of_rows(digests: bytes | bytearray, count: int) -> bytes:
    """The digest of the first rows; empty: there are not so many.

    Args:
        digests: As of `row_digests`, from the first position on.
        count: How many rows.
    """
    end = count * ROW_DIGEST_BYTES
    if not 0 < end <= len(digests):
        return b""
    return blake3(memoryview(digests)[:end]).digest()


def place_rows(rows: bytearray, start: int, content: bytes, row_bytes: int) -> None:
    """Put rows at a position over what lies there and behind.

    Rows that leave a gap are dropped: only what is whole from the first position on is of use.

    Args:
        rows: Rows from the first position on; changed.
        start: Position of the first new one.
        content: The new rows.
        row_bytes: Size of one.
    """
    place = start * row_bytes
    if place <= len(rows):
        rows[place:] = content
