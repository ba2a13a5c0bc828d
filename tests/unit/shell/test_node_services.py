"""What nodes' calls do and read: enrolment, control, assignments, blobs."""

from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from msgspec.structs import replace

from coordinator.core.training.assignment import assignment
from coordinator.core.training.job.commands import AssignShard
from coordinator.core.training.job.events import ShardHandedBack
from coordinator.core.training.kind import TRAINING
from coordinator.core.training.outstanding import outstanding
from coordinator.core.work.work_events import NodeJoined, NodeLost
from coordinator.shell import translate
from coordinator.shell.app.listeners import WATCHES_MAX, HealthServicer
from coordinator.shell.nodes.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.service.node_session import Enrolment
from coordinator.shell.service.transfer import NodeBlobs
from coordinator.shell.translate import participant_summary
from hypergpu.assignment import Assignment, InitialModel, Prefetch, SampleRange
from hypergpu.crypto import IdentityKey, JoinClaim
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId, TokenId
from hypergpu.protocol import PROTOCOL, SOFTWARE
from hypergpu.units import Milliseconds, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.credentials import Role, Token
from hypergpu.wire.messages import assignment_message, assignment_value, digest_message
from tests.journals import FolderJournal
from tests.unit.job_states import ALICE, BOB, after, at, node_plan, plan_event, planning
from tests.unit.shell.whole_shell import JOB, NODE, driving, prepared_job, services_in

NOW_S = 1_900_000_000


class Peer:
    """Who calls, as far as a join looks."""

    peer = "ipv4:192.0.2.1:5000"


CALLER: Any = Peer()


class EnrolmentBench:
    """What a join needs, with one token that admits one node."""

    def __init__(self, folder: Path) -> None:
        journal = FolderJournal(folder)
        self.tokens = IssuedTokens(journal)
        self.joins = Enrolment(
            authority=None,
            tokens=self.tokens,
            nodes=KnownNodes(journal),
            guesses=GuessLimiter(),
        )
        self.token = self.tokens.create(
            TokenGrant(Role.NODE, ttl_s=0, uses=1),
            addresses=("host:7700",),
            authority=digest_of(b"authority"),
            now_s=NOW_S,
        )

    async def rejection_of(self, request: node_pb2.JoinRequest) -> Reason:
        """Why a join is refused."""
        with pytest.raises(HyperGPUError) as failure:
            await self.joins.join(request, CALLER)
        return failure.value.reason


def join_request(
    token: Token, *, workloads: int = 1, is_signed: bool = True, protocol: int = PROTOCOL
) -> node_pb2.JoinRequest:
    """A node's request."""
    key = IdentityKey.generate()
    claim = JoinClaim(TokenId(token.id), digest_of(b""))
    capabilities = node_pb2.Capabilities(
        workloads=[
            node_pb2.WorkloadVersion(name=f"workload-{number}", version=1)
            for number in range(workloads)
        ]
    )
    return node_pb2.JoinRequest(
        version=node_pb2.Version(protocol=protocol, software="test"),
        token_id=token.id,
        token_secret=token.secret,
        public_key=key.public_key,
        signature=key.sign(claim) if is_signed else bytes(65),
        capabilities=capabilities,
    )


