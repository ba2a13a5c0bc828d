"""Streams of sample positions: what is taken from them, what goes back, and how much it is.

A partition is an endless stream of positions, of which none is dropped.
"""

from msgspec.structs import replace

from coordinator.core.training.job.state import Stream
from hypergpu.assignment import SampleRange
from hypergpu.units import Samples


def take_samples(stream: Stream, count: int) -> tuple[tuple[SampleRange, ...], Stream]:
    """Take the next ``count`` positions: returned ones first, then new ones.

    Returns:
        The ranges, in the order in which they are to be trained on, and the stream without them.
    """
    ranges: list[SampleRange] = []
    returned_ranges = list(stream.returned)
    wanted_count = count
    while wanted_count and returned_ranges:
        head = returned_ranges.pop(0)
        used_count = min(wanted_count, head.count)
        ranges.append(SampleRange(head.start, Samples(used_count)))
        if used_count < head.count:
            returned_ranges.insert(
                0, SampleRange(head.start + used_count, Samples(head.count - used_count))
            )
        wanted_count -= used_count
    if wanted_count:
        ranges.append(SampleRange(stream.cursor, Samples(wanted_count)))
    return tuple(ranges), replace(
        stream, cursor=stream.cursor + wanted_count, returned=tuple(returned_ranges)
    )


def return_samples(streams: list[Stream], partition: int, ranges: tuple[SampleRange, ...]) -> None:
    """Return positions that no accepted update covers. They go out first, in ascending order."""
    stream = streams[partition]
    returned_ranges = sorted((*stream.returned, *ranges), key=lambda range_: range_.start)
    streams[partition] = replace(stream, returned=tuple(returned_ranges))


def shard_samples(ranges: tuple[SampleRange, ...]) -> Samples:
    """How many samples a shard holds."""
    return Samples(sum(range_.count for range_ in ranges))
