"""How fast a sender sends over a path: windows of Reno, CUBIC and BBR round trip by round trip, and
what they settle at.

Windows are in packets and times in microseconds. The shapes are those of RFC 5681, RFC 9438 and
Cardwell et al. 2016; every number that was given or fitted is a constant here, to be calibrated
again against real packets.
"""

from enum import StrEnum
from math import sqrt

import msgspec

from hypergpu.units import Bytes, Microseconds, Milliseconds

INITIAL_WINDOW_PACKETS = 10
"""RFC 6928."""
PACKET_HEADER_BYTES = 52
"""IPv4 20, TCP 20, timestamps 12."""
STREAM_OVERHEAD = 0.001
"""HTTP/2 frames, messages and TLS records: measured 3.7 % over payload where TCP/IP takes 3.6 %."""
BUFFER_SHARE = 0.74
"""Payload in a full socket buffer; the rest is bookkeeping. One connection with Linux's 4 MiB of
``tcp_wmem`` was measured at 200 to 250 Mbit/s over 100 ms.
"""
STREAM_WINDOW_PACKETS = 130
"""What a transfer may begin with however large TCP's window is: an HTTP/2 stream opens with 64 KiB
and its receiver grants more as messages come. Fitted to rounds of 1 MB over 150 ms, 1.7 s.
"""
SLOW_START_GROWTH = 1.8
"""Per round, of Reno and CUBIC: less than double, since the receiver's window opens step by step.
Fitted to 4 MiB over 100 ms, 1.0 s.
"""
RTO_FLOOR_US = 200_000
"""Linux: a retransmission timeout is the smoothed RTT and at least this."""
HANDSHAKE_RTTS = 2
"""TCP and TLS 1.3, before the first byte of a cold connection."""
SMALL_WINDOW_PACKETS = 4
"""With fewer in flight a loss raises too few duplicate acknowledgements: it waits for the timer."""

CUBIC_BETA = 0.7
"""RFC 9438: what a loss leaves of the window."""
CUBIC_SCALE = 0.4
"""RFC 9438: C, in packets per second cubed."""
CUBIC_FRIENDLY_GROWTH = 3 * (1 - CUBIC_BETA) / (1 + CUBIC_BETA)
"""RFC 9438: packets per round where CUBIC does no worse than Reno."""
RENO_BETA = 0.5
HYSTART_SHARE = 1 / 8
"""CUBIC leaves slow start once queueing has raised the RTT by this share (Linux: HyStart)."""

BBR_STARTUP_GROWTH = 2.0
"""Per round in startup; its pacing gain of 2.89 is made for doubling (Cardwell et al. 2016)."""
BBR_LOSSY_GROWTH = 1.4
"""Per round in startup while packets are being recovered; fitted to 4 MiB at 1 %, 1.3 to 1.5 s."""
BBR_WINDOW_GAIN = 2.0
BBR_IDLE_SHARE = 0.005
BBR_IDLE_SHARE_PER_S = 0.4
"""What probing for the lowest RTT costs, and more of it the longer the RTT: fitted to 100 MiB at
20 Mbit/s, 43.8 s without delay and 46.1 s over 100 ms.
"""
BBR_IDLE_SHARE_MOST = 0.1
BBR_LOSS_LIMIT = 0.2
"""BBR ignores loss up to about this share (Cardwell et al. 2016); beyond it the rate collapses."""

ROUNDS_MOST = 100
"""Rounds drawn one by one; what is left after them moves at the steady rate."""

MATHIS = 1.29
"""Mean window times the square root of the loss rate: 1.22 in Mathis et al. 1997; fitted to the
drawn rounds.
"""
TIMER_SHARE = 0.5
"""How many of the losses in a small window wait for the timer; fitted to the drawn rounds."""
SPREAD_A_LOSS = 0.6
"""Spread of a long transfer's time, times the root of its losses; fitted to the drawn rounds."""


class CongestionControl(StrEnum):
    """Congestion control of the sending host."""

    CUBIC = "cubic"
    RENO = "reno"
    BBR = "bbr"


