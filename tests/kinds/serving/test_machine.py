"""The machine of a served model: replicas go to nodes, and nowhere twice."""

import msgspec
import pytest

from coordinator.core.serving.events import (
    ModelUnloaded,
    ModelWanted,
    ReplicaHandedBack,
    VersionPublished,
)
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import AssignWork, CancelWork
from hypergpu.assignment import FailureCause, Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.packed_work import pack_work, unpack_work
from hypergpu.serving.serve_request import SERVE_KIND, TUNED_KIND, Replica, ServeRequest
from hypergpu.units import Bytes, Milliseconds
from tests.kinds.serving.walk import BASE, TUNING, created_model, walk_by_seed
from tests.unit.job_states import ALICE, BOB

_LATER = Milliseconds(10)


def model_with(*nodes: NodeId, replicas: int = 1, follows: bool = False) -> ServeJob:
    event = created_model(replicas=replicas, follows=follows)
    job: ServeJob = SERVING.transition(None, event).job
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
        if job.phase is ServePhase.SERVING and not job.is_unloaded:
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


def replica_of(assignment: AssignWork) -> Replica:
    return unpack_work(assignment.assignment.work, TUNED_KIND, Replica)


def test_nodes_to_come_get_the_newest_version_and_no_older_one_is_taken() -> None:
    job = model_with(ALICE, follows=True)
    newest = BlobRef(digest_of(b"newest"), Bytes(60))
    event = VersionPublished(at_ms=_LATER, rounds=7, blob=newest)
    step = SERVING.transition(job, event)
    assert not step.commands  # Who holds another one is offered it.
    lost_event = work_events.NodeLost(at_ms=_LATER, node=ALICE, reason="silent")
    job = SERVING.transition(step.job, lost_event).job
    step = SERVING.transition(job, work_events.NodeJoined(at_ms=_LATER, node=BOB))
    (assignment,) = (each for each in step.commands if isinstance(each, AssignWork))
    job_tuning = replica_of(assignment).tuning
    assert job_tuning is not None
    assert (job_tuning.version.round, job_tuning.version.blob) == (7, newest)
    assert {newest, job_tuning.layout} <= {*assignment.assignment.inputs}
    assert SERVING.rejection(step.job, event) == "job-s has the model of round 7 already"
    assert "follows no training" in SERVING.rejection(model_with(ALICE), event)


def test_a_node_is_told_the_work_of_its_lease_again_though_a_newer_version_is_there() -> None:
    job = model_with(ALICE, follows=True)
    (before,) = SERVING.outstanding(job)
    newest = BlobRef(digest_of(b"newest"), Bytes(60))
    job = SERVING.transition(job, VersionPublished(at_ms=_LATER, rounds=7, blob=newest)).job
    assert SERVING.outstanding(job) == (before,)
    (repeated_work,) = SERVING.pending(job, ALICE)
    assert repeated_work.command == before
    # What the lease names stays stored, and so does what those to come will name.
    assert {newest, TUNING.version.blob, TUNING.layout} <= job.blobs


def test_nodes_let_go_of_an_unloaded_model_and_load_it_once_it_is_wanted() -> None:
    job = model_with(ALICE)
    wanted_event = ModelWanted(at_ms=_LATER)
    assert SERVING.rejection(job, wanted_event) == "job-s is not unloaded"
    step = SERVING.transition(job, ModelUnloaded(at_ms=_LATER, reason="nobody called"))
    assert [type(each) for each in step.commands] == [CancelWork]
    assert (step.job.leases, step.job.reason) == ({}, "nobody called")
    joined_step = SERVING.transition(step.job, work_events.NodeJoined(at_ms=_LATER, node=BOB))
    assert not joined_step.commands
    step = SERVING.transition(joined_step.job, wanted_event)
    assert [type(each) for each in step.commands] == [AssignWork]
    assert step.job.reason == "1 replica on nodes"


def test_a_paused_model_that_was_unloaded_is_loaded_by_a_resume() -> None:
    job = SERVING.transition(
        model_with(ALICE), ModelUnloaded(at_ms=_LATER, reason="nobody called")
    ).job
    job = SERVING.transition(job, work_events.JobPaused(at_ms=_LATER)).job
    step = SERVING.transition(job, work_events.JobResumed(at_ms=_LATER))
    assert [type(each) for each in step.commands] == [AssignWork]
