"""How a sender's window moves, round trip by round trip: Reno, CUBIC and BBR.

Windows are in packets and times in microseconds. The shapes are those of RFC 5681, RFC 9438 and
Cardwell et al. 2016; what was fitted is in `constants`.
"""

from typing import Protocol

from coordinator.core.transfer import constants
from coordinator.core.transfer.path import CongestionControl, NetworkPath, recovery_rounds


class Congestion(Protocol):
    """A window that grows by rounds and shrinks by losses."""

    heeds_each_loss: bool
    """Whether a loss during the recovery from another one counts too."""

    window: float
    """Packets that may be in flight."""
    slow_start_until: float
    """The window at which growth slows down; what losses have taught outlives a transfer."""
    is_steady: bool
    """Whether it will stay as it is, whatever is lost."""

    def pass_round(self, now_us: float) -> None:
        """A full window was acknowledged without a loss."""

    def note_loss(self, now_us: float) -> None:
        """A window had losses, in one event or more, and acknowledgements revealed them."""

    def note_timeout(self, now_us: float) -> None:
        """Only the timer revealed a loss."""

    def note_idle(self, timeouts: int) -> None:
        """Nothing was sent for so many times the timer."""

    def set_path(self, path: NetworkPath) -> None:
        """The path's numbers are these from now on; the window goes on from where it is."""


class Reno:
    """Half after a loss, one packet more a round (RFC 5681)."""

    beta = constants.RENO_BETA
    heeds_each_loss = False

    def __init__(self, path: NetworkPath) -> None:
        self.window = float(min(constants.INITIAL_WINDOW_PACKETS, path.buffer_packets))
        self.slow_start_until = float("inf")
        self.is_steady = False
        self.set_path(path)

    def set_path(self, path: NetworkPath) -> None:
        self._most = path.buffer_packets
        self._steady_from = float("inf")
        if not path.events_per_packet:
            # What is left of a full queue after a loss still fills the pipe.
            is_deep = self.beta * path.overflow_packets >= path.full_packets
            full = path.full_packets * (1 + constants.HYSTART_SHARE)
            self._steady_from = min(self._most, full if is_deep else self._most)

    def pass_round(self, now_us: float) -> None:
        if self.window < self.slow_start_until:
            grown = constants.SLOW_START_GROWTH * self.window
            self.window = min(grown, self.slow_start_until, self._most)
        else:
            self.window = min(self._window_growth(now_us), self._most)
        self.is_steady = self.window >= self._steady_from

    def note_loss(self, now_us: float) -> None:
        self._remember(now_us)
        self.window = self.slow_start_until = max(2.0, self.window * self.beta)

    def note_timeout(self, now_us: float) -> None:
        self._remember(now_us)
        self.slow_start_until = max(2.0, self.window * self.beta)
        self.window = 1.0

    def note_idle(self, timeouts: int) -> None:
        self.slow_start_until = max(self.slow_start_until, 0.75 * self.window)
        self.window = after_idling(self.window, timeouts)

    def _window_growth(self, now_us: float) -> float:
        return self.window + 1

    def _remember(self, now_us: float) -> None:
        """Keep what growth after this loss depends on."""


class Cubic(Reno):
    """Seven tenths after a loss, then back to the old window along a cubic (RFC 9438)."""

    beta = constants.CUBIC_BETA

    def __init__(self, path: NetworkPath) -> None:
        super().__init__(path)
        self._origin = 0.0
        self._since_us = -1.0
        self._friendly = 0.0
        self._plateau_s = 0.0

    def set_path(self, path: NetworkPath) -> None:
        super().set_path(path)
        self._rtt_us = path.rtt_us
        self._hystart = path.full_packets * (1 + constants.HYSTART_SHARE)

    def pass_round(self, now_us: float) -> None:
        if self.window < self.slow_start_until and self.window >= self._hystart:
            self.slow_start_until = self.window
        super().pass_round(now_us)

    def _window_growth(self, now_us: float) -> float:
        if self._since_us < 0:
            self._start(now_us)
        self._friendly += constants.CUBIC_FRIENDLY_GROWTH
        after_s = (now_us - self._since_us + self._rtt_us) / 1e6 - self._plateau_s
        target = self._origin + constants.CUBIC_SCALE * after_s * after_s * after_s
        # Half as much again is the most that a round may add.
        return max(self.window, min(target, 1.5 * self.window), self._friendly)

    def _start(self, now_us: float) -> None:
        """Growth begins: from the window that the last loss left, towards the one it took."""
        self._since_us = now_us
        self._friendly = self.window
        missing = max(0.0, self._origin - self.window)
        self._origin = max(self._origin, self.window)
        self._plateau_s = (missing / constants.CUBIC_SCALE) ** (1 / 3)

    def _remember(self, now_us: float) -> None:
        # Fast convergence: a flow that lost before it was back makes room.
        is_back = self.window >= self._origin
        self._origin = self.window if is_back else self.window * (1 + self.beta) / 2
        self._since_us = -1.0


class Bbr:
    """The bottleneck's rate, whatever is lost on the way, within what the buffers hold."""

    heeds_each_loss = True

    def __init__(self, path: NetworkPath) -> None:
        self.window = float(constants.INITIAL_WINDOW_PACKETS)
        self.slow_start_until = float("inf")
        self.set_path(path)

    def set_path(self, path: NetworkPath) -> None:
        self._most = bbr_window(path)
        self.window = min(self.window, self._most)
        self.is_steady = self.window >= self._most

    def pass_round(self, now_us: float) -> None:
        self._grow(constants.BBR_STARTUP_GROWTH)

    def note_loss(self, now_us: float) -> None:
        self._grow(constants.BBR_LOSSY_GROWTH)

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
    least = min(window, float(constants.INITIAL_WINDOW_PACKETS))
    return max(least, window / (1 << min(timeouts, 30)))


def bbr_window(path: NetworkPath) -> float:
    """Packets that BBR keeps in flight once it knows the path, holes of lost ones not counted."""
    most = min(
        path.buffer_packets
        / recovery_rounds(path.events_per_packet, path.loss, path.buffer_packets),
        constants.BBR_WINDOW_GAIN * path.full_packets,
        path.overflow_packets,
    )
    if path.loss > constants.BBR_LOSS_LIMIT:
        most *= (constants.BBR_LOSS_LIMIT / path.loss) ** 2
    return max(float(constants.SMALL_WINDOW_PACKETS), most)


def bbr_utilisation(path: NetworkPath) -> float:
    """The share of the bottleneck that BBR uses between its probes for the lowest RTT."""
    idle = constants.BBR_IDLE_SHARE + constants.BBR_IDLE_SHARE_PER_S * path.rtt_us / 1e6
    return 1 - min(idle, constants.BBR_IDLE_SHARE_MOST)


def congestion(path: NetworkPath) -> Congestion:
    """The window of a connection that has just been opened or was idle for long."""
    match path.congestion_control:
        case CongestionControl.RENO:
            return Reno(path)
        case CongestionControl.CUBIC:
            return Cubic(path)
        case CongestionControl.BBR:
            return Bbr(path)
