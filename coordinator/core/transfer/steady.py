"""What a long transfer settles at, in closed form."""

from math import sqrt

from coordinator.core.transfer import constants
from coordinator.core.transfer.congestion import bbr_utilisation, bbr_window
from coordinator.core.transfer.path import CongestionControl, NetworkPath


def steady_packets_per_us(path: NetworkPath) -> float:
    """Payload packets that arrive per microsecond once slow start is long over.

    Reno and CUBIC follow Mathis et al. 1997 in loss *events* and pay for their timers as in
    Padhye et al. 1998; CUBIC adds its own growth where that is faster (RFC 9438, section 5.1).
    """
    rtt_us = max(1, path.rtt_us)
    arriving = 1 - path.loss
    if path.congestion_control is CongestionControl.BBR:
        pipe = bbr_utilisation(path) / path.packet_us if path.bits_per_s else float("inf")
        return min(pipe, bbr_window(path) / rtt_us) * arriving
    pipe = _full_share(path) / path.packet_us if path.bits_per_s else float("inf")
    most = min(pipe, path.buffer_packets / rtt_us)
    if not path.events_per_packet:
        return most
    free = 1 / (rtt_us / mean_window(path) + _timer_us_per_packet(path))
    # Neither limit is met at all times: the sawtooth crosses the smaller one.
    return float(arriving * (free**-4 + most**-4) ** -0.25)


def mean_window(path: NetworkPath) -> float:
    """Packets in flight that Reno or CUBIC hold on average under random losses."""
    events = max(path.events_per_packet, 1e-9)
    friendly = constants.MATHIS / sqrt(events)
    if path.congestion_control is CongestionControl.RENO:
        return friendly
    beta, scale = constants.CUBIC_BETA, constants.CUBIC_SCALE
    level = (scale * (3 + beta) / (4 * (1 - beta))) ** 0.25
    return float(max(friendly, level * (path.rtt_us / 1e6 / events) ** 0.75))


def _timer_us_per_packet(path: NetworkPath) -> float:
    """Small windows wait for the timer after a loss; large ones hardly ever do."""
    events = path.events_per_packet
    waits = (
        constants.TIMER_SHARE * min(1.0, constants.SMALL_WINDOW_PACKETS / mean_window(path)) ** 3
    )
    return events * waits * path.timeout_us


def _full_share(path: NetworkPath) -> float:
    """The share of a bottleneck that a sawtooth over a short queue fills."""
    if not path.full_packets:
        return 1.0  # Without a round trip no pipe ever runs dry.
    beta = 0.5 if path.congestion_control is CongestionControl.RENO else constants.CUBIC_BETA
    low = beta * path.overflow_packets / path.full_packets
    return 1.0 if low >= 1 else 1 - (1 - low) ** 2 * beta / (1 - beta) / 2
