"""What a node's line can be expected to carry: measured goodput, the transfer model, and how one
is carried over to numbers under which it was not measured.
"""

from math import inf, log
from typing import NamedTuple

import msgspec

from coordinator.core.network import tcp
from coordinator.core.network.reading import Conditions, Estimate, NodeReading, TransferDirection
from coordinator.core.network.tcp import CongestionControl, NetworkPath, steady_packets_per_us
from hypergpu.units import Bytes, Microseconds

ASSUMED_BITS_PER_S = 10_000_000.0
"""Rate of a line of which nothing is known and that no other is like: a slow uplink at home."""
ASSUMED_ROUND_TRIP_US = Microseconds(100_000)
"""Between continents rather than around the corner."""
LARGE_BYTES = Bytes(256 * 1024)
"""From here on a transfer shows its line's rate; what is smaller shows slow start."""
LONG_US = Microseconds(1_000_000)
"""So does a small one that takes this long."""
HIDDEN_SHARE = 0.25
"""Least share of a transfer's time that gives its rate: slow start explains the rest."""
COUNTED_PACKETS = 500
"""Packets that a kernel counted, from which on its losses are believed."""
LOSS_MAX = 0.5
"""The transfer model means nothing beyond."""
_PACKET_BITS = 1448 * 8
_CROWDED = 0.05
"""Losses a packet beyond which CUBIC is reckoned as Reno, which it hardly differs from there and
whose rate falls with every RTT."""
_EXTRAPOLATED = 0.25
"""Spread that a goodput gains by being carried over, for each factor of e."""


class RateSample(NamedTuple):
    """What one transfer says of its line."""

    bits_per_s: float
    weight: float
    is_least: bool
    """Whether it says only that the line is at least this fast."""


def loss_share(reading: NodeReading) -> float | None:
    """Share of packets lost: mean of the Beta posterior under Jeffreys' prior.

    It is never 0 and falls slowly: 20 packets every 10 s cannot tell 0.1 % from none. Where probes
    are blocked it is the most that goodput leaves room for, until the node's kernel has counted
    enough of what it sent. None: not known.
    """
    if is_loss_inferred(reading):
        return reading.loss_bound or None
    if reading.packets_sent <= 0:
        return None
    return min(1.0, (reading.packets_lost + 0.5) / (reading.packets_sent + 1))


def likely_loss(reading: NodeReading) -> float:
    """What forecasts reckon with: nothing unless losses were seen, in [0, 0.5]."""
    if is_loss_inferred(reading):
        return min(LOSS_MAX, reading.loss_bound)
    if reading.packets_lost < 0.5:
        return 0.0
    return min(LOSS_MAX, reading.packets_lost / reading.packets_sent)


def is_loss_inferred(reading: NodeReading) -> bool:
    """Whether losses are only guessed. Where probes are blocked, a train is what a kernel sent
    again of a transfer's packets; a few of those say less than a goodput does. A node that was
    never probed, as when the coordinator has no port for it, says no more: none lost of none sent
    is no line without losses.
    """
    is_probed = reading.packets_sent > 0 and not reading.is_probing_blocked
    return not is_probed and reading.packets_sent < COUNTED_PACKETS


def mean_burst(reading: NodeReading) -> float:
    """Packets lost in a row, at least 1, with one loss of a single packet as prior."""
    return max(1.0, (reading.packets_lost + 1) / (reading.bursts_lost + 1))


def congestion_control_of(reading: NodeReading, direction: TransferDirection) -> CongestionControl:
    """Congestion control of the sending end; an unknown one heeds losses like CUBIC, as most do."""
    is_up = direction is TransferDirection.UP
    name = reading.congestion_control if is_up else reading.coordinator_congestion_control
    if name.startswith("bbr"):
        return CongestionControl.BBR
    return CongestionControl.RENO if name == "reno" else CongestionControl.CUBIC


