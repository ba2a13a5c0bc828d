"""The node that stands by for a ring: it holds one stage ready, has the files of others, and
answers nothing until it is given a stage's layers.

A node that is free once all layers are held stands by. Of those that are there it is the one that
has memory for the largest stage, then the quickest; a model has one at a time, for all of its
rings. It is not paid.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.serving.events import StageMoved, StandbyPlaced
from coordinator.core.serving.leasing import (
    ServeStep,
    assign_work,
    cancel,
    lease_replicas,
    with_lease,
    without_lease,
)
from coordinator.core.serving.ring_placing import NodeFigures
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work.leases import lease_rejection
from coordinator.core.work.members import free_nodes
from hypergpu.assignment import INPUTS_MOST
from hypergpu.ids import NodeId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import ModelCut, layers_in
from hypergpu.units import Milliseconds, several

_NOW = Milliseconds(0)  # stamped by the driver
_DISK_SHARE = 0.8
"""Part of the disk that an owner allows which the files may take."""


class StandbyCandidate(NamedTuple):
    """What a free node could hold ready."""

    span: LayerSpan
    figures: NodeFigures
    node: NodeId
    is_doubted: bool = False
    """Whether another node contradicts it: then it had better not be the one that checks."""

    @property
    def rank(self) -> tuple[object, ...]:
        """The least one is taken."""
        figures = self.figures
        return (
            self.is_doubted,
            -self.span.count,
            figures.layer_us,
            figures.round_trip_us,
            self.node,
        )


def needs_standby(job: ServeJob) -> bool:
    """Whether a node is to stand by, should one be free for it."""
    is_held = job.phase is ServePhase.SERVING and not job.is_unloaded and bool(job.whole_rings)
    cut = job.request.cut
    return is_held and cut is not None and cut.has_standby and job.standby is None


def standby_placement(job: ServeJob, figures: Mapping[NodeId, NodeFigures]) -> StandbyPlaced | None:
    """Choose the node that stands by; None: no free node has memory for a stage.

    Args:
        job: A model that is cut; all layers of a ring are held.
        figures: Of every node that can work for it.
    """
    cut = job.request.cut
    if cut is None:
        raise ValueError(f"{job.job_id} is held whole")
    spans = sorted({each.span for each in job.stages.values() if each.span is not None})
    candidates = []
    for node in free_nodes(job, job.leases):
        node_figures = figures.get(node)
        span = None if node_figures is None else _largest_span(cut, spans, node_figures)
        if node_figures is not None and span is not None:
            is_doubted = bool(job.members[node].stage_record.contradictions)
            candidates.append(StandbyCandidate(span, node_figures, node, is_doubted))
    if not candidates:
        return None
    choice = min(candidates, key=lambda each: each.rank)
    files = _further_files(job, spans, choice)
    return StandbyPlaced(
        at_ms=_NOW,
        node=choice.node,
        span=choice.span,
        files_of=files,
        reason=_reason(cut, spans, choice, files),
    )


def _largest_span(cut: ModelCut, spans: list[LayerSpan], figures: NodeFigures) -> LayerSpan | None:
    """The stage that would take longest to load, of those that a node's memory holds."""
    room = layers_in(cut, figures.memory_bytes)
    able_spans = [span for span in spans if span.count <= room]
    return max(able_spans, key=lambda span: (span.count, span.end), default=None)


def _further_files(
    job: ServeJob, spans: list[LayerSpan], choice: StandbyCandidate
) -> tuple[LayerSpan, ...]:
    """Other stages whose files the node fetches, too: the largest first, as far as they fit."""
    room_bytes = int(_DISK_SHARE * choice.figures.disk_bytes)
    files_of = list[LayerSpan]()
    for span in sorted(spans, key=lambda each: (-each.count, each)):
        if span == choice.span:
            continue
        inputs = job.request.standby_stage(choice.span, (*files_of, span)).inputs
        is_small = not room_bytes or sum(blob.size_bytes for blob in inputs) <= room_bytes
        if len(inputs) <= INPUTS_MOST and is_small:
            files_of.append(span)
    return tuple(sorted(files_of))


def _reason(
    cut: ModelCut, spans: list[LayerSpan], choice: StandbyCandidate, files_of: tuple[LayerSpan, ...]
) -> str:
    room = several(layers_in(cut, choice.figures.memory_bytes), "layer")
    is_largest = choice.span.count == max(span.count for span in spans)
    which = "the largest stage" if is_largest else "the largest stage that it has memory for"
    others = ", ".join(map(str, files_of))
    files = f", and has the files of {others}" if others else ""
    way_ms = choice.figures.round_trip_us / 1000
    return f"holds {choice.span}, {which}{files}; memory for {room}, {way_ms:.1f} ms away"


def standby_rejection(job: ServeJob, event: StandbyPlaced) -> str:
    """Why a node cannot stand by so; empty: it can."""
    if not needs_standby(job):
        return f"{job.job_id} has no node stand by now"
    if event.node not in free_nodes(job, job.leases):
        return f"{event.node} is not free"
    spans = {replica.span for replica in job.stages.values()}
    is_known = {event.span, *event.files_of} <= spans
    return "" if is_known else f"{job.job_id} has no such stage"


def place_standby(job: ServeJob, event: StandbyPlaced) -> ServeStep:
    """Have a node stand by."""
    job = with_lease(job, event.node, event.span)
    replica = replace(job.leases[event.node], is_standby=True, files_of=event.files_of)
    job = replace(job, leases={**job.leases, event.node: replica})
    assign = assign_work(job, event.node)
    return ServeStep(job, (assign,)).then(lease_replicas(job))


def move_rejection(job: ServeJob, event: StageMoved) -> str:
    """Why a stage cannot go to the node that stands by; empty: it can."""
    replica = job.stages.get(event.node)
    if replica is None:
        return f"{event.node} holds no stage of {job.job_id}"
    if event.to != job.standby:
        return f"{event.to} does not stand by for {job.job_id}"
    if event.to not in free_nodes(job, job.stages):
        return f"{event.to} can take no work"
    return lease_rejection(replica, event.lease)


def move_stage(job: ServeJob, event: StageMoved) -> ServeStep:
    """Give a stage's layers to the node that stands by. The other one stays, and is free."""
    return give_layers(job, event.node, event.to, event.reason)


def give_layers(job: ServeJob, node: NodeId, to: NodeId, reason: str) -> ServeStep:
    """Give the layers of a node to another one."""
    replica = job.leases[node]
    cancels = (cancel(job, node, reason),)
    job = with_lease(without_lease(job, node), to, replica.span, replica.ring)
    step = ServeStep(job, (*cancels, assign_work(job, to)))
    return step.then(lease_replicas(step.job))