class NetworkPath(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link and what the sender does on it."""

    rtt_us: Microseconds
    """There and back, without queueing."""
    bits_per_s: int = 0
    """Rate of the bottleneck, headers included; 0: no limit."""
    loss: float = 0.0
    """Share of packets lost, in [0, 1)."""
    burst_packets: float = 1.0
    """Mean number of packets in a row that are lost together. TCP sees one event in each burst."""
    queue_ms: Milliseconds = Milliseconds(100)
    """Buffer before the bottleneck, as the time it takes to drain."""
    congestion_control: CongestionControl = CongestionControl.CUBIC
    packet_bytes: Bytes = Bytes(1448)
    """Payload of a full packet."""
    buffer_bytes: Bytes = Bytes(4 * 1024 * 1024)
    """The smaller of the sender's and the receiver's socket buffer."""

    @property
    def events_per_packet(self) -> float:
        """How often a burst of losses begins: ``loss / burst`` for rare losses."""
        if self.loss <= 0:
            return 0.0
        return min(0.5, self.loss / (self.burst_packets * (1 - self.loss) + self.loss))

    @property
    def packet_us(self) -> float:
        """How long a full packet occupies the bottleneck."""
        if not self.bits_per_s:
            return 0.0
        return (self.packet_bytes + PACKET_HEADER_BYTES) * 8e6 / self.bits_per_s

    @property
    def full_packets(self) -> float:
        """In flight when the pipe is full and nothing queues."""
        return self.rtt_us / self.packet_us if self.bits_per_s else float("inf")

    @property
    def overflow_packets(self) -> float:
        """In flight when the queue overflows."""
        if not self.bits_per_s:
            return float("inf")
        return self.full_packets + max(2.0, self.queue_ms * 1000 / self.packet_us)

    @property
    def buffer_packets(self) -> float:
        """In flight when the socket buffer is full."""
        return max(2.0, self.buffer_bytes * BUFFER_SHARE / self.packet_bytes)

    @property
    def timeout_us(self) -> Microseconds:
        """Before a loss that nothing later reveals is sent again."""
        return Microseconds(self.rtt_us + RTO_FLOOR_US)

    def packets(self, size_bytes: int) -> int:
        """How many packets the payload takes, framing included."""
        return max(1, -(-int(size_bytes * (1 + STREAM_OVERHEAD)) // self.packet_bytes))


def recovery_rounds(events_per_packet: float, loss: float, packets: float) -> float:
    """Mean round trips until every packet of a window is through, losses and their repeats.

    A buffer moves on only when its first hole is filled. Of n packets at least one is lost in a
    try, in its repeat and so on: 1 + sum over k of 1 - (1 - p^k)^n. It gives BBR's 222 Mbit/s over
    100 ms without loss 119, 102, 86 and 69 at 0.1, 1, 2 and 5 %; measured were 147, 101, 95 and 74.
    """
    rounds = 1.0
    chance = events_per_packet
    while chance * packets > 0.01:
        rounds += 1 - (1 - chance) ** packets
        chance *= loss
    return rounds


class Reno:
    """Half after a loss, one packet more a round (RFC 5681)."""

    beta = RENO_BETA
    heeds_each_loss = False
    """Whether a loss during the recovery from another one counts too."""

    def __init__(self, path: NetworkPath) -> None:
        self.window = float(min(INITIAL_WINDOW_PACKETS, path.buffer_packets))
        """Packets that may be in flight."""
        self.slow_start_until = float("inf")
        """The window at which growth slows down; what losses have taught outlives a transfer."""
        self.is_steady = False
        """Whether it will stay as it is, whatever is lost."""
        self.set_path(path)

    def set_path(self, path: NetworkPath) -> None:
        """The path's numbers are these from now on; the window goes on from where it is."""
        self._most = path.buffer_packets
        self._steady_from = float("inf")
        if not path.events_per_packet:
            # What is left of a full queue after a loss still fills the pipe.
            is_deep = self.beta * path.overflow_packets >= path.full_packets
            full = path.full_packets * (1 + HYSTART_SHARE)
            self._steady_from = min(self._most, full if is_deep else self._most)

    def pass_round(self, now_us: float) -> None:
        """A full window was acknowledged without a loss."""
        if self.window < self.slow_start_until:
            grown_window = SLOW_START_GROWTH * self.window
            self.window = min(grown_window, self.slow_start_until, self._most)
        else:
            self.window = min(self._window_growth(now_us), self._most)
        self.is_steady = self.window >= self._steady_from

    def note_loss(self, now_us: float) -> None:
        """A window had losses, in one event or more, and acknowledgements revealed them."""
        self._remember(now_us)
        self.window = self.slow_start_until = max(2.0, self.window * self.beta)

    def note_timeout(self, now_us: float) -> None:
        """Only the timer revealed a loss."""
        self._remember(now_us)
        self.slow_start_until = max(2.0, self.window * self.beta)
        self.window = 1.0

    def note_idle(self, timeouts: int) -> None:
        """Nothing was sent for so many times the timer."""
        self.slow_start_until = max(self.slow_start_until, 0.75 * self.window)
        self.window = after_idling(self.window, timeouts)

    def _window_growth(self, now_us: float) -> float:
        return self.window + 1

    def _remember(self, now_us: float) -> None:
        """Keep what growth after this loss depends on."""


class Cubic(Reno):
    """Seven tenths after a loss, then back to the old window along a cubic (RFC 9438)."""

    beta = CUBIC_BETA

    def __init__(self, path: NetworkPath) -> None:
        super().__init__(path)
        self._origin = 0.0
        self._since_us = -1.0
        self._friendly = 0.0
        self._plateau_s = 0.0

    def set_path(self, path: NetworkPath) -> None:
        super().set_path(path)
        self._rtt_us = path.rtt_us
        self._hystart = path.full_packets * (1 + HYSTART_SHARE)

    def pass_round(self, now_us: float) -> None:
        if self.window < self.slow_start_until and self.window >= self._hystart:
            self.slow_start_until = self.window
        super().pass_round(now_us)

    def _window_growth(self, now_us: float) -> float:
        if self._since_us < 0:
            self._start(now_us)
        self._friendly += CUBIC_FRIENDLY_GROWTH
        after_s = (now_us - self._since_us + self._rtt_us) / 1e6 - self._plateau_s
        target = self._origin + CUBIC_SCALE * after_s * after_s * after_s
        # Half as much again is the most that a round may add.
        return max(self.window, min(target, 1.5 * self.window), self._friendly)

    def _start(self, now_us: float) -> None:
        """Growth begins: from the window that the last loss left, towards the one it took."""
        self._since_us = now_us
        self._friendly = self.window
        missing_packets = max(0.0, self._origin - self.window)
        self._origin = max(self._origin, self.window)
        self._plateau_s = (missing_packets / CUBIC_SCALE) ** (1 / 3)

    def _remember(self, now_us: float) -> None:
        # Fast convergence: a flow that lost before it was back makes room.
        is_back = self.window >= self._origin
        self._origin = self.window if is_back else self.window * (1 + self.beta) / 2
        self._since_us = -1.0


class Bbr:
    """The bottleneck's rate, whatever is lost on the way, within what the buffers hold."""

    heeds_each_loss = True

    def __init__(self, path: NetworkPath) -> None:
        self.window = float(INITIAL_WINDOW_PACKETS)
        self.slow_start_until = float("inf")
        self.set_path(path)

    def set_path(self, path: NetworkPath) -> None:
        self._most = bbr_window(path)
        self.window = min(self.window, self._most)
        self.is_steady = self.window >= self._most

    def pass_round(self, now_us: float) -> None:
        self._grow(BBR_STARTUP_GROWTH)

    def note_loss(self, now_us: float) -> None:
        self._grow(BBR_LOSSY_GROWTH)

    def note_timeout(self, now_us: float) -> None:
        """The estimate of the rate stays; so does the window after the stall."""

    def note_idle(self, timeouts: int) -> None:
        """It goes on at the rate that it knows."""

    def _grow(self, factor: float) -> None:
        self.window = min(self.window * factor, self._most)
        self.is_steady = self.window >= self._most


def after_idling(window: float, timeouts: int) -> float:
    """Window of Reno or CUBIC after idling: half for each time the timer could have run out,
    but no less than a fresh one (RFC 2861, Linux).
    """
    least = min(window, float(INITIAL_WINDOW_PACKETS))
    return max(least, window / (1 << min(timeouts, 30)))


def bbr_window(path: NetworkPath) -> float:
    """Packets that BBR keeps in flight once it knows the path, holes of lost ones not counted."""
    most = min(
        path.buffer_packets
        / recovery_rounds(path.events_per_packet, path.loss, path.buffer_packets),
        BBR_WINDOW_GAIN * path.full_packets,
        path.overflow_packets,
    )
    if path.loss > BBR_LOSS_LIMIT:
        most *= (BBR_LOSS_LIMIT / path.loss) ** 2
    return max(float(SMALL_WINDOW_PACKETS), most)


def bbr_utilisation(path: NetworkPath) -> float:
    """The share of the bottleneck that BBR uses between its probes for the lowest RTT."""
    idle = BBR_IDLE_SHARE + BBR_IDLE_SHARE_PER_S * path.rtt_us / 1e6
    return 1 - min(idle, BBR_IDLE_SHARE_MOST)


def congestion(path: NetworkPath) -> Reno | Bbr:
    """The window of a connection that has just been opened or was idle for long."""
    match path.congestion_control:
        case CongestionControl.RENO:
            return Reno(path)
        case CongestionControl.CUBIC:
            return Cubic(path)
        case CongestionControl.BBR:
            return Bbr(path)


def steady_packets_per_us(path: NetworkPath) -> float:
    """Payload packets that arrive per microsecond once slow start is long over.

    Reno and CUBIC follow Mathis et al. 1997 in loss *events* and pay for their timers as in
    Padhye et al. 1998; CUBIC adds its own growth where that is faster (RFC 9438, section 5.1).
    """
    rtt_us = max(1, path.rtt_us)
    arrival_share = 1 - path.loss
    if path.congestion_control is CongestionControl.BBR:
        pipe = bbr_utilisation(path) / path.packet_us if path.bits_per_s else float("inf")
        return min(pipe, bbr_window(path) / rtt_us) * arrival_share
    pipe = _full_share(path) / path.packet_us if path.bits_per_s else float("inf")
    most = min(pipe, path.buffer_packets / rtt_us)
    if not path.events_per_packet:
        return most
    free = 1 / (rtt_us / mean_window(path) + _timer_us_per_packet(path))
    # Neither limit is met at all times: the sawtooth crosses the smaller one.
    return float(arrival_share * (free**-4 + most**-4) ** -0.25)


def mean_window(path: NetworkPath) -> float:
    """Packets in flight that Reno or CUBIC hold on average under random losses."""
    events = max(path.events_per_packet, 1e-9)
    friendly = MATHIS / sqrt(events)
    if path.congestion_control is CongestionControl.RENO:
        return friendly
    beta, scale = CUBIC_BETA, CUBIC_SCALE
    level = (scale * (3 + beta) / (4 * (1 - beta))) ** 0.25
    return float(max(friendly, level * (path.rtt_us / 1e6 / events) ** 0.75))


def _timer_us_per_packet(path: NetworkPath) -> float:
    """Small windows wait for the timer after a loss; large ones hardly ever do."""
    events = path.events_per_packet
    waits = TIMER_SHARE * min(1.0, SMALL_WINDOW_PACKETS / mean_window(path)) ** 3
    return events * waits * path.timeout_us


def _full_share(path: NetworkPath) -> float:
    """The share of a bottleneck that a sawtooth over a short queue fills."""
    if not path.full_packets:
        return 1.0  # Without a round trip no pipe ever runs dry.
    beta = 0.5 if path.congestion_control is CongestionControl.RENO else CUBIC_BETA
    low = beta * path.overflow_packets / path.full_packets
    return 1.0 if low >= 1 else 1 - (1 - low) ** 2 * beta / (1 - beta) / 2
