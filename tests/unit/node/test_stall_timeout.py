from hypothesis import given
from hypothesis import strategies as st

from gpu_node.shell.link.chunks import CHUNK_BYTES
from hypergpu.units import Milliseconds
from hypergpu.wire.bulk import PIECE_BYTES, SLOWEST_BYTES_PER_S, StallTimeout, transfer_timeout_s

TIMEOUT_MS = Milliseconds(10_000)
SLOW_BYTES_PER_S = 100_000 / 8
"""A line of 100 kbit/s."""


def test_a_piece_may_take_as_long_as_a_line_of_100_kbit_s_needs_for_it() -> None:
    assert SLOW_BYTES_PER_S > SLOWEST_BYTES_PER_S
    assert StallTimeout(CHUNK_BYTES, TIMEOUT_MS).limit_s() > CHUNK_BYTES / SLOW_BYTES_PER_S
    for connections in (1, 4, 16):
        shared = StallTimeout(PIECE_BYTES, TIMEOUT_MS, connections=connections)
        assert shared.limit_s() > PIECE_BYTES * connections / SLOW_BYTES_PER_S


def test_who_brought_pieces_quickly_is_missed_soon() -> None:
    stall = StallTimeout(CHUNK_BYTES, TIMEOUT_MS)
    stall.note_piece(0.05)
    stall.note_piece(0.01)
    assert stall.limit_s() == 10.2


def test_a_small_rest_is_waited_for_no_longer_than_it_can_take() -> None:
    stall = StallTimeout(CHUNK_BYTES, TIMEOUT_MS)
    assert stall.limit_s(0) == 10
    assert stall.limit_s(SLOWEST_BYTES_PER_S) == 11
    assert stall.limit_s(1 << 30) == stall.limit_s()


@given(st.lists(st.floats(0, 1e6)), st.integers(1, 1 << 20), st.integers(1, 16))
def test_no_piece_is_waited_for_less_than_a_call_or_longer_than_over_the_slowest_line(
    took_s: list[float], piece_bytes: int, connections: int
) -> None:
    stall = StallTimeout(piece_bytes, TIMEOUT_MS, connections=connections)
    for each in took_s:
        stall.note_piece(each)
    most_s = transfer_timeout_s(piece_bytes, TIMEOUT_MS, connections=connections)
    assert 10 <= stall.limit_s() <= most_s