def round_trip_us(reading: NodeReading) -> Microseconds:
    """There and back without queues; assumed when nothing came back yet."""
    if reading.least_round_trip_us:
        return reading.least_round_trip_us
    if reading.round_trip_us.mean > 0:
        return Microseconds(max(1, round(reading.round_trip_us.mean)))
    return ASSUMED_ROUND_TRIP_US


def goodput_of(
    reading: NodeReading,
    direction: TransferDirection,
    connections: int,
    typical_bits_per_s: float = 0.0,
) -> Estimate:
    """Bit/s of a long transfer over so many connections, from now on.

    What was measured over another number of connections or a shorter round trip is carried over.
    A round trip that has become shorter promises nothing: it may have been the queue that is gone.
    Where nothing was measured the lesser of two rates is taken: what such lines carry, and what
    losses allow. Such an estimate has no observations and is off by as much as it says.

    Args:
        reading: Of the node.
        direction: Of the transfer.
        connections: That share it.
        typical_bits_per_s: Of lines like it; 0: not known.
    """
    is_up = direction is TransferDirection.UP
    goodput = reading.up_bits_per_s if is_up else reading.down_bits_per_s
    if not goodput.count:
        line = typical_bits_per_s or ASSUMED_BITS_PER_S
        limit = limit_bits_per_s(reading, direction, round_trip_us(reading), connections)
        mean = _lesser(line, limit)
        return Estimate(mean=mean, deviation=mean)
    then = reading.up_conditions if is_up else reading.down_conditions
    now_us = max(then.round_trip_us, round_trip_us(reading))
    return goodput_under(reading, direction, Conditions(now_us, connections))


def goodput_under(reading: NodeReading, direction: TransferDirection, now: Conditions) -> Estimate:
    """The measured goodput under other conditions, its spread wider for it."""
    is_up = direction is TransferDirection.UP
    goodput = reading.up_bits_per_s if is_up else reading.down_bits_per_s
    then = reading.up_conditions if is_up else reading.down_conditions
    if not goodput.count or not then.round_trip_us or not now.round_trip_us or then == now:
        return goodput
    before = limit_bits_per_s(reading, direction, then.round_trip_us, then.connections)
    after = limit_bits_per_s(reading, direction, now.round_trip_us, now.connections)
    mean = carried_rate(goodput.mean, before, after)
    share = goodput.deviation / goodput.mean + _EXTRAPOLATED * abs(log(mean / goodput.mean))
    return msgspec.structs.replace(
        goodput,
        mean=mean,
        deviation=mean * share,
        newest=goodput.newest * mean / goodput.mean,
    )


def carried_rate(bits_per_s: float, before: float, after: float) -> float:
    """What becomes of a goodput when what TCP allows changes from ``before`` to ``after``.

    If it was less than TCP allowed, the line had a share in it, and that stays. If it was as much
    or more (the model is too careful there), the line was never met: it moves with the limit.
    """
    if bits_per_s >= before:
        return bits_per_s * after / before
    line = (bits_per_s**-4 - before**-4) ** -0.25
    return _lesser(line, after)


def limit_bits_per_s(
    reading: NodeReading, direction: TransferDirection, rtt_us: Microseconds, connections: int
) -> float:
    """What losses and socket buffers allow so many connections, on a line without end."""
    path = path_of(reading, direction, rtt_us)
    return connections * steady_packets_per_us(path) * _PACKET_BITS * 1e6


def path_of(
    reading: NodeReading, direction: TransferDirection, rtt_us: Microseconds
) -> NetworkPath:
    """The line as the transfer model sees it, without a bottleneck: goodput stands for that."""
    path = NetworkPath(
        rtt_us=rtt_us,
        loss=likely_loss(reading),
        burst_packets=mean_burst(reading),
        congestion_control=congestion_control_of(reading, direction),
    )
    is_cubic = path.congestion_control is CongestionControl.CUBIC
    if is_cubic and path.events_per_packet > _CROWDED:
        return msgspec.structs.replace(path, congestion_control=CongestionControl.RENO)
    return path


