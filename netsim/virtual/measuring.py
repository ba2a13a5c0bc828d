"""Measurements of virtual nodes, made of virtual transfers, and the plans based on them."""

import random
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from coordinator.core.job.commands import EvaluateModel, JudgeUpdates
from coordinator.core.job.events import EvaluationReady, UpdatesJudged
from coordinator.core.job.state import Job
from coordinator.core.measure.observations import add_observation
from coordinator.core.measure.reading import (
    Finish,
    NodeReading,
    Observation,
    PacketTrain,
    RoundTrip,
    SocketReport,
    UpdateVerdict,
)
from coordinator.core.plan.decision import ModelSizes, PlanRequest, RoundPlan
from coordinator.core.plan.planning import plan_round
from coordinator.core.plan.transfers import payload_bits_per_s
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.wire import bulk
from netsim.virtual.agenda import Agenda
from netsim.virtual.node_link import NodeLink

SMALLEST_BYTES = bulk.SMALLEST_BYTES
"""Smallest transfer that is a measurement of the line."""
_NOW = Milliseconds(0)  # stamped when the answer arrives
_PROBE_MS = 2_000
_PROBES_MOST = 10
_TRAIN_MS = 10_000
_TRAINS_MOST = 30
"""As many as are remembered: those before are not worth drawing."""
_TRAIN_PACKETS = 20


class Gauges:
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
        if before.round is None or (part := before.round.participants.get(node)) is None:
            return
        now_ms = self._agenda.now_ms
        took_ms = Milliseconds(now_ms - part.assigned_at_ms)
        if part.plan.forecast_ms and took_ms:
            self.note(node, Finish(now_ms, part.plan.forecast_ms, took_ms))
        self.note(node, UpdateVerdict(now_ms, is_accepted=True))

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
            lost, bursts = link.train(dice, _TRAIN_PACKETS)
            self.note(node, PacketTrain(now_ms, _TRAIN_PACKETS, lost, bursts))
        congestion_control = link.congestion_control
        self.note(node, SocketReport(now_ms, congestion_control, False, congestion_control))


def made_up_evaluation(command: EvaluateModel) -> EvaluationReady:
    """Each round makes the model better."""
    return EvaluationReady(
        at_ms=_NOW,
        round=command.round,
        model=command.model.blob.digest,
        loss=1 / (1 + command.round),
        metric=1 - 1 / (1 + command.round),
        metric_name="accuracy",
    )


def made_up_judgement(command: JudgeUpdates) -> UpdatesJudged:
    """Each update alone is worth half of what its round is."""
    losses = {update.node: 0.9 for update in command.updates}
    return UpdatesJudged(
        at_ms=_NOW, round=command.round, base_loss=1.0, made_loss=0.8, losses=losses
    )
