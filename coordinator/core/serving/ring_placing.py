"""Which nodes hold which layers of a model that is cut: what is placed, and when it is placed anew.

Layers that nobody holds, as their node is gone, go to the node that stands by, else to nodes that
hold none, where these have the memory. Else all layers are placed anew on every node that is there.
Speeds that are not known are taken to be like those that are.

Several rings of a training are placed one after another, each on nodes that no ring before it has.
A ring that lacks layers gives its nodes to one before it that lacks some, too: so that where nodes
are few, one ring is whole, and not two halves.
"""

from collections.abc import Mapping, Sequence, Set
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.serving.events import RingPlaced, RingUnplaced
from coordinator.core.serving.leasing import (
    ServeStep,
    assign_work,
    cancel,
    lease_replicas,
    whole_rings_text,
    with_lease,
    without_lease,
)
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work.members import free_nodes
from hypergpu.ids import NodeId
from hypergpu.rings.layer_span import LayerSpan, PlacedStage, gaps
from hypergpu.rings.placement import (
    Placement,
    PlacementProblem,
    StageOffer,
    place_layers,
    relay_hops,
    shortfall,
)
from hypergpu.rings.stage_work import ModelCut, layers_in
from hypergpu.tensors.hidden_states import state_codec
from hypergpu.units import Bytes, Milliseconds, several

_LAYER_US = 1_000.0
"""Time of a layer where that of none is known."""
_NOW = Milliseconds(0)  # stamped by the driver


class NodeFigures(NamedTuple):
    """Figures of a node by which layers are placed."""

    memory_bytes: Bytes
    """Its device's; 0: not known, and taken to be enough."""
    round_trip_us: float = 0.0
    layer_us: float = 0.0
    """Time of a token in a layer of this model; 0: not known."""
    disk_bytes: int = 0
    """Limit of its owner; 0: none."""
    upload_bits_per_s: int = 0
    """The same for what it sends."""


def needs_placing(job: ServeJob) -> bool:
    """Whether some layers are to be placed."""
    is_held = job.phase is ServePhase.SERVING and not job.is_unloaded
    return is_held and bool(job.open_rings)


def ring_placement(
    job: ServeJob, figures: Mapping[NodeId, NodeFigures]
) -> RingPlaced | RingUnplaced:
    """Place the layers of the first ring that lacks some and can have them.

    Args:
        job: A model that is cut, of which no node holds some layers.
        figures: Of every node that can work for it.
    """
    cut = job.request.cut
    if cut is None or not job.open_rings:
        raise ValueError(f"{job.job_id} has no layers to place")
    events = (_placement_of(job, cut, figures, ring) for ring in job.open_rings)
    first = next(events)
    rest = (event for event in events if isinstance(event, RingPlaced))
    return first if isinstance(first, RingPlaced) else next(rest, first)


def _placement_of(
    job: ServeJob, cut: ModelCut, figures: Mapping[NodeId, NodeFigures], ring: int
) -> RingPlaced | RingUnplaced:
    name = f"ring {ring + 1}: " if job.rings > 1 else ""
    if ready := _standby_stage(job, cut, figures, ring):
        reason = f"{name}{ready.span} on {ready.node}, which stood by"
        return RingPlaced(at_ms=_NOW, stages=(ready,), reason=reason, ring=ring)
    spare_nodes = [node for node in free_nodes(job, job.stages) if node in figures]
    stages = _gap_stages(job, cut, figures, spare_nodes, ring)
    if stages:
        reason = name + "; ".join(f"{each.span} on {each.node}" for each in stages)
        return RingPlaced(at_ms=_NOW, stages=tuple(stages), reason=reason, ring=ring)
    nodes = [node for node in free_nodes(job, _kept_nodes(job, ring)) if node in figures]
    problem = _problem(cut, [figures[node] for node in nodes], cut.layers, cut.stages)
    placement = place_layers(problem) if len(nodes) >= cut.stages else None
    if placement is None:
        return RingUnplaced(at_ms=_NOW, reason=name + _gap_reason(cut, problem), ring=ring)
    whole = _stages_of(placement, nodes, LayerSpan(0, cut.layers))
    time = f"about {placement.cost_us / 1000:.1f} ms a token"
    reason = f"{name}{several(len(whole), 'stage')}, {time}"
    return RingPlaced(at_ms=_NOW, stages=tuple(whole), reason=reason, is_whole=True, ring=ring)


def _kept_nodes(job: ServeJob, ring: int) -> Set[NodeId]:
    """Nodes of other rings which are whole, or come before a ring: it is placed without them."""
    whole_rings = job.whole_rings
    return {
        node
        for node, each in job.stages.items()
        if each.ring != ring and (each.ring < ring or each.ring in whole_rings)
    }


def _gap_reason(cut: ModelCut, problem: PlacementProblem) -> str:
    nodes = len(problem.offers)
    if nodes < cut.stages:
        return f"waits for nodes: {nodes} of {several(cut.stages, 'stage')} are there"
    gap_layers = shortfall(problem)
    gap_bytes = gap_layers * cut.layer_bytes
    return (
        f"waits for memory: {several(nodes, 'node')} of {cut.stages} at most lack room for"
        f" {several(gap_layers, 'layer')} ({gap_bytes / 1e9:.1f} GB)."
        " Fix: connect larger nodes, or serve it anew with more --stages"
    )


