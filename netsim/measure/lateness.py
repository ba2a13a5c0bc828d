"""How late packets were written, measured by the backend itself: decides whether a run counts."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from hypergpu.units import Microseconds

ALLOWED_US = 1000
ALLOWED_SHARE = 0.02
LATE_SHARE = 0.01
BUCKETS = 512  # 64 doublings of microseconds
STEPS = 8  # buckets for each doubling, so a percentile is at most an eighth too high


def allowed_us(delay_us: int) -> int:
    """Return how late a packet may be on a path with this delay: 1 ms, or 2 % if that is more."""
    return max(ALLOWED_US, round(ALLOWED_SHARE * delay_us))


def bucket(late_us: int) -> int:
    """Return the bucket of a lateness: exact below 8, eighths of a doubling above."""
    if late_us < STEPS:
        return late_us
    exponent = late_us.bit_length() - 4
    return exponent * STEPS + (late_us >> exponent)


def bucket_end_us(index: int) -> int:
    """Return the greatest lateness that falls into a bucket."""
    if index < STEPS:
        return index
    exponent = index // STEPS - 1
    return ((index - exponent * STEPS + 1) << exponent) - 1


class LatenessVerdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """Whether a backend kept its times, so that measurements over it count."""

    is_valid: bool
    sentence: str


ALWAYS_VALID = LatenessVerdict(is_valid=True, sentence="VALID: this backend cannot be late")


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """Write time minus due time, over the packets that were written."""

    packets: int = 0
    late_packets: int = 0
    """Later than their path allows."""
    total_us: int = 0
    buckets: Mapping[int, int] = {}

    @property
    def is_valid(self) -> bool:
        """Whether the 99th percentile lies within what the paths allow."""
        return self.late_packets <= LATE_SHARE * self.packets

    @property
    def mean_us(self) -> Microseconds:
        """Over all packets; 0 when there are none."""
        return Microseconds(self.total_us // max(self.packets, 1))

    def percentile_us(self, share: float) -> Microseconds:
        """Return the end of the bucket in which a share in (0, 1] of the packets is reached."""
        reached_packets = 0
        for index in sorted(self.buckets):
            reached_packets += self.buckets[index]
            if reached_packets >= share * self.packets:
                return Microseconds(bucket_end_us(index))
        return Microseconds(0)

    def verdict(self) -> LatenessVerdict:
        """Judge the run: whether it counts, and why."""
        figures = (
            f"router late by {self.mean_us / 1000:.2f} ms on average, "
            f"p99 {self.percentile_us(0.99) / 1000:.2f} ms, over {self.packets:,} packets"
        )
        if self.is_valid:
            return LatenessVerdict(is_valid=True, sentence=f"VALID: {figures}")
        share = self.late_packets / self.packets
        return LatenessVerdict(
            is_valid=False,
            sentence=f"INVALID: {figures}; {share:.1%} of them by more than max(1 ms, 2 % of the"
            " delay). Fix: fewer or slower links, or a machine with less to do",
        )

    def since(self, earlier: "Lateness") -> "Lateness":
        """Return what was added after ``earlier``, which was taken from the same router."""
        added_counts = Counter(self.buckets)
        added_counts.subtract(earlier.buckets)
        return Lateness(
            packets=self.packets - earlier.packets,
            late_packets=self.late_packets - earlier.late_packets,
            total_us=self.total_us - earlier.total_us,
            buckets={index: count for index, count in added_counts.items() if count},
        )


def judge(lateness: Lateness | None) -> LatenessVerdict:
    """Judge a backend by its lateness; None: it cannot be late."""
    return ALWAYS_VALID if lateness is None else lateness.verdict()


class LatenessCounter:
    """Counts while packets are written; cheap, and of bounded size."""

    def __init__(self) -> None:
        self._packets = 0
        self._late_packets = 0
        self._total_us = 0
        self._buckets = [0] * BUCKETS

    def add(self, late_us: int, limit_us: int) -> None:
        """Count one packet that was written ``late_us`` after it was due."""
        self._packets += 1
        self._total_us += late_us
        if late_us > limit_us:
            self._late_packets += 1
        self._buckets[late_us if late_us < STEPS else bucket(late_us)] += 1

    def reading(self) -> Lateness:
        """Return what was counted so far."""
        return Lateness(
            packets=self._packets,
            late_packets=self._late_packets,
            total_us=self._total_us,
            buckets={index: count for index, count in enumerate(self._buckets) if count},
        )
