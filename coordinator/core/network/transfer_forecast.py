"""How long a transfer takes: drawn round trip by round trip, and as a distribution for plans and
worlds of many nodes. No packets are moved.
"""

from collections.abc import Callable
from functools import lru_cache
from math import cos, exp, log, pi, sqrt
from typing import NamedTuple

import msgspec

from coordinator.core.network import tcp
from coordinator.core.network.tcp import (
    CongestionControl,
    NetworkPath,
    bbr_utilisation,
    congestion,
    recovery_rounds,
    steady_packets_per_us,
)
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
        if max(before, in_flight) >= tcp.SMALL_WINDOW_PACKETS * path.packet_bytes:
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
    return Microseconds(max(tcp.RTO_FLOOR_US, 2 * path.rtt_us))


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
        sent_packets = min(self.congestion.window, self.left)
        self.left -= sent_packets
        self.to_loss -= sent_packets
        is_tail = not self.left
        lost_packets = 0.0
        if self.to_loss <= 0 or sent_packets > self.overflow:
            lost_packets = self._losses(sent_packets)
            self.left += lost_packets
        duration_us = sent_packets * self.packet_us
        if not self.left:
            self.now_us += duration_us
            return
        self.now_us += max(duration_us, self.rtt_us)
        if lost_packets and sent_packets < tcp.SMALL_WINDOW_PACKETS:
            self._stall(stall_us(self.path) - self.rtt_us if is_tail else tcp.RTO_FLOOR_US)
        elif not lost_packets:
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
            took_us *= exp(tcp.SPREAD_A_LOSS / sqrt(1 + losses) * _normal(self.dice))
            took_us = max(took_us, self.left * self.packet_us)
        elif losses:
            in_flight = min(self.left, self.congestion.window)
            rounds = recovery_rounds(self.events, self.path.loss, in_flight)
            took_us += (rounds - 1) * 2 * self.dice() * self.path.rtt_us
        self.now_us += took_us
        self.left = 0.0

    def _losses(self, sent: float) -> float:
        """Packets of this window that must be sent again."""
        lost_packets = max(0.0, sent - self.overflow)
        while self.to_loss <= 0:
            lost_packets += min(_burst(self.path.burst_packets, self.dice), sent)
            self.to_loss += loss_gap(self.events, self.dice)
        return min(lost_packets, sent)

    def _stall(self, for_us: int) -> None:
        self.now_us += for_us
        self.congestion.note_timeout(self.now_us)


def draw_transfer(
    path: NetworkPath,
    size_bytes: int,
    dice: Dice,
    *,
    carried: CarriedWindow | None = None,
) -> TransferDraw:
    """From the first byte's leaving to the last one's arriving, as one draw.

    Costs a few microseconds a round trip and ends after `tcp.ROUNDS_MOST` of them: what is
    left then moves at the steady rate.

    Args:
        path: The way.
        size_bytes: Payload.
        dice: Where losses fall.
        carried: What earlier transfers over it have left; None: a fresh window.
    """
    transfer = _Transfer(path, size_bytes, dice)
    if carried is not None:
        transfer.congestion.window = min(carried.window_packets, path.buffer_packets)
        transfer.congestion.slow_start_until = carried.slow_start_until
    for _ in range(tcp.ROUNDS_MOST):
        if not transfer.left or transfer.congestion.is_steady:
            break
        transfer.round()
    transfer.settle()
    took_us = Microseconds(round(transfer.now_us + path.rtt_us / 2))
    end_state = transfer.congestion
    return TransferDraw(took_us, CarriedWindow(end_state.window, end_state.slow_start_until))


def _burst(mean_packets: float, dice: Dice) -> float:
    """How many packets an event takes: geometric."""
    if mean_packets <= 1:
        return 1.0
    return float(1 + int(log(1 - dice()) / log(1 - 1 / mean_packets)))


def _normal(dice: Dice) -> float:
    """A standard normal number (Box and Muller 1958)."""
    return sqrt(-2 * log(1 - dice())) * cos(2 * pi * dice())


_DRAWS = 15
_KEPT = 1 << 16
_STEP = 1.03


class TransferForecast(msgspec.Struct, frozen=True):
    """Times of one transfer, the shortest first, each as likely as the others."""

    times_us: tuple[Microseconds, ...]
    left: tuple[CarriedWindow, ...]
    """What each leaves to the next transfer over the connection."""

    @property
    def median_us(self) -> Microseconds:
        """Half of the transfers are faster."""
        return self.times_us[len(self.times_us) // 2]

    @property
    def spread(self) -> float:
        """Half the width of the middle two thirds, over the median: one sigma of a normal one."""
        low, high = len(self.times_us) // 6, len(self.times_us) - 1 - len(self.times_us) // 6
        return (self.times_us[high] - self.times_us[low]) / 2 / max(1, self.median_us)

    def sample_left(self, chance: float) -> CarriedWindow:
        """What a transfer leaves that takes `sample_us`."""
        return self.left[min(int(chance * len(self.left)), len(self.left) - 1)]

    def sample_us(self, chance: float) -> Microseconds:
        """The time that this share of transfers stays under, between the known ones."""
        place = chance * (len(self.times_us) - 1)
        below = int(place)
        if below + 1 >= len(self.times_us):
            return self.times_us[-1]
        low, high = self.times_us[below], self.times_us[below + 1]
        return Microseconds(round(low + (high - low) * (place - below)))


@lru_cache(maxsize=_KEPT)
def forecast_transfer(
    path: NetworkPath,
    size_bytes: Bytes,
    carried: CarriedWindow | None = None,
) -> TransferForecast:
    """The distribution of a transfer's time.

    A microsecond once it is known; fifteen draws, or one on a path without losses, when it is new.
    For the arguments see `draw_transfer`.
    """
    draws = sorted(
        draw_transfer(path, size_bytes, _sequence(seed), carried=carried)
        for seed in range(_DRAWS if path.events_per_packet else 1)
    )
    return TransferForecast(
        tuple(draw.took_us for draw in draws), tuple(draw.left for draw in draws)
    )


def round_path(path: NetworkPath) -> NetworkPath:
    """The path with its numbers in steps of 3 %, so that links which wander share forecasts."""
    return msgspec.structs.replace(
        path,
        rtt_us=Microseconds(_near(path.rtt_us)),
        bits_per_s=_near(path.bits_per_s),
        loss=_near(round(path.loss * 1_000_000)) / 1_000_000,
    )


def _near(number: int) -> int:
    if number <= 0:
        return 0
    return round(_STEP ** round(log(number) / log(_STEP)))


def _sequence(seed: int) -> Dice:
    """Numbers in [0, 1) that look random and are the same each time (Knuth's MMIX generator)."""
    state = (seed + 1) * 0x9E3779B97F4A7C15

    def following() -> float:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (state >> 11) / (1 << 53)

    return following
