"""Measures the line to the coordinator while a control stream is up: round trips, losses, goodput.

A train of datagrams that lost everything is kept back until the next: either something comes
through again, and it was an outage that counts, or three in a row are gone while the control stream
lives, and then datagrams are blocked here, which says nothing of the line.
"""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Set
from typing import Any, NamedTuple

import msgspec

from gpu_node.core.link import is_paced
from gpu_node.shell.link.calls import Measurements
from hypergpu.units import Milliseconds
from hypergpu.v1 import measurement_pb2, node_pb2
from hypergpu.v1.measurement_pb2 import ProbeTrain
from hypergpu.wire.datagrams import PACKETS_MAX, Numbers, datagram, numbers_of
from hypergpu.wire.tcp_counters import congestion_control_on, connections_on

PACKETS = 20
BLOCKED_AFTER = 3
"""Trains in a row of which nothing came back."""
_SPACING_S = 0.005
"""Time between two packets: a train takes a tenth of a second, as long as a burst of losses may."""


class ProbeTarget(NamedTuple):
    """Address that trains are sent to, and the token that it answers to."""

    host: str
    port: int
    token: bytes


async def send_train(target: ProbeTarget, number: int, *, wait_s: float) -> ProbeTrain:
    """Send a train and count the packets back ``wait_s`` after its last one.

    Each train has a socket of its own: late packets of one are not taken for another's. ICMP errors
    change nothing: those packets are lost, and the others may still be on their way.
    """
    loop = asyncio.get_running_loop()
    receiver = _EchoReceiver(target.token, number)
    try:
        transport, _ = await loop.create_datagram_endpoint(
            lambda: receiver, remote_addr=(target.host, target.port)
        )
    except OSError:
        return ProbeTrain(sent=PACKETS, lost=PACKETS, bursts=1)
    try:
        for packet in range(PACKETS):
            transport.sendto(datagram(target.token, Numbers(number, packet)))
            await asyncio.sleep(_SPACING_S)
        async with asyncio.timeout(wait_s):
            await receiver.is_complete.wait()
    except TimeoutError:
        pass
    finally:
        transport.close()
    return count_missing(PACKETS, receiver.arrived)


class _EchoReceiver(asyncio.DatagramProtocol):
    """Collects echoes and ignores errors: one packet's says nothing of the others."""

    def __init__(self, token: bytes, train: int) -> None:
        self._token = token
        self._train = train
        self.arrived: set[int] = set()
        self.is_complete = asyncio.Event()
        """Every packet is back."""

    def datagram_received(self, payload: bytes, addr: Any) -> None:
        numbers = numbers_of(payload, self._token)
        if numbers is None or numbers.train != self._train or numbers.packet >= PACKETS:
            return
        self.arrived.add(numbers.packet)
        if len(self.arrived) == PACKETS:
            self.is_complete.set()


def count_missing(sent: int, arrived: Set[int]) -> ProbeTrain:
    """The number of missing packets of ``0 .. sent - 1``, and of the runs that they form."""
    absences = [packet not in arrived for packet in range(sent)]
    begins = [
        is_missing and not (at and absences[at - 1]) for at, is_missing in enumerate(absences)
    ]
    return ProbeTrain(sent=sent, lost=sum(absences), bursts=sum(begins))


class BlockedJudgment(NamedTuple):
    """Whether datagrams are blocked, as far as trains show."""

    is_blocked: bool = False
    unjudged: tuple[ProbeTrain, ...] = ()
    """Trains that lost everything and may be an outage or a blocked port."""


def judge_train(
    before: BlockedJudgment, train: ProbeTrain
) -> tuple[BlockedJudgment, tuple[ProbeTrain, ...]]:
    """The judgment after another train, and the trains that now count."""
    if train.lost < train.sent:
        return BlockedJudgment(), (*before.unjudged, train)
    if before.is_blocked or len(before.unjudged) + 1 >= BLOCKED_AFTER:
        return BlockedJudgment(is_blocked=True), ()
    return BlockedJudgment(unjudged=(*before.unjudged, train)), ()


class ProbeIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two measurements of each kind, before jitter."""

    round_trip_s: float = 2.0
    """While the node takes part in a job or is new."""
    first_train_s: float = 1.0
    train_s: float = 10.0
    """While it takes part in a job."""
    idle_train_s: float = 60.0
    idle_train_beats: int = 12
    """So many heartbeats instead, if that is longer: where many nodes are, each is to say less."""
    blocked_train_s: float = 120.0
    report_s: float = 5.0
    """While it takes part in a job."""
    idle_report_s: float = 30.0
    idle_report_beats: int = 6
    """So many heartbeats instead, if that is longer."""
    news_s: float = 1.0
    """Time to the next report when a transfer has ended."""
    fresh_s: float = 10.0
    """Time after a greeting in which a node counts as new."""
    busy_s: float = 30.0
    """Time after its last sign of work in which a node counts as taking part in a job."""


Send = Callable[[node_pb2.ControlRequest], None]

_JITTER = 0.25
_UNANSWERED_MAX = 16
"""Probes that may be under way at a time; older ones count as never answered."""
_TRAIN_WAIT_S = 1.0
_TRAIN_WAIT_TRIPS = 4
_SOCKETS_INTERVAL_S = 60.0
"""Time between two looks at the sockets of a busy node; of an idle one a look a stream will do."""


class Prober:
    """One for each daemon; it outlives the streams that it probes."""

    def __init__(self, intervals: ProbeIntervals | None = None) -> None:
        self._intervals = intervals or ProbeIntervals()
        self._random = random.Random()
        self.measurements = Measurements(self.note_work)
        self._send: Send = lambda _: None
        self._target: ProbeTarget | None = None
        self._port = 0
        self._heartbeat_s = 0.0
        self._greeted_s = 0.0
        self._busy_until_s = -math.inf
        self._has_worked = asyncio.Event()
        self._sent_at_s: dict[int, float] = {}
        self._number = 0
        self._has_sent_trains = self._is_known = False
        self._judgment = BlockedJudgment()
        self._counts: dict[int, tuple[int, int]] = {}
        self._congestion_control = ""
        self._looked_s = -math.inf

    def note_work(self) -> None:
        """Note a sign of work: from now on measurements are more frequent."""
        self._busy_until_s = _now_s() + self._intervals.busy_s
        before, self._has_worked = self._has_worked, asyncio.Event()
        before.set()

    def set_target(self, welcome: node_pb2.Welcome, address: tuple[str, int]) -> None:
        """Take the target of trains from a welcome, at the begin of a stream or later.

        Args:
            welcome: Message of the coordinator.
            address: Host and port of the coordinator's listener for nodes.
        """
        self._heartbeat_s = welcome.heartbeat_interval_ms / 1000
        host, self._port = address
        self._target = None
        if welcome.probe_port and welcome.probe_token:
            self._target = ProbeTarget(host, welcome.probe_port, welcome.probe_token)

    def begin(self, send: Send, pace_ms: Milliseconds) -> tuple[Coroutine[None, None, None], ...]:
        """Coroutines to run while the stream is up.

        Args:
            send: Sends a message over it.
            pace_ms: Interval of heartbeats by which the node dials: the one that it was just told,
                or a longer one before.
        """
        self._send = send
        self._sent_at_s.clear()
        self._greeted_s = _now_s()
        # Thousands may have come back at once: what they measured before is good enough.
        self._is_known = self._has_sent_trains and is_paced(pace_ms)
        self._judgment = BlockedJudgment(self._judgment.is_blocked)
        if not self._is_known:
            self._looked_s = -math.inf
        return self._send_probes(), self._send_reports(), self._send_trains()

    def note_echo(self, sequence: int) -> None:
        """Note that a probe came back."""
        sent_at_s = self._sent_at_s.pop(sequence, None)
        if sent_at_s is not None:
            self.measurements.add_round_trip(round((_now_s() - sent_at_s) * 1e6))

    @property
    def is_busy(self) -> bool:
        """Whether the node takes part in a job, as far as it shows."""
        return _now_s() < self._busy_until_s

    @property
    def is_blocked(self) -> bool:
        """Whether datagrams get nowhere while the control stream does, or have nowhere to go."""
        return self._judgment.is_blocked or self._target is None

    async def _send_probes(self) -> None:
        while True:
            await self._wait(self._round_trip_s)
            self._number += 1
            self._sent_at_s[self._number] = _now_s()
            while len(self._sent_at_s) > _UNANSWERED_MAX:
                del self._sent_at_s[next(iter(self._sent_at_s))]
            probe = measurement_pb2.RoundTripProbe(sequence=self._number)
            self._send(node_pb2.ControlRequest(round_trip_probe=probe))

    async def _send_reports(self) -> None:
        await self._wait(self._first_report_s)
        while True:
            self._look_at_sockets()
            report = self.measurements.take_report(
                congestion_control=self._congestion_control, is_probing_blocked=self.is_blocked
            )
            if report.round_trips_us or report.trains or report.transfers:
                self._send(node_pb2.ControlRequest(measured=report))
            await self._wait(self._report_s)

    async def _send_trains(self) -> None:
        await self._wait(self._first_train_s)
        while True:
            if self._target is not None:
                self._number += 1
                longest_s = self.measurements.longest_round_trip_us / 1e6
                wait_s = max(_TRAIN_WAIT_S, _TRAIN_WAIT_TRIPS * longest_s)
                train = await send_train(self._target, self._number, wait_s=wait_s)
                self._has_sent_trains = True
                self._judgment, believed_trains = judge_train(self._judgment, train)
                for each in believed_trains:
                    self.measurements.add_train(each)
            await self._wait(self._train_s)

    def _round_trip_s(self) -> float:
        """Time between two probes of the control stream; on an idle one heartbeats suffice."""
        is_new = not self._is_known and _now_s() - self._greeted_s < self._intervals.fresh_s
        return self._intervals.round_trip_s if self.is_busy or is_new else math.inf

    def _first_train_s(self) -> float:
        return self._train_s() if self._is_known else self._intervals.first_train_s

    def _first_report_s(self) -> float:
        """It comes early: plans wait for it."""
        return self._report_s() if self._is_known else self._intervals.news_s

    def _report_s(self) -> float:
        if self.measurements.has_transfers:
            return self._intervals.news_s
        if self.is_busy:
            return self._intervals.report_s
        beats_s = self._intervals.idle_report_beats * self._heartbeat_s
        return max(self._intervals.idle_report_s, beats_s)

    def _train_s(self) -> float:
        if self.is_blocked:
            return self._intervals.blocked_train_s
        if self.is_busy:
            return self._intervals.train_s
        beats_s = self._intervals.idle_train_beats * self._heartbeat_s
        return max(self._intervals.idle_train_s, beats_s)

    async def _wait(self, interval_s: Callable[[], float]) -> None:
        """Wait for an interval, which is taken anew at each sign of work."""
        began_s, spread = _now_s(), self._jitter()
        while True:
            left_s = began_s + interval_s() * spread - _now_s()
            if left_s <= 0:
                return
            try:
                async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                    await self._has_worked.wait()
            except TimeoutError:
                return

    def _jitter(self) -> float:
        return self._random.uniform(1 - _JITTER, 1 + _JITTER)

    def _look_at_sockets(self) -> None:
        now_s = _now_s()
        is_due = self.is_busy and now_s - self._looked_s >= _SOCKETS_INTERVAL_S
        if is_due or math.isinf(self._looked_s):
            self._looked_s = now_s
            self._congestion_control = congestion_control_on(self._port)
        if self.is_blocked:
            self._count_retransmissions()

    def _count_retransmissions(self) -> None:
        """Take the kernel's retransmissions for losses, where no datagram gets through.

        They show only the way up, and not how losses cluster: each counts as a burst of its own.
        """
        sent_count = lost_count = 0
        counts: dict[int, tuple[int, int]] = {}
        for each in connections_on(self._port):
            before = self._counts.get(each.local_port)
            counts[each.local_port] = (each.segments, each.retransmitted)
            if before is not None and each.segments >= before[0]:
                sent_count += each.segments - before[0]
                lost_count += each.retransmitted - before[1]
        self._counts = counts
        if sent_count > 0:
            train_packets = min(sent_count, PACKETS_MAX)
            lost_packets = round(min(max(lost_count, 0), sent_count) * train_packets / sent_count)
            train = measurement_pb2.ProbeTrain(
                sent=train_packets, lost=lost_packets, bursts=lost_packets
            )
            self.measurements.add_train(train)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