async def test_the_token_is_judged_before_the_signature(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    wrong = replace(bench.token, secret="a guess")
    assert await bench.rejection_of(join_request(wrong, is_signed=False)) is Reason.TOKEN_INVALID


async def test_wrong_signatures_are_slowed_down_like_wrong_secrets(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    reasons = [
        await bench.rejection_of(join_request(bench.token, is_signed=False)) for _ in range(12)
    ]
    assert reasons[0] is Reason.SIGNATURE_INVALID
    assert reasons[-1] is Reason.RATE_LIMITED


async def test_a_node_that_signs_as_before_is_told_what_changed_and_how_to_upgrade(
    tmp_path: Path,
) -> None:
    bench = EnrolmentBench(tmp_path)
    with pytest.raises(HyperGPUError) as failure:
        await bench.joins.join(join_request(bench.token, protocol=1), CALLER)
    assert failure.value.reason is Reason.VERSION_MISMATCH
    assert failure.value.detail == (
        f"test speaks protocol 1, {SOFTWARE} speaks {PROTOCOL} (since 2 nodes sign"
        " contributions as EIP-712 data of their job's ledger);"
        " run on that machine: pip install --upgrade hypergpu"
    )
    assert str(failure.value).endswith("Fix: run on that machine: pip install --upgrade hypergpu")


async def test_a_newer_node_is_told_that_the_coordinator_is_older(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    with pytest.raises(HyperGPUError, match="Fix: run where the coordinator runs: pip install"):
        await bench.joins.join(join_request(bench.token, protocol=PROTOCOL + 1), CALLER)


async def test_a_node_of_too_many_workloads_is_refused_and_spends_nothing(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    assert (
        await bench.rejection_of(join_request(bench.token, workloads=1000))
        is Reason.REQUEST_INVALID
    )
    assert (await bench.joins.join(join_request(bench.token, workloads=400), CALLER)).node_id


OTHER = NodeId("0x" + "b2" * 20)
NOW = Milliseconds(0)


async def test_a_node_that_dials_in_again_gets_what_is_outstanding_for_it(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        assert not TRAINING.pending(runtime.job, NODE)
        await services.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE))
        (pending_work,) = TRAINING.pending(runtime.job, NODE)
        assert pending_work.command in outstanding(runtime.job)
        assert isinstance(pending_work.command, AssignShard)
        assert pending_work.command.assignment.lease.number == pending_work.lease
        assert not TRAINING.pending(runtime.job, OTHER)
        await services.driver.submit(JOB, NodeLost(at_ms=NOW, node=NODE, reason="cable"))
        assert not TRAINING.pending(runtime.job, NODE)


@pytest.mark.parametrize(
    ("is_recovering", "reason"), [(True, Reason.NOT_READY), (False, Reason.BLOB_UNKNOWN)]
)
async def test_an_unknown_blob_is_unknown_only_once_the_job_is_taken_up(
    is_recovering: bool,  # noqa: FBT001  a parameter of the test
    reason: Reason,
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        await services.driver.submit(JOB, NodeJoined(at_ms=Milliseconds(0), node=NODE))
    runtime.is_recovering = is_recovering
    request = node_pb2.ResolveBlobRequest(digest=digest_message(digest_of(b"of the manifest")))
    blobs = NodeBlobs(services.performing, services.storage, services.fleet)
    with pytest.raises(HyperGPUError) as failure:
        await blobs.resolve_blob(NODE, request)
    assert failure.value.reason is reason


NOBODY: Any = None
REQUEST = health_pb2.HealthCheckRequest()


async def test_watches_are_limited_and_make_room_when_they_end() -> None:
    health = HealthServicer()
    watches: list[Any] = [health.watch(REQUEST, NOBODY) for _ in range(WATCHES_MAX)]
    for watch in watches:
        await anext(watch)
    with pytest.raises(HyperGPUError) as failure:
        await anext(health.watch(REQUEST, NOBODY))
    assert failure.value.reason is Reason.RATE_LIMITED

    for watch in watches:
        await watch.aclose()
    assert (await anext(health.watch(REQUEST, NOBODY))).status


def test_name_of_a_node_comes_back_without_what_would_act_on_a_terminal() -> None:
    capabilities = translate.capabilities_value(node_pb2.Capabilities(name="at\x1b[2Jtic\n"))
    assert translate.capabilities_message(capabilities).name == "at[2Jtic"


def test_limits_of_a_nodes_owner_come_back_as_they_were_set() -> None:
    message = node_pb2.Capabilities(caps=node_pb2.Caps(worker_threads=2, cache_bytes=1 << 30))
    capabilities = translate.capabilities_value(message)
    assert capabilities.caps == {"worker_threads": 2, "cache_bytes": 1 << 30}
    assert translate.capabilities_message(capabilities).caps == message.caps


def test_name_of_a_node_has_an_end() -> None:
    capabilities = translate.capabilities_value(node_pb2.Capabilities(name="a" * 5_000))
    assert len(capabilities.name) < 1_000


LAYOUT = Digest("0d" * 32)
MODEL = Digest("0e" * 32)


def assignment_of(batch_size: int = 0) -> Assignment:
    plan = replace(
        node_plan(3, "topk64"), upload_after_ms=at(700), connections=4, batch_size=batch_size
    )
    job = after(planning(), plan_event(0, {ALICE: plan, BOB: node_plan()}))
    assert job.model is not None
    model = replace(job.model, blob=replace(job.model.blob, digest=MODEL))
    training = replace(job.spec.training, seed=2**40)
    spec = replace(job.spec, training=training, options={"width": 3, "a": "b"})
    assert job.round is not None
    job = replace(job, model=model, layout=LAYOUT, round=replace(job.round, spec=spec))
    return assignment(job, ALICE).assignment_at(at(40))


def wire_round_trip(work: Assignment) -> node_pb2.Assignment:
    return node_pb2.Assignment.FromString(assignment_message(work).SerializeToString())


def test_the_assignment_reaches_the_node() -> None:
    work = assignment_of()
    assert assignment_value(wire_round_trip(work)) == work
    assert (work.task.inner_steps, work.task.codec) == (3, "topk64")
    assert (work.upload_after_ms, work.connections) == (700, 4)
    assert work.reason == "H=3, topk64, as planned"
    assert work.deadline_in_ms == 1000
    assert work.initial == InitialModel(MODEL, seed=2**40)
    assert (work.task.prefetched, work.prefetch) == (None, None)


def test_a_prefetch_reaches_the_node() -> None:
    first = Prefetch(
        round=3,
        inner_steps=5,
        ranges=(SampleRange(7, Samples(20)), SampleRange(90, Samples(1))),
        seed=2**62,
        global_samples=Samples(11),
        total_samples=Samples(12),
    )
    work = assignment_of()
    work = replace(
        work, task=replace(work.task, prefetched=first), prefetch=replace(first, round=4)
    )
    assert assignment_value(wire_round_trip(work)) == work


def test_an_assignment_that_names_no_connections_means_one() -> None:
    message = wire_round_trip(assignment_of())
    message.connections = 0
    assert assignment_value(message).connections == 1


def test_the_tables_show_why_a_participant_has_its_work() -> None:
    job = after(planning(), plan_event(0, {ALICE: node_plan(3)}))
    assert job.round is not None
    summary = participant_summary(ALICE, job.round.participants[ALICE], None)
    assert summary.reason == "H=3, int4, as planned"


def test_the_tables_show_why_a_participant_handed_its_shard_back() -> None:
    job = after(planning(), plan_event(0, {ALICE: node_plan(3)}))
    assert job.round is not None
    lease = job.round.participants[ALICE].lease
    reason = "CUDA error: device lost"
    event = ShardHandedBack(at_ms=at(40), node=ALICE, round=0, lease=lease, reason=reason)
    job = after(job, event)
    assert job.round is not None
    summary = participant_summary(ALICE, job.round.participants[ALICE], None)
    assert (summary.state, summary.reason) == ("handed back", reason)


def test_a_batch_of_its_own_reaches_the_node_beside_the_jobs() -> None:
    work = assignment_of().task
    assert (work.batch_size, work.stated_batch_size, work.full_steps) == (4, 4, 3)
    own = assignment_of(batch_size=6).task
    assert (own.batch_size, own.stated_batch_size, own.full_steps) == (6, 4, 4.5)
    assert sum(run.count for run in own.ranges) == 18


def test_a_model_that_cannot_be_drawn_is_not_said_to_be() -> None:
    message = wire_round_trip(assignment_of())
    message.model.ClearField("initial")
    assert assignment_value(message).initial is None
