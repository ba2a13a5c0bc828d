"""Delays, losses and rates of a path from arrivals of numbered probes. Pure: no clock."""

import math
from collections.abc import Sequence

import msgspec

NS_PER_S = 10**9
# IPv4 and UDP, which a bottleneck carries too.
HEADER_BYTES = 28
# A probe that took so much longer than the quickest stood in a queue.
WAITED_MS = 10.0


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

    def bits_per_s(self) -> float:
        """Return the rate at which they came, headers included; 0 for fewer than two."""
        if len(self.numbers) < 2:
            return 0.0
        taken_ns = self.received_ns[-1] - self.received_ns[0]
        return (len(self.numbers) - 1) * self._bits() * NS_PER_S / max(taken_ns, 1)

    def saturated_bits_per_s(self) -> float:
        """Return the rate while probes waited at the bottleneck, headers included; 0 if none did.

        A sender that had to wait for a core leaves the bottleneck idle, which is not its rate.
        """
        delays_ms = self.delays_ms()
        waited_ms = min(delays_ms, default=0.0) + WAITED_MS
        taken_ns = packets = 0
        for place in range(1, len(delays_ms)):
            if delays_ms[place] > waited_ms:
                packets += 1
                taken_ns += self.received_ns[place] - self.received_ns[place - 1]
        return packets * self._bits() * NS_PER_S / taken_ns if taken_ns > 0 else 0.0

    def bits_per_s_between(self, start_ns: int, end_ns: int) -> float:
        """Return the rate in a stretch of a flood, headers included.

        A full bottleneck sends each packet from the arrival before it to its own; what of that lies
        in the stretch counts, so that one packet more or less is no error of a slow second.
        """
        within = 0.0
        for begun_ns, ended_ns in zip(self.received_ns, self.received_ns[1:], strict=False):
            inside_ns = min(ended_ns, end_ns) - max(begun_ns, start_ns)
            if ended_ns > begun_ns:
                within += max(inside_ns, 0) / (ended_ns - begun_ns)
            else:
                within += start_ns <= ended_ns < end_ns
        return within * self._bits() * NS_PER_S / (end_ns - start_ns)

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
