"""A stream's window as it goes along, for whoever carries real bytes but cannot lose any."""

from collections.abc import Callable
from math import log

from coordinator.core.transfer import constants
from coordinator.core.transfer.congestion import congestion
from coordinator.core.transfer.path import NetworkPath
from hypergpu.units import Bytes, Microseconds

Dice = Callable[[], float]
"""Uniform in [0, 1): a seeded generator's ``random``."""


class Window:
    """What TCP's congestion control would do to one direction of one connection.

    The carrier keeps no more than `window_bytes` in flight, reports what it sends with `send`,
    holds those bytes back for as long as it is told, and reports them with `acknowledge` one RTT
    (and what they queued) after they were sent, held back or not. The bottleneck's rate is the
    carrier's to pace.

    Args:
        path: The direction's numbers. `change_path` replaces them when the link changes.
        dice: Where losses fall. Equal dice and equal calls give equal answers.
    """

    def __init__(self, path: NetworkPath, dice: Dice) -> None:
        self._path = path
        self._dice = dice
        self._congestion = congestion(path)
        self._sent_bytes = 0
        self._acked_bytes = 0
        self._round_ends_at = 0
        self._last_us = 0
        self._has_lost = False
        self._has_stalled = False
        self._was_full = False
        self._packets_to_loss = loss_gap(path.events_per_packet, dice)

    @property
    def in_flight_bytes(self) -> Bytes:
        """Sent and not yet acknowledged."""
        return Bytes(self._sent_bytes - self._acked_bytes)

    @property
    def next_loss_bytes(self) -> Bytes:
        """Until the next event of loss. On a path without losses it is very far."""
        return Bytes(int(min(self._packets_to_loss, 2**40) * self._path.packet_bytes))

    def window_bytes(self, now_us: Microseconds) -> Bytes:
        """How many bytes may be in flight now, at least one packet."""
        timeouts = (now_us - self._last_us) // self._path.timeout_us
        if timeouts > 0 and not self.in_flight_bytes:
            self._congestion.note_idle(timeouts)
            self._last_us = now_us
        return Bytes(max(1, int(self._congestion.window)) * self._path.packet_bytes)

    def send(self, size_bytes: int, now_us: Microseconds) -> Microseconds:
        """Take note of bytes that leave; returns how long a loss among them holds them back.

        What comes after them in the stream waits with them: bytes arrive in order.
        """
        path = self._path
        before = self.in_flight_bytes
        self._sent_bytes += size_bytes
        self._last_us = now_us
        in_flight = self.in_flight_bytes
        self._was_full |= in_flight + path.packet_bytes > self.window_bytes(now_us)
        # A small message is a packet of its own, however small.
        self._packets_to_loss -= max(1.0, size_bytes / path.packet_bytes)
        if self._packets_to_loss > 0:
            return Microseconds(0)
        self._packets_to_loss = loss_gap(path.events_per_packet, self._dice)
        self._has_lost = True
        if max(before, in_flight) >= constants.SMALL_WINDOW_PACKETS * path.packet_bytes:
            return path.rtt_us
        self._has_stalled = True
        return stall_us(path)

    def acknowledge(self, size_bytes: int, now_us: Microseconds) -> None:
        """Take note of bytes whose acknowledgement is back."""
        self._acked_bytes += size_bytes
        # What left before the mark belongs to the round before: it cannot end this one.
        if self._acked_bytes <= self._round_ends_at and self._round_ends_at:
            return
        self._round_ends_at = self._sent_bytes
        window = self._congestion
        if self._has_stalled:
            window.note_timeout(now_us)
        elif self._has_lost or window.window > self._path.overflow_packets:
            window.note_loss(now_us)
        elif self._was_full:
            window.pass_round(now_us)
        self._has_stalled = self._has_lost = self._was_full = False

    def change_path(self, path: NetworkPath) -> None:
        """Go on over a link that has changed; the window starts from where it is."""
        self._path = path
        self._congestion.set_path(path)
        self._packets_to_loss = loss_gap(path.events_per_packet, self._dice)


def loss_gap(events_per_packet: float, dice: Dice) -> float:
    """Packets until the next event of loss: exponential, since events are independent."""
    if events_per_packet <= 0:
        return float("inf")
    return -log(1 - dice()) / events_per_packet


def stall_us(path: NetworkPath) -> Microseconds:
    """How long the loss of a stream's last packets holds it up: 2 RTT and at least 200 ms.

    Nothing after them reveals it: Linux sends a tail loss probe, or the timer runs out.
    """
    return Microseconds(max(constants.RTO_FLOOR_US, 2 * path.rtt_us))