def _problem(
    cut: ModelCut, nodes: Sequence[NodeFigures], layers: int, stages: int | None
) -> PlacementProblem:
    known_us = [each.layer_us for each in nodes if each.layer_us]
    usual_us = median(known_us) if known_us else _LAYER_US
    offers = [
        StageOffer(
            each.layer_us or usual_us, layers_in(cut, each.memory_bytes), _upload_us(cut, each)
        )
        for each in nodes
    ]
    hops = relay_hops([each.round_trip_us for each in nodes])
    return PlacementProblem(layers, offers, hops, stages=stages)


def _upload_us(cut: ModelCut, figures: NodeFigures) -> float:
    """Time in which a node's owner lets it send one token's states; 0: at once."""
    if not figures.upload_bits_per_s:
        return 0.0
    row_bytes = state_codec(cut.codec).row_bytes(cut.hidden_size)
    return 8e6 * row_bytes / figures.upload_bits_per_s


def _standby_stage(
    job: ServeJob, cut: ModelCut, figures: Mapping[NodeId, NodeFigures], ring: int
) -> PlacedStage | None:
    """The only stage of a ring that nobody holds, on the node that stands by; None: it cannot be
    there.
    """
    node, free_layers = job.standby, job.free_layers(ring)
    if node is None or node not in figures or not job.stages_of(ring) or len(free_layers) > 1:
        return None
    (span,) = free_layers
    has_room = span.count <= layers_in(cut, figures[node].memory_bytes)
    is_able = has_room and node in free_nodes(job, job.stages)
    return PlacedStage(node, span) if is_able else None


def _gap_stages(
    job: ServeJob,
    cut: ModelCut,
    figures: Mapping[NodeId, NodeFigures],
    spare_nodes: Sequence[NodeId],
    ring: int,
) -> list[PlacedStage]:
    """Layers of a ring that nobody holds on nodes that hold none; empty: they do not fit there."""
    held_stages = job.stages_of(ring)
    if not held_stages:
        return []
    stages, rest = list[PlacedStage](), list(spare_nodes)
    for span in job.free_layers(ring):
        room = cut.stages - len(held_stages) - len(stages)
        problem = _problem(cut, [figures[node] for node in rest], span.count, None)
        placement = place_layers(problem) if rest else None
        if placement is None or len(placement.shares) > room:
            return []
        more_stages = _stages_of(placement, rest, span)
        stages.extend(more_stages)
        rest = [node for node in rest if node not in {each.node for each in more_stages}]
    return stages


def _stages_of(placement: Placement, nodes: Sequence[NodeId], span: LayerSpan) -> list[PlacedStage]:
    stages, first = [], span.first
    for share in placement.shares:
        stages.append(PlacedStage(nodes[share.offer], LayerSpan(first, first + share.layers)))
        first += share.layers
    return stages


def placement_rejection(job: ServeJob, event: RingPlaced) -> str:
    """Why layers cannot be placed so; empty: they can."""
    cut = job.request.cut
    if cut is None or event.ring not in job.open_rings:
        return f"{job.job_id} has no layers to place"
    busy_nodes = _kept_nodes(job, event.ring) if event.is_whole else job.stages.keys()
    able_nodes = set(free_nodes(job, busy_nodes))
    nodes = [each.node for each in event.stages]
    unable_nodes = [node for node in nodes if node not in able_nodes]
    if unable_nodes or len(set(nodes)) != len(nodes):
        return f"{', '.join(unable_nodes) or nodes[0]} cannot take these layers"
    held_stages = {} if event.is_whole else job.stages_of(event.ring)
    standing_spans = tuple(each.span for each in held_stages.values())
    spans = (*(span for span in standing_spans if span), *(each.span for each in event.stages))
    is_exact = sum(span.count for span in spans) == cut.layers and not gaps(spans, cut.layers)
    return "" if is_exact else "the stages do not hold every layer once"


def place_ring(job: ServeJob, event: RingPlaced) -> ServeStep:
    """Give layers to nodes; where all of a ring are placed anew, stages that stay as they are keep
    theirs, and nobody stands by any more.
    """
    spans = {each.node: each.span for each in event.stages}
    step = ServeStep(job)
    if event.is_whole:
        for node, replica in job.leases.items():
            is_of_ring = replica.ring == event.ring and not replica.is_standby
            if is_of_ring and spans.get(node) == replica.span:
                del spans[node]
                continue
            if not (is_of_ring or replica.is_standby or node in spans):
                continue
            reason = "the layers are placed anew"
            commands = (*step.commands, cancel(step.job, node, reason))
            step = ServeStep(without_lease(step.job, node), commands)
    for node, span in spans.items():
        job = with_lease(step.job, node, span, event.ring)
        step = ServeStep(job, (*step.commands, assign_work(job, node)))
    return step.then(lease_replicas(step.job))


def unplaced_rejection(job: ServeJob, event: RingUnplaced) -> str:
    """Why it says nothing new; empty: it does."""
    if event.ring not in job.open_rings:
        return f"{job.job_id} has no layers to place"
    is_known = leave_unplaced(job, event).job.reason == job.reason
    return "it is known already" if is_known else ""


def leave_unplaced(job: ServeJob, event: RingUnplaced) -> ServeStep:
    """Say why a ring is not held; what is told of rings that are whole is told before it."""
    if not job.whole_rings:
        return ServeStep(replace(job, reason=event.reason))
    return ServeStep(replace(job, reason=f"{whole_rings_text(job)}; {event.reason}"))
