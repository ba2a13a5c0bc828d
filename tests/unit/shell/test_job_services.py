"""What users' calls do to jobs: creation, changes, removal, watches."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.core.training.job.events import (
    AggregateReady,
    MeasuredUpdate,
    RoundMeasured,
    RoundPlanned,
)
from coordinator.core.training.plan.decision import NodeMemory, PlanMemory
from coordinator.core.work.work_events import JobStopped, NodeJoined
from coordinator.shell.driver.replay import event_entry, replay_jobs
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.service.calls import Caller
from coordinator.shell.service.job_view import own_entries, participants
from coordinator.shell.service.job_watch import watch_job
from coordinator.shell.store.blob_collector import collect
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.journal.records import Entry
from coordinator.shell.translate import Capabilities, event_message
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId, TokenId
from hypergpu.jobfile.reading import spec_json
from hypergpu.jobfile.spec import NodeSelection, Pay
from hypergpu.units import BasisPoints, Bytes, Milliseconds
from hypergpu.v1 import job_pb2, node_pb2, tensor_pb2
from hypergpu.wire.messages import blob_message
from tests.journals import FolderJournal
from tests.node_client import contribution
from tests.unit.job_states import (
    ALICE,
    BOB,
    after,
    all_events,
    at,
    model,
    node_plan,
    planning,
    round_plan,
)
from tests.unit.shell.whole_shell import (
    JOB,
    NODE,
    SPEC,
    WholeShell,
    driving,
    payments_of,
    prepared_job,
    services_in,
    stop_in_second_round,
)


class Context:
    """A call without a transport."""

    def peer(self) -> str:
        return "test"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {}


CALLER = Caller(Context(), "CreateJob")


class CollectingBlobs(BlobStore):
    """Looks at a size, and then a collection runs that began just before."""

    services: WholeShell

    def size(self, digest: Digest) -> Bytes | None:
        size = super().size(digest)
        self.collect(self.services.needs.digests() | self.services.pins.all())
        return size


def request(*files: BlobRef) -> job_pb2.CreateJobRequest:
    """A job with data."""
    entries = [
        tensor_pb2.ManifestEntry(path=str(number), blob=blob_message(file))
        for number, file in enumerate(files)
    ]
    manifest = tensor_pb2.Manifest(entries=entries)
    return job_pb2.CreateJobRequest(request_id="one", spec_json=spec_json(SPEC), manifest=manifest)


async def test_a_users_files_outlive_a_collection_while_their_job_is_created(
    tmp_path: Path,
) -> None:
    blobs = CollectingBlobs(tmp_path, Space(tmp_path))
    services = blobs.services = services_in(tmp_path).replace(blobs=blobs)
    file = blobs.put(b"a user's file", keep_s=-1)
    async with driving(services):
        await services.job_servicer().create_job(request(file), CALLER)
        assert services.pins.all() == frozenset()
        await collect(services.storage, services.needs)
    assert blobs.size(file.digest) == file.size_bytes


async def test_a_job_that_lacks_a_file_leaves_no_pins(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    file = services.blobs.put(b"a user's file")
    absent = BlobRef(Digest("0" * 64), Bytes(1))
    async with driving(services):
        with pytest.raises(HyperGPUError, match="1 of 2 files is missing, such as 1"):
            await services.job_servicer().create_job(request(file, absent), CALLER)
    assert services.pins.all() == frozenset()


async def test_a_caller_who_goes_away_leaves_no_job_half_created(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    file = services.blobs.put(b"a user's file")
    servicer = services.job_servicer()
    async with driving(services):
        create_task = asyncio.create_task(servicer.create_job(request(file), CALLER))
        await asyncio.sleep(0)
        create_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await create_task
        again = await servicer.create_job(request(file), CALLER)

    assert list(services.driver.runtimes) == [again.job_id]
    assert services.jobs[JobId(again.job_id)].entries_of_manifest == frozenset([file.digest])
    assert services.pins.all() == frozenset()


async def test_a_job_whose_ledger_is_not_known_is_not_created_and_may_be_sent_again(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    file = services.blobs.put(b"a user's file")

    payments = payments_of(services)
    payments.refusal = HyperGPUError(Reason.CHAIN_UNREACHABLE, "none is known yet")
    async with driving(services):
        with pytest.raises(HyperGPUError, match="none is known yet"):
            await services.job_servicer().create_job(request(file), CALLER)
        assert services.driver.runtimes == {}
        assert services.pins.all() == frozenset()
        payments.refusal = None
        again = await services.job_servicer().create_job(request(file), CALLER)
    assert list(services.driver.runtimes) == [again.job_id]


class AnyCaller:
    """A caller who may change every job; these methods do not look further."""

    token = own_nodes = None

    def may_change(self, owner: TokenId) -> bool:
        return True


NOBODY: Any = AnyCaller()
OTHER = JobId("job-000000000002")


def with_unreadable_job(folder: Path) -> WholeShell:
    """A coordinator that started on a journal which a newer version wrote to."""
    journal = FolderJournal(folder)
    journal.append([Entry(OTHER, 0, 0, "Sorcery", b'{"kind":"Sorcery","at_ms":0}')])
    services = services_in(folder, journal)
    services.driver.unreadable.update(replay_jobs(journal, KINDS).unreadable)
    return services


def forgotten_blob(blobs: BlobStore) -> int:
    """A blob that no job which can be read needs."""
    return blobs.put(b"what the other version keeps", keep_s=-1).size_bytes


async def remove(services: WholeShell, job_id: JobId) -> int:
    request = job_pb2.RemoveJobRequest(job_id=job_id)
    return (await services.job_servicer().remove_job(request, NOBODY)).freed_bytes


async def test_a_job_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    services = with_unreadable_job(tmp_path)
    async with driving(services):
        await prepared_job(services)
        job_list = await services.job_servicer().list_jobs(job_pb2.ListJobsRequest(), NOBODY)
    assert [(job.job_id, job.phase) for job in job_list.jobs] == [
        (OTHER, "unreadable"),
        (JOB, "waiting"),
    ]
    assert "Sorcery" in job_list.jobs[0].reason


async def test_a_job_that_cannot_be_read_names_its_removal_as_a_fix(tmp_path: Path) -> None:
    services = with_unreadable_job(tmp_path)
    with pytest.raises(HyperGPUError, match="remove the job: hypergpu job rm"):
        await services.job_servicer().get_job(job_pb2.GetJobRequest(job_id=OTHER), NOBODY)


async def test_a_job_that_cannot_be_read_is_removed_with_all_that_only_it_may_need(
    tmp_path: Path,
) -> None:
    services = with_unreadable_job(tmp_path)
    size_bytes = forgotten_blob(services.blobs)
    (services.storage.datasets_dir / ("d" * 64)).mkdir(parents=True)
    services.storage.job_dir(OTHER).mkdir(parents=True)
    async with driving(services):
        assert await remove(services, OTHER) == size_bytes

    assert services.journal.jobs() == ()
    assert not services.driver.unreadable
    assert not services.storage.job_dir(OTHER).exists()
    assert list(services.storage.datasets_dir.iterdir()) == []


async def test_data_that_a_job_which_cannot_be_read_may_need_outlives_a_removal(
    tmp_path: Path,
) -> None:
    services = with_unreadable_job(tmp_path)
    (services.storage.datasets_dir / ("d" * 64)).mkdir(parents=True)
    async with driving(services):
        await prepared_job(services)
        await services.driver.submit(JOB, JobStopped(at_ms=Milliseconds(0)))
        await remove(services, JOB)

    assert services.journal.jobs() == (OTHER,)
    assert len(list(services.storage.datasets_dir.iterdir())) == 1


async def test_a_job_is_measured_and_receipted_before_its_rows_go(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await stop_in_second_round(services)
        await remove(services, JOB)

    ((job_id, kinds),) = payments_of(services).caught_up
    assert (job_id, kinds.count("RoundMeasured"), kinds[-1]) == (JOB, 2, "JobEnded")
    assert services.journal.jobs() == ()


async def test_a_job_that_goes_on_is_not_removed(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await prepared_job(services)
        with pytest.raises(HyperGPUError, match="stop it first") as failure:
            await remove(services, JOB)
    assert failure.value.reason is Reason.JOB_PHASE
    assert services.journal.jobs() == (JOB,)


async def test_a_removal_that_is_asked_for_twice_is_done_once(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await stop_in_second_round(services)
        first, second = await asyncio.gather(
            remove(services, JOB), remove(services, JOB), return_exceptions=True
        )
    assert isinstance(first, int)
    assert isinstance(second, HyperGPUError)
    assert second.reason is Reason.JOB_UNKNOWN


async def test_settings_changed_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    servicer = services.job_servicer()
    changes = {"inner.learning_rate": "0.5", "training.rounds": "77", "round.quorum": "0.25"}
    async with driving(services):
        runtime = await prepared_job(services)
        requests = [
            job_pb2.SetParametersRequest(job_id=JOB, parameters={key: value})
            for key, value in changes.items()
        ]
        await asyncio.gather(*(servicer.set_parameters(each, NOBODY) for each in requests))
    spec = runtime.job.next_spec or runtime.job.spec
    assert (spec.inner.learning_rate, spec.training.rounds, spec.round.quorum) == (0.5, 77, 0.25)


async def test_a_watch_ends_when_its_job_is_removed_before_all_is_told(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        await services.driver.submit(JOB, JobStopped(at_ms=Milliseconds(0)))
    # As after a restart: what a watcher has not seen is in the journal alone.
    runtime = JobRuntime(runtime.job, runtime.next_sequence)
    services.journal.remove_job(JOB)
    services.driver.runtimes.clear()

    request = job_pb2.WatchJobRequest(job_id=JOB, from_sequence=1)
    async with asyncio.timeout(240):
        answers = watch_job(services.driver, services.nodes, runtime, request)
        assert [message async for message in answers] == []


async def test_a_participant_is_told_by_its_name_until_its_node_is_forgotten(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    session = ControlStream(
        NODE, Capabilities(name="attic", workloads={"digits-softmax": 1}), "test"
    )
    services.nodes.connect(session)
    async with driving(services):
        runtime = await prepared_job(services)
        join_event = NodeJoined(at_ms=Milliseconds(0), node=NODE)
        assert await services.driver.submit(JOB, join_event) == ""
    services.nodes.disconnect(session)
    assert [each.name for each in participants(services.nodes, runtime.job)] == ["attic"]
    services.nodes.forget(NODE)
    assert [each.name for each in participants(services.nodes, runtime.job)] == [""]


def test_a_resting_node_is_told_with_its_reason() -> None:
    plan = replace(round_plan(0, {ALICE: node_plan(3)}), resting={BOB: "too slow for this round"})
    job = after(planning(), RoundPlanned(at_ms=at(40), plan=plan))
    working_view, resting_view = participants(ConnectedNodes(), job)
    assert (working_view.node_id, working_view.reason) == (ALICE, "H=3, int4, as planned")
    assert (resting_view.node_id, resting_view.state) == (BOB, "resting")
    assert (resting_view.reason, resting_view.steps_total) == ("too slow for this round", 0)
    assert resting_view.slot == job.members[BOB].slot


def test_between_rounds_nobody_is_told() -> None:
    assert participants(ConnectedNodes(), planning()) == []


OWN, FOREIGN = (NodeId("0x" + letter * 40) for letter in "ab")


def rows_of_every_event() -> list[Entry]:
    """Each event of the machine, of a plan and of a measured round, with two real nodes' ids."""
    memory = PlanMemory(
        2, 0, is_sparse=False, nodes={ALICE: NodeMemory("int4"), BOB: NodeMemory("int4")}
    )
    plan = replace(round_plan(0, {ALICE: node_plan(), BOB: node_plan()}), memory=memory)
    rest = replace(plan, nodes={ALICE: node_plan()}, resting={BOB: "paused by its owner"})
    own_contribution = contribution(IdentityKey.generate(), node_pb2.Assignment(), b"", 1)
    updates = [
        MeasuredUpdate(replace(own_contribution, node=node), bytes(65), BasisPoints(1), "", "")
        for node in (ALICE, BOB)
    ]
    measurement = RoundMeasured(at_ms=at(1), round=0, updates=tuple(updates))
    plan_events = (RoundPlanned(at_ms=at(1), plan=each) for each in (plan, rest))
    others = [replace(each, node=BOB) for each in all_events() if hasattr(each, "node")]
    event_list = [*all_events(), *plan_events, measurement, *others]
    rows = [event_entry(JobId("job-1"), number, event) for number, event in enumerate(event_list)]
    names = {b'"alice"': OWN, b'"bob"': FOREIGN, b'"carol"': OWN}
    for name, node in names.items():
        rows = [
            replace(row, body_json=row.body_json.replace(name, f'"{node}"'.encode()))
            for row in rows
        ]
    return rows


