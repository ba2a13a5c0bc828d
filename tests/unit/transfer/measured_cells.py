"""Transfers that were measured, for the transfer model to be judged by.

gRPC over real kernel TCP (Linux 6.18) through a user-space packet emulator with 1500-byte packets,
20 November 2026; one to four runs a cell on a shared machine, so that cells with losses are medians
of few draws of a heavy-tailed quantity. Loss was applied to data and acknowledgements alike. Times
are those of a pull: they begin with a request, half a round trip earlier than the first byte.
"""

from typing import NamedTuple

from coordinator.core.transfer.path import CongestionControl, NetworkPath
from hypergpu.units import Bytes, Microseconds

MIB = 1024 * 1024
CUBIC, RENO, BBR = CongestionControl.CUBIC, CongestionControl.RENO, CongestionControl.BBR


class Pull(NamedTuple):
    """Bytes of payload and the seconds that they took."""

    path: NetworkPath
    size_bytes: Bytes
    seconds: float

    @property
    def name(self) -> str:
        return _cell_name(self.path, f"{self.size_bytes // MIB}MiB")


class Throughput(NamedTuple):
    """Payload that arrived within so many seconds of a transfer without end."""

    path: NetworkPath
    seconds: float
    mbit_per_s: float

    @property
    def name(self) -> str:
        return _cell_name(self.path, f"{self.seconds:.0f}s")


def _cell_name(path: NetworkPath, what: str) -> str:
    rate = f"{path.bits_per_s / 1e6:g}Mbit" if path.bits_per_s else "uncapped"
    loss = f"{path.loss:.1%}-in-bursts-of-{path.burst_packets:g}"
    return f"{path.congestion_control.value}-{path.rtt_us / 1000:g}ms-{rate}-{loss}-{what}"


def path(
    control: CongestionControl, rtt_ms: float, *, loss: float = 0.0, burst: float = 1, mbit: int = 0
) -> NetworkPath:
    """A path in the units of the tables."""
    return NetworkPath(
        rtt_us=Microseconds(round(rtt_ms * 1000)),
        bits_per_s=mbit * 1_000_000,
        loss=loss,
        burst_packets=burst,
        congestion_control=control,
    )


def _pull(path_: NetworkPath, mib: int, seconds: float) -> Pull:
    return Pull(path_, Bytes(mib * MIB), seconds)


# Where a quantity was measured more than once its median or middle stands here.
PULLS = (
    _pull(path(CUBIC, 100), 4, 1.02),
    _pull(path(RENO, 100), 4, 1.21),
    _pull(path(BBR, 100), 4, 0.94),
    _pull(path(CUBIC, 100), 100, 4.24),
    _pull(path(RENO, 100), 100, 3.78),
    _pull(path(BBR, 100), 100, 4.22),
    _pull(path(CUBIC, 100, loss=0.01), 4, 21.5),
    _pull(path(RENO, 100, loss=0.01), 4, 21.5),
    _pull(path(BBR, 100, loss=0.01), 4, 1.39),  # 1.47 and 1.30
    _pull(path(BBR, 100, loss=0.01), 100, 8.3),
    _pull(path(CUBIC, 100, loss=0.001), 4, 1.54),  # 1.0 to 2.75
    _pull(path(CUBIC, 100, loss=0.01, burst=4), 4, 3.1),
    _pull(path(CUBIC, 100, loss=0.01, burst=16), 4, 1.01),
    _pull(path(BBR, 100, loss=0.01, burst=16), 4, 0.96),
    _pull(path(CUBIC, 0.3, mbit=20), 4, 1.74),
    _pull(path(BBR, 0.3, mbit=20), 4, 1.75),
    _pull(path(CUBIC, 0.3, mbit=20), 100, 43.5),
    _pull(path(BBR, 0.3, mbit=20), 100, 43.8),
    _pull(path(CUBIC, 100, mbit=20), 4, 2.16),
    _pull(path(BBR, 100, mbit=20), 4, 2.17),
    _pull(path(CUBIC, 100, mbit=20), 100, 43.9),
    _pull(path(BBR, 100, mbit=20), 100, 46.1),
)

# One run each in windows of 8 to 10 s; two of 50 s; two of 30 s with netem under a virtual clock.
THROUGHPUTS = (
    Throughput(path(RENO, 100, loss=0.001), 9, 8.2),
    Throughput(path(CUBIC, 100, loss=0.001), 9, 13.8),
    Throughput(path(BBR, 100, loss=0.001), 9, 147),
    Throughput(path(RENO, 100, loss=0.01), 9, 2.3),
    Throughput(path(CUBIC, 100, loss=0.01), 9, 4.0),
    Throughput(path(BBR, 100, loss=0.01), 9, 67),
    Throughput(path(RENO, 100, loss=0.02), 9, 0.63),
    Throughput(path(CUBIC, 100, loss=0.02), 9, 1.7),
    Throughput(path(BBR, 100, loss=0.02), 9, 95),
    Throughput(path(RENO, 100, loss=0.05), 9, 0.63),
    Throughput(path(CUBIC, 100, loss=0.05), 9, 0.21),
    Throughput(path(BBR, 100, loss=0.05), 9, 74),
    Throughput(path(CUBIC, 100, loss=0.01), 50, 1.3),
    Throughput(path(RENO, 100, loss=0.01), 50, 1.5),
    Throughput(path(CUBIC, 100, loss=0.01, mbit=20), 30, 1.73),
    Throughput(path(BBR, 100, loss=0.01, mbit=20), 30, 18.2),
)
