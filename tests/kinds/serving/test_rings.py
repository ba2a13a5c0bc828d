"""A model that is cut: its layers on nodes that come, go and hand back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.serving.events import (
    ReplicaHandedBack,
    RingPlaced,
    RingUnplaced,
    StageMoved,
    StandbyPlaced,
)
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.ring_placing import NodeFigures, needs_placing, ring_placement
from coordinator.core.serving.standby import needs_standby, standby_placement
from coordinator.core.serving.state import ServeJob
from coordinator.core.work import work_events
from coordinator.core.work.demand import NodeOffer, unfit_reason
from coordinator.core.work.waiting_kinds import WaitingKind, waiting_kinds
from coordinator.core.work.work_commands import AssignWork, CancelWork
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.kinds.serving.demand import serve_demand
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId
from hypergpu.packed_work import unpack_work
from hypergpu.rings.layer_span import LayerSpan, PlacedStage, gaps
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, StageWork, span_blobs
from hypergpu.serving.serve_request import STAGE_VERSION, ServeRequest
from hypergpu.units import Bytes, Milliseconds
from tests.kinds.serving.walk import created_model

LAYERS = 8
NODES = [NodeId(f"0x{number:040x}") for number in range(5)]
CUT = ModelCut(layers=LAYERS, hidden_size=64, layer_bytes=100, end_bytes=50, stages=3)
FILES = {
    name: BlobRef(digest_of(name.encode()), Bytes(100))
    for name in ("base", *span_blobs(LayerSpan(0, LAYERS), LAYERS))
}
LARGE = NodeFigures(Bytes(10_000))
_AT = Milliseconds(5)


def cut_job(*nodes: NodeId, **cut: Any) -> ServeJob:
    request: dict[str, Any] = {"engine": STAGE_KIND, "files": FILES, "cut": CUT, **cut}
    job: ServeJob = SERVING.transition(None, created_model(**request)).job
    for node in nodes:
        job = advance(job, work_events.NodeJoined(at_ms=_AT, node=node))
    return job


def advance(job: ServeJob, event: StampedEvent) -> ServeJob:
    assert not SERVING.rejection(job, event)
    after: ServeJob = SERVING.transition(job, event).job
    return after


def placement(job: ServeJob, figures: NodeFigures = LARGE) -> RingPlaced | RingUnplaced:
    return ring_placement(job, dict.fromkeys(NODES, figures))


def spans_of(job: ServeJob) -> dict[NodeId, LayerSpan | None]:
    return {node: replica.span for node, replica in job.leases.items()}


def test_a_node_of_the_version_before_is_told_the_line_that_updates_it() -> None:
    demand = serve_demand(ServeRuntime(cut_job(), 1))
    offer = NodeOffer(NODES[0], None, {STAGE_KIND: 3})
    reason = "it does not offer serve/stage 4, but 3. Fix there: pip install --upgrade hypergpu"
    assert unfit_reason(demand, offer) == reason
    assert waiting_kinds([demand], offer) == (WaitingKind(STAGE_KIND, reason),)
    assert not unfit_reason(demand, replace(offer, workloads={STAGE_KIND: STAGE_VERSION}))


def test_nodes_get_the_files_of_their_layers_and_no_others() -> None:
    job = cut_job(*NODES[:3])
    step = SERVING.transition(job, placement(job))
    works = {}
    for command in step.commands:
        assert isinstance(command, AssignWork)
        works[command.node] = unpack_work(command.assignment.work, STAGE_KIND, StageWork)
        assert set(command.assignment.inputs) == set(works[command.node].files.values())
    spans = tuple(work.span for work in works.values())
    assert not gaps(spans, LAYERS)
    for work in works.values():
        assert set(work.files) == {"base", *span_blobs(work.span, LAYERS)}


def test_fewer_nodes_than_stages_wait_with_the_reason() -> None:
    job = cut_job(*NODES[:2])
    event = placement(job)
    assert isinstance(event, RingUnplaced)
    job = advance(job, event)
    assert job.reason == "waits for nodes: 2 of 3 stages are there"
    assert "known already" in SERVING.rejection(job, event)


def test_a_lack_of_memory_is_told_in_bytes() -> None:
    job = cut_job(*NODES[:3])
    event = placement(job, NodeFigures(Bytes(400)))
    assert isinstance(event, RingUnplaced)
    assert "lack room for 2 layers" in event.reason


def test_a_node_whose_owner_limits_its_upload_is_left_out_where_others_are_quicker() -> None:
    job = cut_job(*NODES[:4])
    figures = dict.fromkeys(NODES, LARGE) | {NODES[1]: LARGE._replace(upload_bits_per_s=256_000)}
    event = ring_placement(job, figures)
    assert isinstance(event, RingPlaced)
    assert {each.node for each in event.stages} == {NODES[0], NODES[2], NODES[3]}


def test_layers_of_a_lost_node_go_to_a_spare_one_and_the_others_keep_theirs() -> None:
    job = cut_job(*NODES[:4])
    job = advance(job, placement(job))
    before = spans_of(job)
    lost_node = next(iter(before))
    job = advance(job, work_events.NodeLost(at_ms=_AT, node=lost_node, reason="silent"))
    assert needs_placing(job)
    event = placement(job)
    assert isinstance(event, RingPlaced)
    assert not event.is_whole
    step = SERVING.transition(job, event)
    assert not [each for each in step.commands if isinstance(each, CancelWork)]
    kept_spans = {node: span for node, span in before.items() if node != lost_node}
    assert spans_of(step.job) == {**kept_spans, event.stages[0].node: before[lost_node]}


def test_where_a_spare_node_is_too_small_all_layers_are_placed_anew() -> None:
    job = cut_job(*NODES[:4])
    whole = RingPlaced(
        at_ms=_AT,
        reason="a test",
        is_whole=True,
        stages=(
            PlacedStage(NODES[0], LayerSpan(0, 6)),
            PlacedStage(NODES[1], LayerSpan(6, 7)),
            PlacedStage(NODES[2], LayerSpan(7, 8)),
        ),
    )
    job = advance(job, whole)
    job = advance(job, work_events.NodeLost(at_ms=_AT, node=NODES[0], reason="silent"))
    event = placement(job, NodeFigures(Bytes(500)))
    assert isinstance(event, RingPlaced)
    assert event.is_whole
    job = advance(job, event)
    assert not job.free_layers()


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([(0, 0, 8)], ""),
        ([(0, 0, 4), (1, 5, 8)], "every layer once"),
        ([(0, 0, 5), (1, 4, 8)], "every layer once"),
        ([(0, 0, 4), (0, 4, 8)], "cannot take"),
        ([(4, 0, 8)], "cannot take"),
    ],
)
def test_a_placement_has_every_layer_once_on_nodes_that_are_there(
    stages: list[tuple[int, int, int]], reason: str
) -> None:
    job = cut_job(*NODES[:3])
    placed_stages = tuple(
        PlacedStage(NODES[node], LayerSpan(first, end)) for node, first, end in stages
    )
    event = RingPlaced(at_ms=_AT, stages=placed_stages, reason="a test", is_whole=True)
    rejection = SERVING.rejection(job, event)
    assert reason in rejection
    assert bool(reason) == bool(rejection)


def with_standby(job: ServeJob, figures: NodeFigures = LARGE) -> tuple[ServeJob, StandbyPlaced]:
    event = standby_placement(job, dict.fromkeys(NODES, figures))
    assert event is not None
    return advance(job, event), event


def works_of(job: ServeJob) -> dict[NodeId, StageWork]:
    assignments = {node: SERVING.pending(job, node)[0].command for node in job.leases}
    return {
        node: unpack_work(command.assignment.work, STAGE_KIND, StageWork)
        for node, command in assignments.items()
        if isinstance(command, AssignWork)
    }


def test_a_free_node_stands_by_for_the_largest_stage_with_the_files_of_the_others() -> None:
    job = cut_job(*NODES[:4])
    job = advance(job, placement(job))
    assert needs_standby(job)
    job, event = with_standby(job)
    assert event.node not in job.stages
    assert event.span.count == max(each.span.count for each in job.stages.values() if each.span)
    assert f"holds {event.span}, the largest stage, and has the files of" in event.reason
    assert set(works_of(job)[event.node].files) == set(FILES)
    assert not job.free_layers()
    assert job.reason == "3 stages on nodes, and a node stands by"
    assert not needs_standby(job)


def test_who_stands_by_has_no_more_than_its_memory_and_disk_take() -> None:
    job = cut_job(*NODES[:4])
    job = advance(job, placement(job))
    no_room = dict.fromkeys(NODES, NodeFigures(Bytes(100)))
    assert standby_placement(job, no_room) is None
    _, event = with_standby(job, NodeFigures(Bytes(10_000), disk_bytes=1_200))
    assert len(event.files_of) == 1
    assert not needs_standby(cut_job(cut=replace(CUT, has_standby=False)))


def test_layers_of_a_lost_node_go_to_the_one_that_stands_by() -> None:
    job = cut_job(*NODES)
    job = advance(job, placement(job))
    job, standby = with_standby(job)
    lost_node = next(node for node in job.stages if spans_of(job)[node] != standby.span)
    span = spans_of(job)[lost_node]
    job = advance(job, work_events.NodeLost(at_ms=_AT, node=lost_node, reason="silent"))
    event = placement(job)
    assert isinstance(event, RingPlaced)
    assert event.stages == (PlacedStage(standby.node, span or LayerSpan(0, 0)),)
    assert "which stood by" in event.reason
    job = advance(job, event)
    assert not job.free_layers()
    assert needs_standby(job)


def test_a_stage_that_its_node_has_lost_moves_to_the_one_that_stands_by() -> None:
    job = cut_job(*NODES[:4])
    job = advance(job, placement(job))
    job, standby = with_standby(job)
    node, replica = next(iter(job.stages.items()))
    move = StageMoved(
        at_ms=_AT, node=node, lease=replica.lease, to=standby.node, reason="it began anew"
    )
    for wrong_move, reason in (
        (replace(move, lease=replica.lease + 9), "lease"),
        (replace(move, to=node), "does not stand by"),
        (replace(move, node=standby.node), "holds no stage"),
    ):
        assert reason in SERVING.rejection(job, wrong_move)
    step = SERVING.transition(job, move)
    cancels = [each.node for each in step.commands if isinstance(each, CancelWork)]
    assert cancels == [node]
    assert works_of(step.job)[standby.node].span == replica.span
    assert step.job.members[node].can_work
    # The node that began anew is free to stand by in its turn.
    after, later_standby = with_standby(step.job)
    assert later_standby.node == node
    assert not after.free_layers()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_no_layer_is_ever_held_twice_and_none_is_free_once_it_is_placed(
    happenings: list[tuple[int, int]],
) -> None:
    job = cut_job()
    for kind, number in happenings:
        node = NODES[number]
        lease = job.leases[node].lease if node in job.leases else 0
        event: StampedEvent = (
            work_events.NodeJoined(at_ms=_AT, node=node),
            work_events.NodeLost(at_ms=_AT, node=node, reason="silent"),
            ReplicaHandedBack(at_ms=_AT, node=node, lease=lease, reason="no memory"),
            work_events.NodeDraining(at_ms=_AT, node=node, reason="its owner"),
        )[kind]
        if not SERVING.rejection(job, event):
            job = SERVING.transition(job, event).job
        if needs_placing(job):
            placed_event = placement(job)
            if not SERVING.rejection(job, placed_event):
                job = SERVING.transition(job, placed_event).job
                assert isinstance(placed_event, RingUnplaced) or not job.free_layers()
        if needs_standby(job) and not needs_placing(job):
            standby_event = standby_placement(job, dict.fromkeys(NODES, LARGE))
            if standby_event is not None:
                job = advance(job, standby_event)
                assert job.standby not in job.stages
        spans = [each.span for each in job.stages.values() if each.span is not None]
        assert (
            sum(span.count for span in spans) + sum(gap.count for gap in job.free_layers())
            == LAYERS
        )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"cut": None}, "stated for"),
        ({"engine": "serve/transformers"}, "alone"),
        ({"replicas": 2}, "one ring"),
        ({"files": {"base": FILES["base"]}}, "one for each layer"),
        (
            {"cut": ModelCut(layers=LAYERS, hidden_size=4, layer_bytes=1, end_bytes=1, stages=9)},
            "1 to 64",
        ),
        (
            {
                "cut": ModelCut(
                    layers=LAYERS,
                    hidden_size=4,
                    layer_bytes=1,
                    end_bytes=1,
                    stages=2,
                    codec="int2",
                )
            },
            "float32, int8o",
        ),
    ],
)
def test_a_request_that_cannot_be_cut_so_is_refused(changes: dict[str, Any], rule: str) -> None:
    request = ServeRequest(
        **{"model": "m", "engine": STAGE_KIND, "files": FILES, "cut": CUT, **changes}
    )
    with pytest.raises(HyperGPUError, match=rule):
        request.check()
