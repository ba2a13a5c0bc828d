"""Measures the line to the coordinator while a control stream is up, and reports what it found."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine

from gpu_node.shell.probe.datagrams import Target, sent_train
from gpu_node.shell.probe.findings import Findings, TrainCount
from gpu_node.shell.probe.pace import Pace
from gpu_node.shell.probe.sockets import congestion_control_to, connections_to
from gpu_node.shell.probe.train import Verdict, judge_train
from hypergpu.v1 import node_pb2
from hypergpu.wire.probing import PACKETS_MAX

Say = Callable[[node_pb2.ControlRequest], None]

_JITTER = 0.25
_ASKED_MAX = 16
"""Probes that may be under way at a time; older ones count as never answered."""
_COUNTED_AFTER_S = 1.0
_COUNTED_AFTER_TRIPS = 4
_SOCKETS_S = 60.0
"""Between two looks at the sockets, unless datagrams are blocked."""


class Prober:
    """One for each daemon; it outlives the streams that it probes."""

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._dice = random.Random()
        self.findings = Findings(self.stir)
        self._say: Say = lambda _: None
        self._target: Target | None = None
        self._port = 0
        self._greeted_s = 0.0
        self._busy_until_s = -math.inf
        self._stirred = asyncio.Event()
        self._asked: dict[int, float] = {}
        self._number = 0
        self._verdict = Verdict()
        self._counts: dict[int, tuple[int, int]] = {}
        self._congestion_control = ""
        self._looked_s = -math.inf

    def stir(self) -> None:
        """The node works: from now on it is looked at more closely."""
        self._busy_until_s = _now_s() + self._pace.busy_s
        stirred, self._stirred = self._stirred, asyncio.Event()
        stirred.set()

    def welcomed(self, welcome: node_pb2.Welcome, address: tuple[str, int]) -> None:
        """A stream begins, or the coordinator renews its token.

        Args:
            welcome: What it said.
            address: Host and port that were dialled.
        """
        host, self._port = address
        self._target = None
        if welcome.probe_port and welcome.probe_token:
            self._target = Target(host, welcome.probe_port, welcome.probe_token)

    def begin(self, say: Say) -> tuple[Coroutine[None, None, None], ...]:
        """What is to run while the stream is up."""
        self._say = say
        self._asked.clear()
        self._greeted_s = _now_s()
        self._verdict = Verdict(self._verdict.is_blocked)
        self._looked_s = -math.inf
        return self._ask(), self._report(), self._send_trains()

    def echoed(self, sequence: int) -> None:
        """A probe came back."""
        asked_s = self._asked.pop(sequence, None)
        if asked_s is not None:
            self.findings.round_trip(round((_now_s() - asked_s) * 1e6))

    @property
    def is_busy(self) -> bool:
        """Whether the node takes part in a job, as far as it shows."""
        return _now_s() < self._busy_until_s

    @property
    def is_blocked(self) -> bool:
        """Whether datagrams get nowhere while the control stream does, or have nowhere to go."""
        return self._verdict.is_blocked or self._target is None

    async def _ask(self) -> None:
        while True:
            await self._rest(self._round_trip_s)
            self._number += 1
            self._asked[self._number] = _now_s()
            while len(self._asked) > _ASKED_MAX:
                del self._asked[next(iter(self._asked))]
            probe = node_pb2.RoundTripProbe(sequence=self._number)
            self._say(node_pb2.ControlRequest(round_trip_probe=probe))

    async def _report(self) -> None:
        # The first comes early: plans wait for it.
        await asyncio.sleep(self._pace.news_s * self._spread())
        while True:
            self._look_at_sockets()
            measured = self.findings.take(
                congestion_control=self._congestion_control, is_probing_blocked=self.is_blocked
            )
            if measured.round_trips_us or measured.trains or measured.transfers:
                self._say(node_pb2.ControlRequest(measured=measured))
            await self._rest(self._report_s)

    async def _send_trains(self) -> None:
        await asyncio.sleep(self._pace.first_train_s * self._spread())
        while True:
            if self._target is not None:
                self._number += 1
                longest_s = self.findings.longest_round_trip_us / 1e6
                wait_s = max(_COUNTED_AFTER_S, _COUNTED_AFTER_TRIPS * longest_s)
                train = await sent_train(self._target, self._number, wait_s=wait_s)
                self._verdict, believed = judge_train(self._verdict, train)
                for each in believed:
                    self.findings.train(each)
            await self._rest(self._train_s)

    def _round_trip_s(self) -> float:
        age_s = _now_s() - self._greeted_s
        return self._pace.round_trip(is_busy=self.is_busy, age_s=age_s)

    def _report_s(self) -> float:
        has_transfers = self.findings.has_transfers
        return self._pace.report(is_busy=self.is_busy, has_transfers=has_transfers)

    def _train_s(self) -> float:
        return self._pace.train(is_busy=self.is_busy, is_blocked=self.is_blocked)

    async def _rest(self, interval_s: Callable[[], float]) -> None:
        """Wait for as long as it says, and ask again whenever the node is stirred."""
        began_s, spread = _now_s(), self._spread()
        while True:
            left_s = began_s + interval_s() * spread - _now_s()
            if left_s <= 0:
                return
            try:
                async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                    await self._stirred.wait()
            except TimeoutError:
                return

    def _spread(self) -> float:
        return self._dice.uniform(1 - _JITTER, 1 + _JITTER)

    def _look_at_sockets(self) -> None:
        now_s = _now_s()
        if now_s - self._looked_s >= _SOCKETS_S:
            self._looked_s = now_s
            self._congestion_control = congestion_control_to(self._port)
        if self.is_blocked:
            self._count_retransmissions()

    def _count_retransmissions(self) -> None:
        """Where no datagram gets through: what the kernel had to send again stands for losses.

        It only sees the way up, and not how losses cluster: each is taken for a burst of its own.
        """
        sent = lost = 0
        counts: dict[int, tuple[int, int]] = {}
        for each in connections_to(self._port):
            before = self._counts.get(each.local_port)
            counts[each.local_port] = (each.segments, each.retransmitted)
            if before is not None and each.segments >= before[0]:
                sent += each.segments - before[0]
                lost += each.retransmitted - before[1]
        self._counts = counts
        if sent > 0:
            kept = min(sent, PACKETS_MAX)
            missing = round(min(max(lost, 0), sent) * kept / sent)
            self.findings.train(TrainCount(kept, missing, missing))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
