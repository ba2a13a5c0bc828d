"""A node's link on virtual time: messages and transfers over it, and what is measured with them.

Times of transfers come from the transfer model. Jitter is drawn for each message by itself: in a
world messages are farther apart than jitter remembers. Messages of one direction keep their order.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import (
    Finish,
    NodeReading,
    Observation,
    PacketTrain,
    RoundTrip,
    SocketReport,
)
from coordinator.core.network.tcp import (
    HANDSHAKE_RTTS,
    INITIAL_WINDOW_PACKETS,
    STREAM_WINDOW_PACKETS,
    CongestionControl,
    NetworkPath,
    after_idling,
)
from coordinator.core.network.transfer_forecast import (
    CarriedWindow,
    forecast_transfer,
    round_path,
    stall_us,
)
from coordinator.core.training.job.commands import EvaluateModel
from coordinator.core.training.job.events import EvaluationReady
from coordinator.core.training.job.state import Job
from coordinator.core.training.plan.decision import ModelSizes, PlanRequest, RoundPlan
from coordinator.core.training.plan.planning import plan_round
from coordinator.core.training.plan.uploads import payload_bits_per_s
from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Microseconds, Milliseconds
from netsim.link import STALLED_BITS_PER_S, Link, LinkCourse, LinkDirection, most_loss
from netsim.virtual.sharing import Agenda, SharedLink, SharedTransfer

_WINDOW_STEP = 1.5
"""Windows are told apart by so much, so that transfers share forecasts."""
_STRETCHES_MOST = 1000
"""A transfer that outlives this many changes of its link goes on over the last one."""


class TransferWay(StrEnum):
    """A direction, as the node sees it."""

    UP = "up"
    DOWN = "down"


class CoordinatorLine:
    """The coordinator's own link, which all nodes share."""

    def __init__(self, agenda: Agenda, link: Link) -> None:
        self.link = link
        self.shared = {
            TransferWay.UP: SharedLink(agenda, link.down.bits_per_s),
            TransferWay.DOWN: SharedLink(agenda, link.up.bits_per_s),
        }

    def joined_link(self, link: Link) -> Link:
        """Return a node's link and this one as one, with the node's own bottleneck."""
        return msgspec.structs.replace(
            link, up=_join(link.up, self.link.down), down=_join(link.down, self.link.up)
        )


