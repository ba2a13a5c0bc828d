"""A ring as one replica of a model: its calls, its counts, and the stages that answer."""

from collections.abc import Callable
from typing import NamedTuple

from coordinator.core.serving.state import LeasedReplica
from coordinator.shell.kinds.serving.answer_checks import ReportCheck
from coordinator.shell.kinds.serving.folded_rounds import FoldedRounds, training_parts
from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from coordinator.shell.kinds.serving.replica_link import ReplicaLink
from coordinator.shell.kinds.serving.ring_counter import CountedStage, RingCounter
from coordinator.shell.kinds.serving.ring_driver import RingDriver
from coordinator.shell.kinds.serving.ring_parts import (
    CheckPorts,
    RingPorts,
    StageEvent,
    StageFault,
)
from coordinator.shell.kinds.serving.ring_trainer import RingTrainer
from coordinator.shell.kinds.serving.round_storage import TrainerPorts, stored_layer
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.token_counter import (
    AnswerCounter,
    CountedPart,
    ReportCount,
    UnitTally,
)
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet import Fleet
from hypergpu.ids import NodeId
from hypergpu.rings.ring_adapter import trained_values
from hypergpu.rings.stage_work import ModelCut
from hypergpu.serving.calls import AnswerPart, ModelCall, ReplicaReady
from hypergpu.serving.tuned_model import VersionOffer
from hypergpu.v1.work_pb2 import WorkOutput

RING = NodeId("ring")
"""Name of a model's ring among its replicas."""


class CallReports(NamedTuple):
    """Has what follows from calls decided on."""

    report_count: ReportCount
    report_check: ReportCheck
    report_wanted: Callable[[], None]
    """Has the model loaded again, which nodes let go of."""
    newest_offer: Callable[[], VersionOffer | None]
    """The newest version of the training that the model follows, with the delta that leads to it;
    None: it follows none.
    """
    report_fault: Callable[[StageFault], None] = lambda _: None
    """Takes the lease of a node that is at fault back."""
    report_stage: Callable[[StageEvent], None] = lambda _: None
    """Has what nodes say of a stage decided on."""
    relay_limit: RelayLimit = RelayLimit()
    """Limit of the bytes that stages of all rings send each other."""
    training: TrainerPorts | None = None
    """What a training through the ring needs; None: it is never trained."""


class RingDeskPorts(NamedTuple):
    """What a ring needs of the calls of its model."""

    note_ready: Callable[[ReplicaLink, ReplicaReady, AnswerCounter | None], None]
    deliver: Callable[[int, list[AnswerPart], bool], None]
    end: Callable[[str], None]
    reports: CallReports
    tally: UnitTally


class RingDesk:
    """The ring of a model.

    Args:
        runtime: The job.
        fleet: Its nodes.
        cut: How the model is cut.
        ports: Its calls.
    """

    def __init__(
        self, runtime: ServeRuntime, fleet: Fleet, cut: ModelCut, ports: RingDeskPorts
    ) -> None:
        self._runtime = runtime
        self._ports = ports
        self._counter = RingCounter(ports.reports.report_count, ports.tally)
        check_ports = CheckPorts(
            lambda: runtime.job,
            ports.reports.report_stage,
            self._counter.window_of,
            self._adapter_values,
        )
        driver_ports = RingPorts(
            ports.deliver,
            self._note_ready,
            self._end,
            ports.reports.report_fault,
            self._count,
            check_ports,
            {},
        )
        self._folding: FoldedRounds | None = None
        training = runtime.job.request.training
        rings = 1 if training is None else training.rings
        limit = ports.reports.relay_limit
        self.drivers = [
            RingDriver(runtime, fleet, cut, driver_ports, limit, ring) for ring in range(rings)
        ]
        """Drive each ring of a training, or the model's only one; the first one answers."""
        if training is not None and ports.reports.training is not None:
            parts = training_parts(runtime, training, ports.reports.training, ports.tally)
            self._folding = parts.folding
            for ring, driver in enumerate(self.drivers):
                driver.trainer = RingTrainer(runtime, fleet, driver, parts, ring)

    @property
    def driver(self) -> RingDriver:
        """Drives the ring that answers."""
        return self.drivers[0]

    def hear(self, stream: ControlStream, replica: LeasedReplica, output: WorkOutput) -> None:
        """Take in what a node says under its lease; one that stands by does so for all rings.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is malformed.
        """
        self.drivers[replica.ring].hear(stream, output)

    @property
    def node(self) -> NodeId:
        """The node that gives tokens, for callers."""
        seats = self.driver.seats
        return seats[-1].node if seats else RING

    def send(self, number: int, call: ModelCall) -> None:
        """See `ReplicaLink.send`."""
        self.driver.begin(number, call)

    def send_body(self, number: int, body: bytes) -> None:
        """See `ReplicaLink.send_body`: no answer is scored by a ring."""
        raise NotImplementedError(f"call {number}: a ring scores no answers")

    def send_offer(self, number: int, offer: VersionOffer) -> None:
        """See `ReplicaLink.send_offer`: a ring follows no training."""
        raise NotImplementedError(f"offer {number} of {offer.version}: a ring follows no training")

    def is_on(self, stream: ControlStream) -> bool:
        """See `ReplicaLink.is_on`."""
        return any(seat.stream is stream for seat in self.driver.seats)

    def cancel(self, number: int) -> None:
        """See `ReplicaLink.cancel`."""
        self.driver.cancel(number)

    def drop_node(self, node: NodeId) -> None:
        """A node's stream ended."""
        for driver in self.drivers:
            driver.drop_node(node)

    def review_leases(self) -> None:
        """Let go of stages whose lease is void."""
        for driver in self.drivers:
            driver.review_leases()
        if self._folding is not None:
            self._folding.review()

    def _adapter_values(self, layer: int) -> bytes:
        """See `CheckPorts.adapter_values`."""
        training = self._ports.reports.training
        if training is None:
            raise ValueError(f"{self._runtime.job.job_id} trains nothing")
        return trained_values(stored_layer(self._runtime.job, training.storage, layer))

    def _note_ready(self, ready: ReplicaReady) -> None:
        counter = self._counter if self._runtime.job.has_receipts else None
        self._ports.note_ready(self, ready, counter)

    def _end(self, reason: str) -> None:
        self._ports.end(reason)

    def _count(self) -> None:
        """Count for the stages that are there now; a stage is there under one lease."""
        if self._runtime.job.has_receipts:
            self._counter.review(
                CountedStage(seat.node, seat.lease, CountedPart.of(self._runtime.job, seat.span))
                for seat in self.driver.seats
                if seat.stream.signs_counts
            )
