"""Several rings of one training: which nodes hold them, and what of their rounds counts."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.serving.events import RingPlaced, RingRoundStored, RingUnplaced, StageMoved
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.ring_placing import NodeFigures, needs_placing, ring_placement
from coordinator.core.serving.standby import needs_standby, standby_placement
from coordinator.core.serving.state import ServeJob
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import CancelWork
from coordinator.shell.kinds.serving.demand import serve_demand
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId
from hypergpu.journal.sentences import event_sentence
from hypergpu.journal.serving_events import RingRoundStoredEvent
from hypergpu.rings.layer_span import PlacedStage, RingShare
from hypergpu.rings.ring_training import TRAINING_ROWS, RingTraining
from hypergpu.rings.stage_work import layer_blob
from hypergpu.units import Bytes, Milliseconds
from tests.kinds.serving.test_ring_rounds import ROWS
from tests.kinds.serving.test_rings import CUT, FILES, LARGE, LAYERS, advance, cut_job

NODES = [NodeId(f"0x{number:040x}") for number in range(7)]
TRAINING = RingTraining(rounds=2, inner_steps=5, batch_rows=4, rings=2)
AT = Milliseconds(5)


def adapter(name: str) -> dict[str, BlobRef]:
    layers = map(layer_blob, range(LAYERS))
    return {each: BlobRef(digest_of(f"{name} {each}".encode()), Bytes(10)) for each in layers}


FIRST = RingRoundStored(
    at_ms=Milliseconds(9),
    rounds=1,
    step=5,
    loss=2.5,
    tokens=200,
    adapter=adapter("first"),
    shares=(RingShare(0, 2.0, 100), RingShare(1, 3.0, 100)),
    ring_adapters={1: adapter("second")},
    momentum=adapter("momentum"),
)
LAST = replace(FIRST, rounds=2, step=10, loss=1.5)


def rings_job(*nodes: NodeId, stages: int = 2, **request: Any) -> ServeJob:
    cut = replace(CUT, stages=stages)
    files = {**FILES, TRAINING_ROWS: ROWS}
    return cut_job(*nodes, cut=cut, training=TRAINING, files=files, **request)


def place_all(job: ServeJob, figures: NodeFigures = LARGE) -> ServeJob:
    """The job once everything is placed that can be, as the keeper of rings does it."""
    while needs_placing(job):
        event = ring_placement(job, dict.fromkeys(NODES, figures))
        if isinstance(event, RingUnplaced):
            if not SERVING.rejection(job, event):
                job = advance(job, event)
            break
        job = advance(job, event)
    if needs_standby(job):
        standby = standby_placement(job, dict.fromkeys(NODES, figures))
        job = job if standby is None else advance(job, standby)
    return job


def rings_of(job: ServeJob) -> dict[NodeId, int]:
    return {node: each.ring for node, each in job.stages.items()}


def lose(job: ServeJob, node: NodeId) -> ServeJob:
    return advance(job, work_events.NodeLost(at_ms=AT, node=node, reason="silent"))


def test_two_rings_are_on_nodes_of_their_own_and_one_node_stands_by_for_both() -> None:
    job = place_all(rings_job(*NODES[:5]))
    assert sorted(rings_of(job).values()) == [0, 0, 1, 1]
    assert job.standby is not None
    assert job.open_rings == ()
    reason = "2 of 2 rings: 4 stages on nodes, and a node stands by train, none of 2 rounds"
    assert job.reason == f"{reason} is stored yet"
    demand = serve_demand(ServeRuntime(job, 1))
    assert demand.nodes_max == 5
    assert serve_demand(ServeRuntime(rings_job(), 1)).nodes_min == 2


def test_it_begins_with_the_rings_that_there_are_and_takes_up_others_when_nodes_come() -> None:
    job = place_all(rings_job(*NODES[:3]))
    assert sorted(rings_of(job).values()) == [0, 0]
    assert job.standby is not None
    assert job.reason.startswith("1 of 2 rings: 2 stages on nodes, and a node stands by train")
    assert job.reason.endswith("; ring 2: waits for nodes")
    event = ring_placement(job, dict.fromkeys(NODES, LARGE))
    assert isinstance(event, RingUnplaced)
    job = advance(job, event)
    assert job.reason.endswith("; ring 2: waits for nodes: 1 of 2 stages are there")
    assert "known already" in SERVING.rejection(job, event)
    before = job.stages
    job = place_all(advance(job, work_events.NodeJoined(at_ms=AT, node=NODES[3])))
    assert sorted(rings_of(job).values()) == [0, 0, 1, 1]
    assert job.standby is None
    assert {node: job.leases[node] for node in before} == before


def test_layers_of_one_ring_go_to_the_node_that_stands_by_and_the_other_keeps_its_own() -> None:
    job = place_all(rings_job(*NODES[:5]))
    standby = job.standby
    assert standby is not None
    lost_node = next(node for node, ring in rings_of(job).items() if ring == 1)
    lease = job.leases[lost_node]
    move = StageMoved(at_ms=AT, node=lost_node, lease=lease.lease, to=standby, reason="away")
    after = advance(job, move)
    assert (after.leases[standby].ring, after.leases[standby].span) == (1, lease.span)
    assert after.stages_of(0) == job.stages_of(0)
    gap = place_all(lose(job, lost_node))
    assert (gap.leases[standby].ring, gap.leases[standby].span) == (1, lease.span)


def test_a_ring_that_lacks_layers_gives_its_nodes_to_the_one_before_it() -> None:
    job = place_all(rings_job(*NODES[:4]))
    first, second = (
        [node for node, each in rings_of(job).items() if each == ring] for ring in (0, 1)
    )
    job = lose(job, first[0])
    event = ring_placement(job, dict.fromkeys(NODES, LARGE))
    # A ring that is whole keeps its nodes.
    assert isinstance(event, RingUnplaced)
    assert event.reason == "ring 1: waits for nodes: 1 of 2 stages are there"
    job = lose(job, second[0])
    step = SERVING.transition(job, ring_placement(job, dict.fromkeys(NODES, LARGE)))
    assert rings_of(step.job) == {first[1]: 0, second[1]: 0}
    assert second[1] in {each.node for each in step.commands if isinstance(each, CancelWork)}
    assert step.job.reason.endswith("; ring 2: waits for nodes")


def test_after_the_last_round_the_first_ring_is_there_alone() -> None:
    job = place_all(rings_job(*NODES[:5]))
    first = job.stages_of(0)
    job = advance(job, FIRST)
    assert job.reason.endswith("1 of 2 rounds are stored, loss 2.5 of 2 rings")
    stored_round = job.stored_round
    assert stored_round is not None
    assert stored_round.adapter_of(0) == stored_round.adapter_of(5) == FIRST.adapter
    assert stored_round.adapter_of(1) == FIRST.ring_adapters[1]
    parts = (FIRST.adapter, FIRST.ring_adapters[1], FIRST.momentum)
    assert all(set(part.values()) <= job.blobs for part in parts)
    step = SERVING.transition(job, LAST)
    assert step.job.stages == first
    freed_nodes = {each.node for each in step.commands if isinstance(each, CancelWork)}
    assert freed_nodes >= set(job.stages_of(1))
    assert serve_demand(ServeRuntime(step.job, 1)).nodes_max == 3
    assert SERVING.moves_nodes(job, LAST, step.job)
    assert not needs_placing(step.job)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (replace(FIRST, shares=()), "it names no rings of 2"),
        (replace(FIRST, shares=(RingShare(2, 1.0, 1),)), "it names no rings of 2"),
        (replace(FIRST, shares=FIRST.shares[:1] * 2), "or one twice"),
        (replace(FIRST, shares=FIRST.shares[:1]), "adapters of a ring that has no part in it"),
        (replace(FIRST, ring_adapters={1: {}}), "the adapter lacks layers"),
        (replace(FIRST, momentum=dict.fromkeys(["head"], ROWS)), "layers that the model has not"),
        (
            replace(FIRST, shares=(FIRST.shares[0], RingShare(1, float("inf"), 1))),
            "the loss is not finite",
        ),
    ],
)
def test_a_round_of_rings_that_cannot_be_is_rejected(event: RingRoundStored, reason: str) -> None:
    assert reason in SERVING.rejection(place_all(rings_job(*NODES[:4])), event)


def test_a_training_with_one_ring_has_no_shares() -> None:
    one = replace(TRAINING, rings=1)
    job = cut_job(*NODES[:3], training=one, files={**FILES, TRAINING_ROWS: ROWS})
    assert "has one ring" in SERVING.rejection(job, FIRST)


def test_a_round_is_told_with_its_rings_and_those_that_it_did_without() -> None:
    event = RingRoundStoredEvent(rounds=1, loss=2.5, shares=FIRST.shares, held_out_loss=2.25)
    text = "loss 2.5000, held out 2.2500, of 2 rings (2.0000, 3.0000)"
    assert event_sentence(event, {}).endswith(text)
    late = replace(event, shares=FIRST.shares[:1], left_out="ring 2: not in after 60 s")
    assert event_sentence(late, {}).endswith("of 1 ring (2.0000); ring 2: not in after 60 s")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=25))
def test_no_layer_of_a_ring_is_held_twice_and_no_node_is_in_two(
    happenings: list[tuple[int, int]],
) -> None:
    job = rings_job()
    for number, kind in happenings:
        node = NODES[number]
        is_present = node in job.members and job.members[node].is_present
        if kind == 0 and is_present:
            job = lose(job, node)
        elif kind and not is_present:
            job = advance(job, work_events.NodeJoined(at_ms=AT, node=node))
        job = place_all(job)
        for ring in range(job.rings):
            spans = sorted(each.span for each in job.stages_of(ring).values() if each.span)
            assert all(one.end <= other.first for one, other in pairwise(spans))
        present_count = sum(member.is_present for member in job.members.values())
        # As many rings are whole as there are nodes for, as one that is not gives its own away.
        assert len(job.whole_rings) >= min(1, present_count // 2)
        assert not job.open_rings or present_count - 2 * len(job.whole_rings) < 2


def test_a_placement_on_a_node_of_another_whole_ring_is_rejected() -> None:
    job = place_all(rings_job(*NODES[:4]))
    (first_node, *_) = job.stages_of(0)
    job = lose(job, next(iter(job.stages_of(1))))
    stage = next(iter(job.stages_of(1)))
    spans = sorted(each.span for each in job.stages_of(0).values() if each.span)
    stages = (PlacedStage(stage, spans[0]), PlacedStage(first_node, spans[1]))
    event = RingPlaced(at_ms=AT, stages=stages, reason="a test", is_whole=True, ring=1)
    assert "cannot take these layers" in SERVING.rejection(job, event)