def test_an_owner_is_told_nothing_of_others_nodes_whatever_the_event() -> None:
    rows = rows_of_every_event()
    assert FOREIGN.encode() in b"".join(row.body_json for row in rows)
    entries = own_entries(rows, frozenset({OWN}))
    text = b"".join(row.body_json for row in entries)
    assert FOREIGN.encode() not in text
    assert {row.kind for row in entries} == {row.kind for row in rows}
    assert text.count(OWN.encode()) == b"".join(r.body_json for r in rows).count(OWN.encode())
    assert own_entries(rows, None) is rows


def test_nobody_who_watches_a_job_reads_by_which_draw_it_compares_nodes() -> None:
    ready = AggregateReady(at_ms=at(60), round=0, model=model(1), draw="5ec2e7")
    message = event_message(event_entry(JOB, 3, ready))
    assert msgspec.json.decode(message.body_json, type=AggregateReady) == replace(ready, draw="")


async def test_a_token_has_a_hundred_jobs_under_way_at_most(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    servicer, caller = services.job_servicer(), Caller(Context(), "CreateJob")
    async with driving(services):
        answers = [await servicer.create_job(job_request(number), caller) for number in range(100)]
        with pytest.raises(HyperGPUError, match="have not ended, which is the most") as failure:
            await servicer.create_job(job_request(100), caller)
        assert failure.value.reason is Reason.LIMIT_REACHED
        assert "hypergpu job stop" in failure.value.fix
        assert await servicer.create_job(job_request(99), caller) == answers[99]
        await services.driver.submit(JobId(answers[99].job_id), JobStopped(at_ms=Milliseconds(0)))
        assert (await servicer.create_job(job_request(100), caller)).job_id


async def test_the_escrow_of_a_job_covers_only_nodes_that_can_work_for_it(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    for number, region in enumerate(("eu", "eu", "us", "us", "us")):
        capabilities = Capabilities(workloads={"digits-softmax": 1}, labels={"region": region})
        services.nodes.connect(ControlStream(NodeId(f"node-{number}"), capabilities, "test"))
    spec = replace(SPEC, nodes=NodeSelection(labels=("region = eu",)), pay=Pay(unit_price=1000))
    request = job_pb2.CreateJobRequest(request_id="one", spec_json=spec_json(spec))
    async with driving(services):
        await services.job_servicer().create_job(request, CALLER)
        (runtime,) = services.driver.runtimes.values()
    assert runtime.job.spec.pay.escrow == 2 * spec.escrow


def job_request(number: int) -> job_pb2.CreateJobRequest:
    """A request for a job of its own."""
    return job_pb2.CreateJobRequest(request_id=f"request-{number}", spec_json=spec_json(SPEC))