class NodeLink:
    """One node's way to the coordinator and back.

    Args:
        agenda: Virtual time.
        course: The link over time.
        dice: Jitter, and where losses fall.
        line: The coordinator's own link.
    """

    def __init__(
        self,
        agenda: Agenda,
        course: LinkCourse,
        dice: random.Random,
        line: CoordinatorLine,
    ) -> None:
        self._agenda = agenda
        self._course = course
        self._dice = dice
        self._line = line
        self._from_us, self._until_us = 0, -1
        self._link = line.joined_link(course.at(0))
        self._paths: dict[TransferWay, NetworkPath] = {}
        self._delays: dict[TransferWay, _Delay] = {}
        self._last_ms = {TransferWay.UP: 0, TransferWay.DOWN: 0}
        self._moves: dict[SharedTransfer, SharedLink] = {}
        self._carried: dict[TransferWay, CarriedWindow] = {}
        """What transfers over the present connection have left."""
        self._moved_ms = 0

    def message_ms(self, way: TransferWay) -> Milliseconds:
        """Until a message sent now is there, which is not before those sent earlier."""
        now_ms = self._agenda.now_ms
        self._look(now_ms * 1000)
        delay_us = self._delays[way].draw_us(self._dice)
        path = self._paths[way]
        if path.loss and self._dice.random() < path.loss:
            delay_us += stall_us(path)
        if path.bits_per_s == STALLED_BITS_PER_S:
            delay_us += self._until_us - now_ms * 1000
        self._last_ms[way] = max(self._last_ms[way], now_ms + -(-delay_us // 1000))
        return Milliseconds(self._last_ms[way] - now_ms)

    def round_trip_us(self, dice: random.Random) -> Microseconds:
        """Return the round-trip time of a probe sent now."""
        self._look(self._agenda.now_ms * 1000)
        return Microseconds(sum(self._delays[way].draw_us(dice) for way in TransferWay))

    def train(self, dice: random.Random, packets: int) -> tuple[int, int]:
        """Losses and bursts of losses among datagrams sent and echoed now."""
        self._look(self._agenda.now_ms * 1000)
        lost_packets = bursts = 0
        is_bad = dict.fromkeys(TransferWay, False)
        was_lost = False
        for _ in range(packets):
            for way, path in self._paths.items():
                ends = 1 / max(1.0, path.burst_packets)
                chance = 1 - ends if is_bad[way] else path.events_per_packet
                is_bad[way] = dice.random() < chance
            is_lost = any(is_bad.values())
            lost_packets += is_lost
            bursts += is_lost and not was_lost
            was_lost = is_lost
        return lost_packets, bursts

    @property
    def congestion_control(self) -> str:
        """Congestion control of the hosts at both ends."""
        self._look(self._agenda.now_ms * 1000)
        return self._paths[TransferWay.UP].congestion_control.value

    def dial_ms(self) -> Milliseconds:
        """Until a connection is open: handshakes, each there and back."""
        there_and_back = self.message_ms(TransferWay.UP) + self.message_ms(TransferWay.DOWN)
        return Milliseconds(HANDSHAKE_RTTS * there_and_back)

    def move(
        self,
        way: TransferWay,
        size_bytes: Bytes,
        callback: Callable[[int], None],
        *,
        wait_ms: int,
        connections: int = 1,
    ) -> None:
        """Move bytes and then call ``callback`` with the milliseconds that it took.

        Args:
            way: Where to.
            size_bytes: Payload.
            callback: Called also when the transfer is cut off, then at once.
            wait_ms: What passes besides: a request on its way, a slow disk.
            connections: That share the bytes equally.
        """
        begun_ms = self._agenda.now_ms
        shared_link = self._line.shared[way]
        own_ms = Milliseconds(wait_ms + self.transfer_ms(way, size_bytes, connections))

        def finish() -> None:
            self._moves.pop(move, None)
            # Nothing points in circles then, and the collector has nothing to look for.
            move.callback = _nothing
            self._moved_ms = self._agenda.now_ms
            callback(self._agenda.now_ms - begun_ms)

        move = SharedTransfer(finish)
        self._moves[move] = shared_link
        shared_link.begin(move, size_bytes, own_ms)

    def cut(self) -> None:
        """End all transfers now."""
        for move, shared_link in list(self._moves.items()):
            if move.is_gone:
                continue  # It ended in this very moment, and its callback is about to be called.
            shared_link.drop(move)
            self._agenda.after(0, move.callback)
        self._moves.clear()
        self._carried.clear()

    def transfer_ms(
        self, way: TransferWay, size_bytes: Bytes, connections: int = 1
    ) -> Milliseconds:
        """How long the bytes would take if the coordinator's own link were without limit."""
        begun_us = now_us = self._agenda.now_ms * 1000
        # The last of some connections to be through is the one that counts.
        chance = self._dice.random() ** (1 / connections)
        part_bytes = Bytes(-(-size_bytes // connections))
        carry_over = self._carried_over(way)
        done_share = 0.0
        whole_us = 0
        for _ in range(_STRETCHES_MOST):
            self._look(now_us)
            path = self._paths[way]
            is_stalled = path.bits_per_s == STALLED_BITS_PER_S
            if not is_stalled:
                own = _shared_out(path, connections)
                forecast = forecast_transfer(own, part_bytes, carry_over)
                self._carried[way] = forecast.sample_left(chance)
                whole_us = forecast.sample_us(chance)
                if now_us + (1 - done_share) * whole_us <= self._until_us:
                    break
                done_share += (self._until_us - now_us) / whole_us
            now_us = self._until_us
        took_us = now_us - begun_us + round((1 - done_share) * whole_us)
        return Milliseconds(-(-took_us // 1000))

    def _carried_over(self, way: TransferWay) -> CarriedWindow | None:
        """What the time without transfers has left of the last one's window; None: it is fresh."""
        if way not in self._carried:
            return None
        self._look(self._agenda.now_ms * 1000)
        window, threshold = self._carried[way]
        path = self._paths[way]
        timeouts = (self._agenda.now_ms - self._moved_ms) * 1000 // path.timeout_us
        if timeouts and path.congestion_control is not CongestionControl.BBR:
            threshold = max(threshold, 0.75 * window)
            window = after_idling(window, timeouts)
        return CarriedWindow(min(_near(window), STREAM_WINDOW_PACKETS), _near(threshold))

    def _look(self, now_us: int) -> None:
        """Bring the link up to date."""
        if self._from_us <= now_us < self._until_us:
            return
        link = self._link = self._line.joined_link(self._course.at(now_us))
        self._from_us = now_us
        self._until_us = self._course.next_change_us(now_us)
        self._paths = {
            TransferWay.UP: path_of(link, link.up),
            TransferWay.DOWN: path_of(link, link.down),
        }
        self._delays = {TransferWay.UP: _Delay.of(link.up), TransferWay.DOWN: _Delay.of(link.down)}


def _shared_out(path: NetworkPath, connections: int) -> NetworkPath:
    """What one of several connections has of the path: losses are its own, the rate is not."""
    if connections == 1:
        return path
    return msgspec.structs.replace(path, bits_per_s=path.bits_per_s // connections)


def path_of(link: Link, direction: LinkDirection) -> NetworkPath:
    """What the transfer model needs to know of a direction."""
    path = NetworkPath(
        rtt_us=link.rtt_us,
        bits_per_s=direction.bits_per_s,
        loss=direction.loss,
        burst_packets=direction.burst_packets,
        queue_ms=direction.queue_ms,
        congestion_control=link.congestion_control,
    )
    return path if direction.bits_per_s == STALLED_BITS_PER_S else round_path(path)


def _join(own: LinkDirection, line: LinkDirection) -> LinkDirection:
    if not (line.delay_us or line.jitter_us or line.loss):
        return own
    return msgspec.structs.replace(
        own,
        delay_us=own.delay_us + line.delay_us,
        jitter_us=round(math.hypot(own.jitter_us, line.jitter_us)),
        loss=min(1 - (1 - own.loss) * (1 - line.loss), most_loss(own.burst_packets)),
    )


class _Delay(NamedTuple):
    """Lognormal with a direction's mean and spread: late more often than early."""

    mean_us: int
    sigma: float

    @classmethod
    def of(cls, direction: LinkDirection) -> "_Delay":
        if not direction.jitter_us or not direction.delay_us:
            return cls(direction.delay_us, 0.0)
        variance = math.log1p((direction.jitter_us / direction.delay_us) ** 2)
        return cls(direction.delay_us, math.sqrt(variance))

    def draw_us(self, dice: random.Random) -> int:
        if not self.sigma:
            return self.mean_us
        factor = math.exp(self.sigma * (dice.gauss(0.0, 1.0) - self.sigma / 2))
        return round(self.mean_us * factor)


def _nothing() -> None:
    """The callback of a transfer that is over."""


def _near(packets: float) -> float:
    """The next smaller of the windows that are told apart."""
    if math.isinf(packets):
        return packets
    steps = math.floor(math.log(max(packets, 1) / INITIAL_WINDOW_PACKETS, _WINDOW_STEP))
    return float(INITIAL_WINDOW_PACKETS * _WINDOW_STEP**steps)


_NOW = Milliseconds(0)  # stamped when the answer arrives
_PROBE_MS = 2_000
_PROBES_MOST = 10
_TRAIN_MS = 10_000
_TRAINS_MOST = 30
"""As many as are remembered: those before are not worth drawing."""
_TRAIN_PACKETS = 20


class NodeMeasurements:
    """Readings of nodes. They are lost with the coordinator's process.

    Probes are drawn when a plan asks for them, for all the time since the last plan at once: what a
    line was meanwhile is not asked, only what it is now.

    Args:
        agenda: Virtual time.
        sizes: What plans are told that moves.
        seed: Of the probes' dice.
        line_bits_per_s: The coordinator's line in the direction of uploads; 0: no limit.
    """

    def __init__(
        self, agenda: Agenda, sizes: ModelSizes, *, seed: int, line_bits_per_s: int = 0
    ) -> None:
        self.is_needed = False
        """Whether any job plans by measurements; without one nothing is kept."""
        self._agenda = agenda
        self._sizes = sizes
        self._seed = seed
        self._line_bits_per_s = payload_bits_per_s(line_bits_per_s)
        self._readings: dict[NodeId, NodeReading] = {}
        self._probed_ms: dict[NodeId, Milliseconds] = {}
        self._dice: dict[NodeId, random.Random] = {}

    def note(self, node: NodeId, observation: Observation) -> None:
        """One thing was observed."""
        if self.is_needed:
            reading = self._readings.get(node, NodeReading())
            self._readings[node] = add_observation(reading, observation)

    def note_accepted(self, before: Job, node: NodeId) -> None:
        """An update is in, of a job as it was before."""
        if (part := before.participant(node)) is None:
            return
        now_ms = self._agenda.now_ms
        took_ms = Milliseconds(now_ms - part.assigned_at_ms)
        if part.plan.forecast_ms and took_ms:
            self.note(node, Finish(now_ms, part.plan.forecast_ms, took_ms))

    def forget(self) -> None:
        """The process is gone."""
        self._readings.clear()
        self._probed_ms.clear()

    def plan_round_now(self, request: PlanRequest, links: Mapping[NodeId, NodeLink]) -> RoundPlan:
        """The plan of a round, by what is known now."""
        for node in request.candidates:
            if node in links:
                self._probe(node, links[node])
        now = replace(request, at_ms=self._agenda.now_ms, line_bits_per_s=self._line_bits_per_s)
        return plan_round(now, self._readings_of(request.candidates), self._sizes)

    def readings_now(self, links: Mapping[NodeId, NodeLink]) -> dict[NodeId, NodeReading]:
        """Readings of all nodes. Those with a link are connected, and probed."""
        for node, link in links.items():
            self._probe(node, link)
        return dict(self._readings)

    def _readings_of(self, nodes: Iterable[NodeId]) -> dict[NodeId, NodeReading]:
        return {node: self._readings.get(node, NodeReading()) for node in nodes}

    def _probe(self, node: NodeId, link: NodeLink) -> None:
        now_ms = self._agenda.now_ms
        since_ms = now_ms - self._probed_ms.get(node, Milliseconds(0))
        self._probed_ms[node] = now_ms
        dice = self._dice.setdefault(node, random.Random(f"{self._seed}/probes/{node}"))
        for _ in range(min(_PROBES_MOST, 1 + since_ms // _PROBE_MS)):
            self.note(node, RoundTrip(now_ms, link.round_trip_us(dice)))
        for _ in range(min(_TRAINS_MOST, 1 + since_ms // _TRAIN_MS)):
            lost_packets, bursts = link.train(dice, _TRAIN_PACKETS)
            self.note(node, PacketTrain(now_ms, _TRAIN_PACKETS, lost_packets, bursts))
        congestion_control = link.congestion_control
        self.note(node, SocketReport(now_ms, congestion_control, False, congestion_control))


def simulated_evaluation(command: EvaluateModel) -> EvaluationReady:
    """Each round makes the model better."""
    return EvaluationReady(
        at_ms=_NOW,
        round=command.round,
        model=command.model.blob.digest,
        loss=1 / (1 + command.round),
        metric=1 - 1 / (1 + command.round),
        metric_name="accuracy",
    )
