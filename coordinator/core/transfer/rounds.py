"""The time to move bytes over a path, drawn round trip by round trip. No packets are moved."""

from enum import Enum
from math import log

from coordinator.core.transfer import constants
from coordinator.core.transfer.congestion import bbr_utilisation, congestion
from coordinator.core.transfer.path import CongestionControl, Path
from coordinator.core.transfer.window import Dice, loss_gap, stall_us
from hypergpu.units import Microseconds


class Start(Enum):
    """What the connection was before the transfer."""

    IDLE = "idle"  # open, and idle for long enough that its window is back at its start
    COLD = "cold"  # not there: TCP and TLS shake hands first


class _Transfer:
    """A transfer under way."""

    def __init__(self, path: Path, size_bytes: int, dice: Dice) -> None:
        self.path = path
        self.dice = dice
        self.congestion = congestion(path)
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
        window = self.congestion.window
        sent = min(window, self.left)
        self.left -= sent
        lost = self._losses(sent)
        is_tail = not self.left
        self.left += lost
        duration_us = sent * self.packet_us
        if not self.left:
            self.now_us += duration_us
            return
        self.now_us += max(duration_us, self.path.rtt_us)
        if lost and sent < constants.SMALL_WINDOW_PACKETS:
            self._stall(is_tail)
        elif lost:
            if self.congestion.heeds_each_loss or not self.recovering:
                self.congestion.lost(self.now_us)
            self.recovering = True
        else:
            self.recovering = False
            self.congestion.round_passed(self.now_us)

    def _losses(self, sent: float) -> float:
        """Packets of this window that must be sent again."""
        lost = max(0.0, sent - self.overflow)
        self.to_loss -= sent
        while self.to_loss <= 0:
            lost += min(_burst(self.path.burst_packets, self.dice), sent)
            self.to_loss += loss_gap(self.events, self.dice)
        return min(lost, sent)

    def _stall(self, is_tail: bool) -> None:  # noqa: FBT001
        if is_tail:
            self.now_us += stall_us(self.path) - self.path.rtt_us
        else:
            self.now_us += constants.RTO_FLOOR_US
        self.congestion.timed_out(self.now_us)


def transfer_us(
    path: Path, size_bytes: int, dice: Dice, *, start: Start = Start.IDLE
) -> Microseconds:
    """From the first byte's leaving to the last one's arriving, as one draw.

    Costs about a microsecond a round trip and at most 300.

    Args:
        path: The way.
        size_bytes: Payload.
        dice: Where losses fall.
        start: What the connection was before.
    """
    transfer = _Transfer(path, size_bytes, dice)
    if start is Start.COLD:
        transfer.now_us = float(constants.HANDSHAKE_RTTS * path.rtt_us)
    for _ in range(constants.ROUNDS_MOST):
        if not transfer.left:
            break
        transfer.round()
    return Microseconds(round(transfer.now_us + path.rtt_us / 2))


def _burst(mean_packets: float, dice: Dice) -> float:
    """How many packets an event takes: geometric."""
    if mean_packets <= 1:
        return 1.0
    return float(1 + int(log(1 - dice()) / log(1 - 1 / mean_packets)))
