"""Measures the line to the coordinator while a control stream is up, and reports the results."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine

from gpu_node.shell.probing.intervals import ProbeIntervals
from gpu_node.shell.probing.measurements import Measurements
from gpu_node.shell.probing.trains import (
    BlockedJudgment,
    ProbeTarget,
    judge_train,
    send_train,
)
from hypergpu.v1 import node_pb2
from hypergpu.wire.probing import PACKETS_MAX
from hypergpu.wire.tcp_connections import congestion_control_on, connections_on

Send = Callable[[node_pb2.ControlRequest], None]

_JITTER = 0.25
_UNANSWERED_MAX = 16
"""Probes that may be under way at a time; older ones count as never answered."""
_TRAIN_WAIT_S = 1.0
_TRAIN_WAIT_TRIPS = 4
_SOCKETS_INTERVAL_S = 60.0
"""Time between two looks at the sockets, unless datagrams are blocked."""


class Prober:
    """One for each daemon; it outlives the streams that it probes."""

    def __init__(self, intervals: ProbeIntervals | None = None) -> None:
        self._intervals = intervals or ProbeIntervals()
        self._random = random.Random()
        self.measurements = Measurements(self.note_work)
        self._send: Send = lambda _: None
        self._target: ProbeTarget | None = None
        self._port = 0
        self._greeted_s = 0.0
        self._busy_until_s = -math.inf
        self._has_worked = asyncio.Event()
        self._sent_at_s: dict[int, float] = {}
        self._number = 0
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
        host, self._port = address
        self._target = None
        if welcome.probe_port and welcome.probe_token:
            self._target = ProbeTarget(host, welcome.probe_port, welcome.probe_token)

    def begin(self, send: Send) -> tuple[Coroutine[None, None, None], ...]:
        """Coroutines to run while the stream is up."""
        self._send = send
        self._sent_at_s.clear()
        self._greeted_s = _now_s()
        self._judgment = BlockedJudgment(self._judgment.is_blocked)
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
            probe = node_pb2.RoundTripProbe(sequence=self._number)
            self._send(node_pb2.ControlRequest(round_trip_probe=probe))

    async def _send_reports(self) -> None:
        # The first report comes early: plans wait for it.
        await asyncio.sleep(self._intervals.news_s * self._jitter())
        while True:
            self._look_at_sockets()
            measured = self.measurements.take_report(
                congestion_control=self._congestion_control, is_probing_blocked=self.is_blocked
            )
            if measured.round_trips_us or measured.trains or measured.transfers:
                self._send(node_pb2.ControlRequest(measured=measured))
            await self._wait(self._report_s)

    async def _send_trains(self) -> None:
        await asyncio.sleep(self._intervals.first_train_s * self._jitter())
        while True:
            if self._target is not None:
                self._number += 1
                longest_s = self.measurements.longest_round_trip_us / 1e6
                wait_s = max(_TRAIN_WAIT_S, _TRAIN_WAIT_TRIPS * longest_s)
                train = await send_train(self._target, self._number, wait_s=wait_s)
                self._judgment, believed = judge_train(self._judgment, train)
                for each in believed:
                    self.measurements.add_train(each)
            await self._wait(self._train_s)

    def _round_trip_s(self) -> float:
        """Time between two probes of the control stream; on an idle one heartbeats suffice."""
        is_new = _now_s() - self._greeted_s < self._intervals.fresh_s
        return self._intervals.round_trip_s if self.is_busy or is_new else math.inf

    def _report_s(self) -> float:
        if self.measurements.has_transfers:
            return self._intervals.news_s
        return self._intervals.report_s if self.is_busy else self._intervals.idle_report_s

    def _train_s(self) -> float:
        if self.is_blocked:
            return self._intervals.blocked_train_s
        return self._intervals.train_s if self.is_busy else self._intervals.idle_train_s

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
        if now_s - self._looked_s >= _SOCKETS_INTERVAL_S:
            self._looked_s = now_s
            self._congestion_control = congestion_control_on(self._port)
        if self.is_blocked:
            self._count_retransmissions()

    def _count_retransmissions(self) -> None:
        """Take the kernel's retransmissions for losses, where no datagram gets through.

        They show only the way up, and not how losses cluster: each counts as a burst of its own.
        """
        sent = lost = 0
        counts: dict[int, tuple[int, int]] = {}
        for each in connections_on(self._port):
            before = self._counts.get(each.local_port)
            counts[each.local_port] = (each.segments, each.retransmitted)
            if before is not None and each.segments >= before[0]:
                sent += each.segments - before[0]
                lost += each.retransmitted - before[1]
        self._counts = counts
        if sent > 0:
            kept = min(sent, PACKETS_MAX)
            missing = round(min(max(lost, 0), sent) * kept / sent)
            train = node_pb2.ProbeTrain(sent=kept, lost=missing, bursts=missing)
            self.measurements.add_train(train)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
