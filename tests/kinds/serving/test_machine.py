"""The machine of a served model: replicas go to nodes, and nowhere twice."""

import msgspec
import pytest

from coordinator.core.serving.events import ReplicaHandedBack
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import AssignWork, CancelWork
from hypergpu.assignment import FailureCause, Lease
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.packed_work import pack_work
from hypergpu.serving.serve_request import SERVE_KIND, ServeRequest
from hypergpu.units import Milliseconds
from tests.kinds.serving.walk import BASE, created_model, walk_by_seed
from tests.unit.job_states import ALICE, BOB

_LATER = Milliseconds(10)


def model_with(*nodes: NodeId, replicas: int = 1) -> ServeJob:
    job: ServeJob = SERVING.transition(None, created_model(replicas=replicas)).job
    for node in nodes:
        job = SERVING.transition(job, work_events.NodeJoined(at_ms=_LATER, node=node)).job
    return job


@pytest.mark.parametrize("seed", range(60))
def test_replicas_are_on_nodes_that_are_there_and_no_lease_comes_twice(seed: int) -> None:
    walk = walk_by_seed(seed)
    numbers_by_lease: dict[int, NodeId] = {}
    for job in walk.jobs:
        assert len(job.leases) <= job.request.replicas
        for node, replica in job.leases.items():
            assert job.members[node].can_work
            assert numbers_by_lease.setdefault(replica.lease, node) == node
        able = sum(member.can_work for member in job.members.values())
        if job.phase is ServePhase.SERVING:
            assert len(job.leases) == min(able, job.request.replicas)
        else:
            assert not job.leases


@pytest.mark.parametrize("seed", range(20))
def test_a_replay_of_the_stored_rows_gives_the_same_state(seed: int) -> None:
    walk = walk_by_seed(seed)
    decoder = msgspec.json.Decoder(SERVING.events)
    job: ServeJob | None = None
    for event in walk.journal:
        job = SERVING.transition(job, decoder.decode(msgspec.json.encode(event))).job
    assert job == walk.jobs[-1]
    snapshot = msgspec.json.encode(job)
    assert msgspec.json.decode(snapshot, type=ServeJob) == job


def test_a_lost_node_s_replica_goes_to_another_under_a_fresh_lease() -> None:
    job = model_with(ALICE, BOB)
    assert list(job.leases) == [ALICE]
    step = SERVING.transition(job, work_events.NodeLost(at_ms=_LATER, node=ALICE, reason="silent"))
    cancel, assign = step.commands
    assert isinstance(cancel, CancelWork)
    assert isinstance(assign, AssignWork)
    assert (cancel.lease.number, assign.node, assign.assignment.lease.number) == (1, BOB, 2)


def test_a_draining_node_gives_its_replica_up_at_once() -> None:
    job = model_with(ALICE, BOB)
    event = work_events.NodeDraining(at_ms=_LATER, node=ALICE, reason="its owner")
    job = SERVING.transition(job, event).job
    assert list(job.leases) == [BOB]
    assert not job.members[ALICE].is_present


def test_a_model_that_no_node_can_hold_is_paused_with_the_reason_until_it_is_resumed() -> None:
    job = model_with(ALICE)
    lease = Lease(job.job_id, 0, job.leases[ALICE].lease)
    event = SERVING.hand_back_event(ALICE, lease, "8 GB are missing", FailureCause.OUT_OF_MEMORY)
    job = SERVING.transition(job, event).job
    assert job.phase is ServePhase.PAUSED
    assert "8 GB are missing" in job.reason
    job = SERVING.transition(job, work_events.JobResumed(at_ms=_LATER)).job
    assert job.phase is ServePhase.SERVING
    assert list(job.leases) == [ALICE]


def test_a_replica_that_fails_three_times_is_given_to_that_node_no_more() -> None:
    job = model_with(ALICE, BOB)
    for _ in range(3):
        assert list(job.leases) == [ALICE]
        lease = job.leases[ALICE].lease
        event = ReplicaHandedBack(at_ms=_LATER, node=ALICE, lease=lease, reason="it crashed")
        job = SERVING.transition(job, event).job
    assert list(job.leases) == [BOB]
    assert job.members[ALICE].exclusion == "it crashed"


def test_a_hand_back_under_another_lease_changes_nothing() -> None:
    job = model_with(ALICE)
    event = ReplicaHandedBack(at_ms=_LATER, node=ALICE, lease=7, reason="late")
    assert "lease 7 is void" in SERVING.rejection(job, event)
    assert SERVING.transition(job, event).job == job


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "no spaces"}, "model of a served model"),
        ({"files": {}}, "files of a served model"),
        ({"files": {"../up": BASE["base.index"]}}, "plain names"),
        ({"dtype": "int8"}, "dtype of a served model"),
        ({"replicas": 0}, "replicas of a served model"),
        ({"requirements": ("gpu > many",)}, "requirements of a served model"),
    ],
)
def test_a_request_that_is_not_right_is_refused_with_the_field(
    changes: dict[str, object], reason: str
) -> None:
    request = msgspec.structs.replace(ServeRequest(model="tiny", files=BASE), **changes)
    assert SERVING.packed is not None
    with pytest.raises(HyperGPUError, match=reason):
        SERVING.packed.creation_event(JobId("job-s"), TokenId("t"), pack_work(SERVE_KIND, request))
