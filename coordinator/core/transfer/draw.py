"""The time to move bytes over a path, drawn round trip by round trip. No packets are moved."""

from enum import Enum
from math import cos, exp, log, pi, sqrt
from typing import NamedTuple

from coordinator.core.transfer import constants
from coordinator.core.transfer.congestion import bbr_utilisation, congestion
from coordinator.core.transfer.path import CongestionControl, NetworkPath, recovery_rounds
from coordinator.core.transfer.steady import steady_packets_per_us
from coordinator.core.transfer.window import Dice, loss_gap, stall_us
from hypergpu.units import Microseconds


class ConnectionStart(Enum):
    """What the connection was before the transfer."""

    IDLE = "idle"  # open; its window is what idling has left of it
    COLD = "cold"  # not there: TCP and TLS shake hands first


class CarriedWindow(NamedTuple):
    """What a transfer leaves to the next one over the same connection."""

    window_packets: float
    slow_start_until: float = float("inf")


class TransferDraw(NamedTuple):
    """One draw of a transfer."""

    took_us: Microseconds
    left: CarriedWindow


class _Transfer:
    """A transfer under way. Numbers of the path that each round needs are kept at hand."""

    def __init__(self, path: NetworkPath, size_bytes: int, dice: Dice) -> None:
        self.path = path
        self.dice = dice
        self.congestion = congestion(path)
        self.rtt_us = path.rtt_us
        self.packet_us = path.packet_us
        if path.congestion_control is CongestionControl.BBR:
            self.packet_us /= bbr_utilisation(path)
        self.overflow = path.overflow_packets
        self.events = path.events_per_packet
        self.left = float(path.packets(size_bytes))
        self.now_us = 0.0
        self.to_loss = loss_gap(self.events, dice)
        self.recovering = False

    def round(self) -> None:
        """Send a window, and wait for its acknowledgements unless it was the last."""
        sent = min(self.congestion.window, self.left)
        self.left -= sent
        self.to_loss -= sent
        is_tail = not self.left
        lost = 0.0
        if self.to_loss <= 0 or sent > self.overflow:
            lost = self._losses(sent)
            self.left += lost
        duration_us = sent * self.packet_us
        if not self.left:
            self.now_us += duration_us
            return
        self.now_us += max(duration_us, self.rtt_us)
        if lost and sent < constants.SMALL_WINDOW_PACKETS:
            self._stall(stall_us(self.path) - self.rtt_us if is_tail else constants.RTO_FLOOR_US)
        elif not lost:
            self.recovering = False
            self.congestion.pass_round(self.now_us)
        elif self.congestion.heeds_each_loss or not self.recovering:
            self.recovering = True
            self.congestion.note_loss(self.now_us)

    def settle(self) -> None:
        """Send what is left at the rate that the path settles at."""
        if not self.left:
            return
        took_us = self.left / steady_packets_per_us(self.path)
        losses = self.left * self.events
        if losses and not self.congestion.is_steady:
            # Some transfers meet more losses than others; over many losses that evens out.
            took_us *= exp(constants.SPREAD_A_LOSS / sqrt(1 + losses) * _normal(self.dice))
            took_us = max(took_us, self.left * self.packet_us)
        elif losses:
            in_flight = min(self.left, self.congestion.window)
            rounds = recovery_rounds(self.events, self.path.loss, in_flight)
            took_us += (rounds - 1) * 2 * self.dice() * self.path.rtt_us
        self.now_us += took_us
        self.left = 0.0

    def _losses(self, sent: float) -> float:
        """Packets of this window that must be sent again."""
        lost = max(0.0, sent - self.overflow)
        while self.to_loss <= 0:
            lost += min(_burst(self.path.burst_packets, self.dice), sent)
            self.to_loss += loss_gap(self.events, self.dice)
        return min(lost, sent)

    def _stall(self, for_us: int) -> None:
        self.now_us += for_us
        self.congestion.note_timeout(self.now_us)


def transfer_us(
    path: NetworkPath, size_bytes: int, dice: Dice, *, start: ConnectionStart = ConnectionStart.IDLE
) -> Microseconds:
    """How long a transfer over a fresh or long idle connection takes; see `drawn`."""
    return draw_transfer(path, size_bytes, dice, start=start).took_us


def draw_transfer(
    path: NetworkPath,
    size_bytes: int,
    dice: Dice,
    *,
    start: ConnectionStart = ConnectionStart.IDLE,
    carried: CarriedWindow | None = None,
) -> TransferDraw:
    """From the first byte's leaving to the last one's arriving, as one draw.

    Costs a few microseconds a round trip and ends after `constants.ROUNDS_MOST` of them: what is
    left then moves at the steady rate.

    Args:
        path: The way.
        size_bytes: Payload.
        dice: Where losses fall.
        start: What the connection was before.
        carried: What earlier transfers over it have left; None: a fresh window.
    """
    transfer = _Transfer(path, size_bytes, dice)
    if carried is not None:
        transfer.congestion.window = min(carried.window_packets, path.buffer_packets)
        transfer.congestion.slow_start_until = carried.slow_start_until
    if start is ConnectionStart.COLD:
        transfer.now_us = float(constants.HANDSHAKE_RTTS * path.rtt_us)
    for _ in range(constants.ROUNDS_MOST):
        if not transfer.left or transfer.congestion.is_steady:
            break
        transfer.round()
    transfer.settle()
    took_us = Microseconds(round(transfer.now_us + path.rtt_us / 2))
    left = transfer.congestion
    return TransferDraw(took_us, CarriedWindow(left.window, left.slow_start_until))


def _burst(mean_packets: float, dice: Dice) -> float:
    """How many packets an event takes: geometric."""
    if mean_packets <= 1:
        return 1.0
    return float(1 + int(log(1 - dice()) / log(1 - 1 / mean_packets)))


def _normal(dice: Dice) -> float:
    """A standard normal number (Box and Muller 1958)."""
    return sqrt(-2 * log(1 - dice())) * cos(2 * pi * dice())