def loss_of_goodput(bits_per_s: float, rtt_us: Microseconds, connections: int = 1) -> float:
    """The most that packets can be lost if loss-based connections came to this goodput together.

    Inverts the transfer model, as one inverts Mathis et al. 1997: goodput falls with every loss.
    It is a bound and no measurement, since the line may have been the limit.
    """
    least, most = 0.0, LOSS_MAX
    each = bits_per_s / max(1, connections) / _PACKET_BITS / 1e6
    for _ in range(40):
        loss = (least + most) / 2
        if steady_packets_per_us(NetworkPath(rtt_us=rtt_us, loss=loss)) >= each:
            least = loss
        else:
            most = loss
    return least


def slow_start_us(
    size_bytes: int, bits_per_s: float, rtt_us: Microseconds, connections: int
) -> float:
    """What a transfer waits for acknowledgements before its windows fill the line: its time beyond
    ``size / rate``. Connections begin with a fresh window each, as idle ones do.
    """
    each_per_us = bits_per_s / 8e6 / connections
    return sum(
        max(0.0, rtt_us - window / each_per_us) for window in _windows(size_bytes, connections)
    )


def seen_rate(
    size_bytes: int, took_us: Microseconds, rtt_us: Microseconds, connections: int
) -> RateSample:
    """What a transfer says of the line: the rate at which `slow_start_us` explains its time.

    The size counts as such only from 256 KiB on; what is smaller weighs less, unless it took a
    second. Where slow start explains more than half of the time what is left is less sure, and
    where it explains three quarters, or all but a round trip, which is as well as it is known, the
    line may be as fast as one likes: it is no slower than what is seen.

    Args:
        size_bytes: That arrived.
        took_us: From the first to the last.
        rtt_us: There and back; 0: not known, then nothing is taken for slow start.
        connections: That shared the transfer.
    """
    weight = min(1.0, max(size_bytes / LARGE_BYTES, took_us / LONG_US))
    moving_us = _moving_us(size_bytes, took_us, rtt_us, connections)
    unexplained_us = took_us - rtt_us * len(_windows(size_bytes, connections))
    is_least = unexplained_us <= max(HIDDEN_SHARE * took_us, rtt_us)
    shown_share = max(moving_us / took_us, HIDDEN_SHARE)
    # A least rate is sure of itself, and raising a rate makes no forecast much sooner there.
    weight *= 1.0 if is_least else min(1.0, 2 * shown_share)
    return RateSample(size_bytes * 8e6 / (took_us * shown_share), weight, is_least)


def _moving_us(size_bytes: int, took_us: int, rtt_us: int, connections: int) -> float:
    """The part of a transfer's time that its rate explains: u in ``u + slow_start(u) = took``.

    Both grow in straight pieces, one for each number of windows that are shorter than a round
    trip; the piece is found by trying.
    """
    size = size_bytes / connections
    windows = _windows(size_bytes, connections)
    for window_count in range(len(windows), -1, -1):
        alone = size - sum(windows[:window_count])
        us_per_byte = (took_us - window_count * rtt_us) / alone
        if us_per_byte <= 0:
            continue
        if window_count and windows[window_count - 1] * us_per_byte >= rtt_us:
            continue
        return min(float(took_us), us_per_byte * size)
    return 0.0


def _windows(size_bytes: int, connections: int) -> list[float]:
    """Bytes of each round of slow start but the last, of one of the connections."""
    left_bytes = size_bytes / connections
    window = float(tcp.INITIAL_WINDOW_PACKETS * 1448)
    windows = []
    while left_bytes > window:
        windows.append(window)
        left_bytes -= window
        window *= tcp.SLOW_START_GROWTH
    return windows


def _lesser(one: float, other: float) -> float:
    """The lesser of two limits, rounded where they meet, as in `steady_packets_per_us`."""
    if inf in (one, other):
        return min(one, other)
    least, most = min(one, other), max(one, other)
    return float(least * (1 + (least / most) ** 4) ** -0.25)
