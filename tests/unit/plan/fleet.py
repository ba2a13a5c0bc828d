"""Nodes with true speeds and lines that play rounds as planned: what is measured of them goes
through `coordinator.core.network` into the next plan.

Transfers are drawn from the transfer model; there is no network and no clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from coordinator.core.network import reading as seen
from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import NodeReading, TransferDirection
from coordinator.core.network.tcp import CongestionControl, NetworkPath
from coordinator.core.network.transfer_forecast import draw_transfer
from coordinator.core.training.plan.decision import (
    ModelSizes,
    NodePlan,
    NodeResult,
    PlanMemory,
    PlanRequest,
    RoundPlan,
)
from coordinator.core.training.plan.planning import plan_round
from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import Aware, Data, JobSpec, RoundRule, TrainingSettings
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples

PARAMETERS = 1_000_000
BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4.06, "topk256": 1, "topk64": 0.23}
SIZES = ModelSizes(
    {codec: Bytes(int(PARAMETERS * bits / 8)) for codec, bits in BITS.items()},
    Bytes(4 * PARAMETERS),
)


@dataclass(frozen=True)
class Truth:
    """A node as it is, which nobody knows."""

    step_ms: float = 50.0
    up_mbit_s: float = 20.0
    down_mbit_s: float = 50.0
    rtt_ms: float = 40.0
    loss: float = 0.0
    congestion_control: str = "cubic"
    fixed_ms: float = 0.0
    """Part of a step that takes as long whatever its batch."""

    def computing_ms(self, plan: NodePlan, stated_batch: int) -> float:
        """What the steps of a plan take, where a step of the stated batch takes ``step_ms``."""
        share = plan.batch(stated_batch) / stated_batch
        return plan.inner_steps * (self.fixed_ms + (self.step_ms - self.fixed_ms) * share)

    def path(self, way: TransferDirection, connections: int = 1) -> NetworkPath:
        mbit_s = self.up_mbit_s if way is TransferDirection.UP else self.down_mbit_s
        return NetworkPath(
            rtt_us=Microseconds(int(self.rtt_ms * 1000)),
            bits_per_s=int(mbit_s * 1e6 / connections),
            loss=self.loss,
            congestion_control=CongestionControl(self.congestion_control),
        )


def spec(
    *,
    nodes: int,
    rounds: int = 400,
    inner_steps: int = 20,
    sharding: str = "iid",
    quorum: float = 0.6,
    aware: Aware | None = None,
) -> JobSpec:
    """A job of the strategy ``aware``."""
    return JobSpec(
        workload="digits-cnn",
        strategy="aware",
        training=TrainingSettings(rounds=rounds, inner_steps=inner_steps, nodes=nodes),
        round=RoundRule(quorum=quorum),
        data=Data(sharding=sharding),
        aware=aware or Aware(),
    )


def overlapping(job: JobSpec) -> JobSpec:
    """The same with rounds that overlap."""
    return replace(
        job,
        round=replace(job.round, overlap="eager"),
        outer=replace(job.outer, momentum=0.5),
        aware=replace(job.aware, sparsest="int4"),
    )


def total_samples(job: JobSpec) -> Samples:
    """What the job file asks for."""
    training = job.training
    return Samples(training.rounds * training.inner_steps * training.batch_size * training.nodes)


def names(count: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(f"n{number}") for number in range(count))


@dataclass
class Played:
    """One round as it went."""

    plan: RoundPlan
    took_ms: int
    times_ms: dict[NodeId, int]
    """Time of each participant, whether it was in time or not."""
    cut: frozenset[NodeId]
    samples: int
    utilisation: float
    """Share of the round that the average participant computed."""

    def error(self) -> float:
        """Mean absolute error of the forecasts of those who came in, over what it took."""
        errors = [
            abs(plan.forecast_ms - self.times_ms[node]) / self.times_ms[node]
            for node, plan in self.plan.nodes.items()
            if plan.forecast_ms and node not in self.cut
        ]
        return sum(errors) / len(errors) if errors else 0.0


@dataclass
class PlayedFleet:
    """Rounds played one after the other."""

    job: JobSpec
    truths: dict[NodeId, Truth]
    seed: int = 0
    sizes: ModelSizes = SIZES
    readings: dict[NodeId, NodeReading] = field(default_factory=dict)
    previous: PlanMemory | None = None
    results: dict[NodeId, NodeResult] = field(default_factory=dict)
    number: int = 0
    at_ms: int = 0
    samples_done: int = 0
    agreement: float | None = None

    def __post_init__(self) -> None:
        self._dice = Random(self.seed)

    def request(self, present: Iterable[NodeId]) -> PlanRequest:
        return PlanRequest(
            round=self.number,
            at_ms=Milliseconds(self.at_ms),
            spec=self.job,
            candidates={node: Slot(slot) for slot, node in enumerate(present)},
            samples_done=Samples(self.samples_done),
            samples_total=total_samples(self.job),
            previous=self.previous,
            results=self.results,
            agreement=self.agreement,
        )

    def play(self, *, absent: Iterable[NodeId] = ()) -> Played:
        """Plan a round, play it and learn from it."""
        present = [node for node in self.truths if node not in set(absent)]
        self._probe(present)
        plan = plan_round(self.request(present), self.readings, self.sizes)
        parts = {node: self._parts(node, mine, plan.down) for node, mine in plan.nodes.items()}
        times_ms = {node: int(sum(part) / 1000) + 1 for node, part in parts.items()}
        closed_ms = self._closed_ms(plan, times_ms)
        # Work under a lease over several rounds is in when it is: nobody waits, nothing is cut.
        cut = frozenset(
            node
            for node, took_ms in times_ms.items()
            if took_ms > closed_ms and plan.nodes[node].rounds == 1
        )
        batch = self.job.training.batch_size
        samples = sum(p.inner_steps * p.batch(batch) for n, p in plan.nodes.items() if n not in cut)
        computed_us = sum(min(parts[node][1], closed_ms * 1000) for node in plan.nodes)
        self._learn(plan, parts, closed_ms=closed_ms)
        self.results = {
            node: NodeResult(
                mine,
                Milliseconds(0 if node in cut else times_ms[node]),
                compute_ms=Milliseconds(parts[node][1] // 1000),
            )
            for node, mine in plan.nodes.items()
        }
        self.previous = plan.memory
        self.number += 1
        self.at_ms += closed_ms
        self.samples_done += samples
        utilisation = computed_us / (len(plan.nodes) * closed_ms * 1000)
        return Played(plan, closed_ms, times_ms, cut, samples, utilisation)

    def _closed_ms(self, plan: RoundPlan, times_ms: Mapping[NodeId, int]) -> int:
        order = sorted(ms for node, ms in times_ms.items() if plan.nodes[node].rounds == 1)
        needed_updates = max(1, -(-int(self.job.round.quorum * 100) * len(order) // 100))
        if not plan.deadline_ms:
            return order[-1]
        return min(order[-1], max(int(plan.deadline_ms), order[needed_updates - 1]))

    def _parts(self, node: NodeId, plan: NodePlan, down: str) -> tuple[int, int, int]:
        """Microseconds until the model is there, of computing, and until the update is in."""
        truth = self.truths[node]
        noise = self._dice.lognormvariate(0, 0.03)
        stated_batch = self.job.training.batch_size
        computing_us = int(truth.computing_ms(plan, stated_batch) * 1000 * noise)
        trip = int(truth.rtt_ms * 1000)
        down_us = trip // 2 + self._moving_us(
            node, TransferDirection.DOWN, plan, self.sizes.update_bytes[down]
        )
        up_us = trip // 2 + self._moving_us(
            node, TransferDirection.UP, plan, self.sizes.update_bytes[plan.codec]
        )
        return down_us, computing_us, up_us

    def _moving_us(self, node: NodeId, way: TransferDirection, plan: NodePlan, size: int) -> int:
        path = self.truths[node].path(way, plan.connections)
        share = -(-size // plan.connections)
        draws = range(plan.connections)
        return max(draw_transfer(path, share, self._dice.random).took_us for _ in draws)

    def _probe(self, present: Iterable[NodeId]) -> None:
        at_ms = Milliseconds(self.at_ms)
        for node in present:
            truth = self.truths[node]
            lost_packets = sum(self._dice.random() < truth.loss for _ in range(20))
            self._observe(
                node,
                seen.SocketReport(at_ms, truth.congestion_control, False, truth.congestion_control),
            )
            self._observe(node, seen.PacketTrain(at_ms, 20, lost_packets, lost_packets))
            for _ in range(3):
                took_us = truth.rtt_ms * 1000 * self._dice.uniform(1.0, 1.1)
                self._observe(node, seen.RoundTrip(at_ms, Microseconds(int(took_us))))

    def _learn(
        self, plan: RoundPlan, parts: Mapping[NodeId, tuple[int, int, int]], *, closed_ms: int
    ) -> None:
        """What the coordinator sees of the round until it closes."""
        at_ms = Milliseconds(self.at_ms + closed_ms)
        for node, (down_us, computing_us, up_us) in parts.items():
            mine, left_us = plan.nodes[node], closed_ms * 1000
            if mine.rounds > 1:
                left_us = max(left_us, down_us + computing_us + up_us)
            trip_us = int(self.truths[node].rtt_ms * 500)
            self._transfer(
                node,
                TransferDirection.DOWN,
                mine,
                size=self.sizes.update_bytes[plan.down],
                took_us=down_us - 2 * trip_us,
                at_ms=at_ms,
            )
            left_us -= down_us
            steps = min(mine.inner_steps, mine.inner_steps * left_us // max(1, computing_us))
            took_ms = Milliseconds(int(min(computing_us, left_us)) // 1000)
            stated_batch = self.job.training.batch_size
            full_steps = int(steps) * mine.batch(stated_batch) / stated_batch
            self._observe(node, seen.StepTime(at_ms, full_steps, took_ms))
            left_us -= computing_us
            size, took_us = self.sizes.update_bytes[mine.codec], up_us - 2 * trip_us
            if left_us < up_us:
                size, took_us = Bytes(int(size * max(0, left_us) // up_us)), left_us
            self._transfer(
                node, TransferDirection.UP, mine, size=size, took_us=took_us, at_ms=at_ms
            )
            if left_us >= up_us:
                took_ms = Milliseconds((down_us + computing_us + up_us) // 1000)
                self._observe(node, seen.Finish(at_ms, mine.forecast_ms, took_ms))

    def _transfer(
        self,
        node: NodeId,
        way: TransferDirection,
        plan: NodePlan,
        *,
        size: int,
        took_us: int,
        at_ms: int,
    ) -> None:
        if size > 0 and took_us > 0:
            transfer = seen.TransferTime(
                Milliseconds(at_ms), way, Bytes(size), Microseconds(took_us), plan.connections
            )
            self._observe(node, transfer)

    def _observe(self, node: NodeId, observation: seen.Observation) -> None:
        self.readings[node] = add_observation(self.readings.get(node, NodeReading()), observation)


def replace_truth(fleet: PlayedFleet, node: NodeId, truth: Truth) -> None:
    """From the next round on the node is another one."""
    fleet.truths = {**fleet.truths, node: truth}


def reading_of(
    truth: Truth, *, noise: float = 1.0, error: float = 0.05, reading: NodeReading | None = None
) -> NodeReading:
    """A reading that says what is true, times ``noise``."""
    reading = reading or NodeReading()

    def estimate(mean: float) -> seen.Estimate:
        return seen.Estimate(mean * noise, mean * 0.05, 20)

    sent_packets = 400.0
    return replace(
        reading,
        round_trip_us=estimate(truth.rtt_ms * 1000),
        least_round_trip_us=Microseconds(int(truth.rtt_ms * 1000 * noise)),
        up_bits_per_s=estimate(truth.up_mbit_s * 1e6),
        down_bits_per_s=estimate(truth.down_mbit_s * 1e6),
        step_us=estimate(truth.step_ms * 1000),
        packets_sent=sent_packets,
        packets_lost=sent_packets * truth.loss,
        bursts_lost=sent_packets * truth.loss,
        forecast_error=seen.Estimate(error, error / 2, 10),
        congestion_control=truth.congestion_control,
        coordinator_congestion_control=truth.congestion_control,
    )
