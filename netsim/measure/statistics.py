"""What the arrivals of numbered probes say about a path. Pure: no socket and no clock."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

NS_PER_S = 10**9
# IPv4 and UDP, which a bottleneck carries too.
HEADER_BYTES = 28


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Probes of one size that came out of a path, in order of arrival, times by one clock."""

    offered: int
    """Probes sent, numbered from 0."""
    payload_bytes: int
    numbers: Sequence[int]
    sent_ns: Sequence[int]
    received_ns: Sequence[int]

    def delays_ms(self) -> list[float]:
        """Return the one-way delay of each arrival."""
        pairs = zip(self.sent_ns, self.received_ns, strict=True)
        return [(received - sent) / 1e6 for sent, received in pairs]

    def loss(self) -> float:
        """Return the share of probes that never came."""
        return 1 - len(set(self.numbers)) / self.offered

    def burst_packets(self) -> float:
        """Return the mean number of neighbours that were lost together; 0 when none was lost."""
        return mean_run(set(self.numbers), self.offered)

    def duplication(self) -> float:
        """Return the share of those that came which came twice."""
        counts = Counter(self.numbers)
        return sum(count - 1 for count in counts.values()) / max(len(counts), 1)

    def reordering(self) -> float:
        """Return the share of arrivals after which one came that was sent before them."""
        pairs = zip(self.numbers, self.numbers[1:], strict=False)
        overtaking = sum(number > following for number, following in pairs)
        return overtaking / max(len(self.numbers), 1)

    def bits_per_s(self) -> float:
        """Return the rate at which they came, headers included; 0 for fewer than two."""
        if len(self.numbers) < 2:
            return 0.0
        taken_ns = self.received_ns[-1] - self.received_ns[0]
        return (len(self.numbers) - 1) * self._bits() * NS_PER_S / max(taken_ns, 1)

    def bits_per_s_between(self, start_ns: int, end_ns: int) -> float:
        """Return the rate of the arrivals in a stretch of time, headers included."""
        count = sum(start_ns <= at < end_ns for at in self.received_ns)
        return count * self._bits() * NS_PER_S / (end_ns - start_ns)

    def _bits(self) -> int:
        return (self.payload_bytes + HEADER_BYTES) * 8


def mean_run(present: set[int], count: int) -> float:
    """Return the mean length of the runs of numbers below ``count`` that are not present."""
    runs = missing = 0
    was_present = True
    for number in range(count):
        is_present = number in present
        missing += not is_present
        runs += was_present and not is_present
        was_present = is_present
    return missing / runs if runs else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that a share in (0, 1] of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def memory(values: Sequence[float], lag: int) -> float:
    """Return the correlation of a series with itself ``lag`` places on; 0 if nothing varies."""
    first, second = values[:-lag], values[lag:]
    if len(first) < 2 or not statistics.pstdev(first) or not statistics.pstdev(second):
        return 0.0
    return statistics.correlation(first, second)
