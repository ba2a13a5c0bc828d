from functools import partial

from hypergpu.units import Bytes, Milliseconds
from netsim.virtual.agenda import Agenda
from netsim.virtual.sharing import SharedLink, SharedTransfer

MEGABYTE = Bytes(1_000_000)
WIRE_BITS = 8 * 1.037 * MEGABYTE


class Line:
    """A shared link, and when its transfers ended."""

    def __init__(self, bits_per_s: int) -> None:
        self.agenda = Agenda()
        self.shared = SharedLink(self.agenda, bits_per_s)
        self.ended_ms: dict[str, int] = {}

    def begin(self, name: str, own_ms: int, size_bytes: Bytes = MEGABYTE) -> SharedTransfer:
        move = SharedTransfer(lambda: self.ended_ms.update({name: self.agenda.now_ms}))
        self.shared.begin(move, size_bytes, Milliseconds(own_ms))
        return move

    def run(self) -> dict[str, int]:
        self.agenda.run(lambda: False, Milliseconds(10**9))
        return self.ended_ms


def test_transfers_that_fit_together_keep_their_own_times() -> None:
    line = Line(bits_per_s=100_000_000)
    line.begin("one", 500)
    line.begin("other", 1000)
    assert line.run() == {"one": 500, "other": 1000}


def test_transfers_that_do_not_fit_get_equal_shares() -> None:
    line = Line(bits_per_s=10_000_000)
    line.begin("one", 100)
    line.begin("other", 100)
    both_ms = 2 * WIRE_BITS / 10_000
    assert all(abs(at_ms - both_ms) <= 2 for at_ms in line.run().values())


def test_a_slow_path_is_not_slowed_by_fast_ones() -> None:
    line = Line(bits_per_s=10_000_000)
    line.begin("slow", 8_300)
    for number in range(4):
        line.begin(f"fast {number}", 100)
    ended_ms = line.run()
    assert ended_ms["slow"] <= 8_310
    fast_ms = max(at_ms for name, at_ms in ended_ms.items() if name != "slow")
    # Four of them share the nine tenths that the slow one leaves.
    assert abs(fast_ms - 4 * WIRE_BITS / 9_000) <= 20


def test_who_is_left_speeds_up_when_another_ends() -> None:
    line = Line(bits_per_s=10_000_000)
    line.begin("small", 10, Bytes(500_000))
    line.begin("large", 10)
    ended_ms = line.run()
    assert abs(ended_ms["small"] - WIRE_BITS / 10_000) <= 2
    assert abs(ended_ms["large"] - 1.5 * WIRE_BITS / 10_000) <= 2


def test_a_dropped_transfer_leaves_its_share_to_others_and_never_ends() -> None:
    line = Line(bits_per_s=10_000_000)
    dropped = line.begin("dropped", 100)
    line.begin("other", 100)
    line.agenda.after(400, lambda: line.shared.drop(dropped))
    (ended_ms,) = line.run().values()
    assert abs(ended_ms - (400 + WIRE_BITS / 10_000 - 200)) <= 2


def test_a_link_without_limit_slows_nobody() -> None:
    line = Line(bits_per_s=0)
    for number in range(10):
        line.begin(str(number), 7)
    assert set(line.run().values()) == {7}


def test_many_transfers_keep_the_line_full() -> None:
    line = Line(bits_per_s=100_000_000)

    def begin(number: int) -> None:
        line.begin(str(number), 50 + number)

    for number in range(300):
        line.agenda.at(number, partial(begin, number))
    ended_ms = line.run()
    assert len(ended_ms) == 300
    full_ms = 300 * WIRE_BITS / 100_000
    assert full_ms <= max(ended_ms.values()) <= 1.02 * full_ms
