"""Which samples go to whom: a partition is an endless stream of positions, none dropped."""

from msgspec.structs import replace

from coordinator.core.job.state import Stream
from hypergpu.statements.assignment import SampleRange
from hypergpu.units import Samples


def take_samples(stream: Stream, count: int) -> tuple[tuple[SampleRange, ...], Stream]:
    """Take the next ``count`` positions: returned ones first, then new ones.

    Returns:
        The ranges, in the order in which they are to be trained on, and the stream without them.
    """
    ranges: list[SampleRange] = []
    left = list(stream.returned)
    wanted = count
    while wanted and left:
        head = left.pop(0)
        used = min(wanted, head.count)
        ranges.append(SampleRange(head.start, Samples(used)))
        if used < head.count:
            left.insert(0, SampleRange(head.start + used, Samples(head.count - used)))
        wanted -= used
    if wanted:
        ranges.append(SampleRange(stream.cursor, Samples(wanted)))
    return tuple(ranges), replace(stream, cursor=stream.cursor + wanted, returned=tuple(left))


def return_samples(stream: Stream, ranges: tuple[SampleRange, ...]) -> Stream:
    """Return positions that no accepted update covers. They go out first, in ascending order."""
    returned = sorted((*stream.returned, *ranges), key=lambda range_: range_.start)
    return replace(stream, returned=tuple(returned))
