"""Ways between two nodes that lead past the middle of a world."""

import msgspec

from hypergpu.units import Microseconds


class PairDelay(msgspec.Struct, frozen=True):
    """The way between two nodes, where it is another than through the middle."""

    first: str
    second: str
    delay_us: Microseconds
    """One way, in place of the delays of both nodes' links; the same in both directions."""
