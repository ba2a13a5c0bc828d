"""A coordinator's services without listeners: blobs in memory, the driver running."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coordinator.config import Settings
from coordinator.core.training.job.events import (
    AggregateReady,
    JobCreated,
    ModelInitialised,
    UpdateReceived,
)
from coordinator.core.training.job.state import AcceptedUpdate, Model
from coordinator.core.work.funding import Funding
from coordinator.core.work.work_events import JobStopped, NodeJoined
from coordinator.shell.app.assembly import job_servicer, node_servicer, open_fleet, waiting_reasons
from coordinator.shell.app.payments_host import PaymentsHost
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.performing import Performing
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.process import COMMAND
from coordinator.shell.evaluator.seat import EvaluatorLimits, SeatMaker, machine_limits
from coordinator.shell.kinds.needed_blobs import NeededBlobs, needed_blobs
from coordinator.shell.kinds.performers.resources import WorkResources, add_performers
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.kinds.training.job_runtime import JobRuntime, TrainingJobs
from coordinator.shell.kinds.training.perform import TrainingPerformer
from coordinator.shell.kinds.training.update_offers import UpdateOffers
from coordinator.shell.kinds.training.waiting_reasons import WaitingReasons
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.fleet_health import FleetHealth
from coordinator.shell.nodes.readings import Readings
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.probe_tokens import ProbeTokens
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.greeting import Greeter
from coordinator.shell.service.job import JobServicer
from coordinator.shell.service.job_terms import NewJobTerms
from coordinator.shell.service.node import NodeServicer, UpdateIntake
from coordinator.shell.service.node_session import Enrolment
from coordinator.shell.store.blobs.pins import Pins
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_commits import Commits
from coordinator.shell.store.blobs.upload_store import UploadStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.embedded import EmbeddedStore
from coordinator.shell.store.journal.coordinators import OtherCoordinators
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.storage import Storage
from coordinator.shell.translate import Capabilities
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.sandbox.sandbox import SandboxKind
from hypergpu.units import Bytes, Milliseconds, Samples
from tests.journals import FolderJournal
from tests.payments_double import RecordingPayments

JOB = JobId("job-000000000001")
NODE = NodeId("0x" + "a1" * 20)
SPEC = JobSpec(workload="digits-softmax", training=TrainingSettings(nodes=1))
_NOW = Milliseconds(0)
_QUOTA_BYTES = 1 << 20


class NoEvaluators(EvaluatorPool):
    """Has no process: a test says what is answered.

    Args:
        command: Of a process that is started all the same.
    """

    def __init__(self, command: tuple[str, ...] = ("false",), folder: Path | None = None) -> None:
        limits = machine_limits(EvaluatorLimits(spares=0, sandbox=SandboxKind.OFF))
        super().__init__(SeatMaker(folder or Path(tempfile.mkdtemp()), limits, command))


@dataclass(frozen=True)
class WholeShell:
    """Parts of a coordinator, any of which a test may replace, and what is made of them."""

    settings: Settings
    driver: Driver
    blobs: BlobStore
    uploads: UploadStore
    evaluator: EvaluatorPool
    nodes: ConnectedNodes
    health: FleetHealth
    readings: Readings
    allocator: NodeAllocator
    bulk: EmbeddedStore
    job_terms: NewJobTerms
    commits: Commits = field(default_factory=Commits)
    pins: Pins = field(default_factory=Pins)
    heavy: HeavyWork = field(default_factory=HeavyWork)
    offers: UpdateOffers = field(default_factory=UpdateOffers)
    others: OtherCoordinators = field(default_factory=OtherCoordinators)

    def replace(self, **parts: Any) -> "WholeShell":
        """The same with other parts."""
        return replace(self, **parts)

    @property
    def journal(self) -> Journal:
        return self.driver.journal

    @property
    def storage(self) -> Storage:
        folder, bulk = self.settings.data_dir, self.bulk
        return Storage(folder, self.blobs, self.uploads, self.commits, self.pins, bulk)

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.nodes, self.readings, self.health, self.allocator)

    @cached_property
    def resources(self) -> WorkResources:
        performing = Performing(self.driver)
        resources = WorkResources(
            self.settings, performing, self.storage, self.fleet, self.evaluator, self.heavy
        )
        add_performers(resources)
        return resources

    @property
    def performing(self) -> Performing:
        return self.resources.performing

    @property
    def training(self) -> TrainingPerformer:
        return self.performing.performer(TrainingPerformer)

    @property
    def jobs(self) -> TrainingJobs:
        return self.driver.runtimes_of(JobRuntime)

    @property
    def needs(self) -> NeededBlobs:
        return needed_blobs(self.driver)

    @property
    def reasons(self) -> WaitingReasons:
        return waiting_reasons(self.resources)

    @property
    def intake(self) -> UpdateIntake:
        weighing = self.training.weighing
        return UpdateIntake(
            self.driver, self.storage, self.fleet, self.heavy, weighing, self.offers
        )

    @property
    def greeter(self) -> Greeter:
        echo = ProbeEcho(ProbeTokens(), self.nodes.streams.__contains__)
        return Greeter(self.settings, self.nodes, echo, self.bulk, self.others)

    def job_servicer(self) -> JobServicer:
        return job_servicer(self.resources, self.job_terms, self.needs)

    def node_servicer(self, gate: NodeGate, enrolment: Enrolment) -> NodeServicer:
        payments = self.job_terms.payments
        servicer = node_servicer(self.resources, self.greeter, gate, enrolment, payments)
        return replace(servicer, intake=self.intake)


def services_in(folder: Path, journal: Journal | None = None) -> WholeShell:
    """A whole shell over a folder."""
    journal = journal or FolderJournal(folder)
    space = Space(folder, _QUOTA_BYTES)
    blobs = BlobStore(folder, space)
    uploads = UploadStore(folder, blobs, space)
    (folder / "sketches.secret").write_bytes(bytes(32))
    key, settings = IdentityKey.generate(), Settings(data_dir=folder)
    driver = Driver(journal, KINDS)
    fleet = open_fleet(settings, driver)
    payments = RecordingPayments(PaymentsHost(settings, key, driver, fleet.nodes))
    return WholeShell(
        settings=settings,
        driver=driver,
        blobs=blobs,
        uploads=uploads,
        evaluator=NoEvaluators(COMMAND, folder),
        nodes=fleet.nodes,
        health=fleet.health,
        readings=fleet.readings,
        allocator=fleet.allocator,
        bulk=EmbeddedStore(folder, uploads, lambda _: None),
        job_terms=NewJobTerms(Address(key.node_id), payments),
    )


def payments_of(services: WholeShell) -> RecordingPayments:
    """The payments package of `services_in`."""
    assert isinstance(services.job_terms.payments, RecordingPayments)
    return services.job_terms.payments


@asynccontextmanager
async def driving(services: WholeShell) -> AsyncIterator[None]:
    """Run the driver inside the block; commands go nowhere."""
    driver_task = asyncio.create_task(services.driver.run(lambda *_: None, lambda *_: None))
    try:
        yield
    finally:
        services.driver.close()
        await driver_task


async def prepared_job(services: WholeShell) -> JobRuntime:
    """A job with a model that waits for its one node."""
    model = Model(0, BlobRef(digest_of(b"model"), Bytes(5)))
    creation = JobCreated(at_ms=_NOW, job_id=JOB, spec=SPEC)
    initialisation = ModelInitialised(at_ms=_NOW, model=model, partition_sizes=(Samples(1000),))
    for event in (creation, initialisation):
        assert await services.driver.submit(JOB, event) == ""
    return services.jobs[JOB]


def connect_node(services: WholeShell, node: NodeId = NODE) -> ControlStream:
    """A node's control stream, able to work for the job."""
    session = ControlStream(node, Capabilities(workloads={"digits-softmax": 1}), "test")
    services.nodes.connect(session)
    return session


NOW = Milliseconds(0)
PAYS = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=5, inner_steps=1, batch_size=100, nodes=1),
    pay=Pay(unit_price=1_000_000, escrow=10**12, rounds_per_epoch=5),
)


def model(rounds: int) -> Model:
    return Model(rounds, BlobRef(digest_of(b"model %d" % rounds), Bytes(8)))


async def receive_update(services: WholeShell, number: int) -> None:
    """The update of the job's one node comes in."""
    round_ = services.driver.runtimes[JOB].job.round
    assert round_ is not None
    update = AcceptedUpdate(
        BlobRef(digest_of(b"%d" % number), Bytes(4)),
        samples=Samples(0),
        inner_steps=0,
        nonce=1 + number,
        signature=bytes(65),
    )
    lease = round_.participants[NODE].lease
    event = UpdateReceived(at_ms=NOW, node=NODE, round=number, lease=lease, update=update)
    assert await services.driver.submit(JOB, event) == ""


async def finish_round(services: WholeShell, number: int) -> None:
    """An update comes in, is folded and measured."""
    await receive_update(services, number)
    fold_event = AggregateReady(at_ms=NOW, round=number, model=model(number + 1))
    assert await services.driver.submit(JOB, fold_event) == ""


async def begin_job(services: WholeShell, funding: Funding | None = None) -> None:
    """A job in round 0."""
    terms = services.job_terms.terms(JOB, PAYS.pay)
    creation = JobCreated(at_ms=NOW, job_id=JOB, spec=PAYS, terms=terms, funding=funding)
    first = ModelInitialised(at_ms=NOW, model=model(0), partition_sizes=(Samples(1000),))
    for event in (creation, first, NodeJoined(at_ms=NOW, node=NODE)):
        assert await services.driver.submit(JOB, event) == ""


async def stop_in_second_round(services: WholeShell) -> None:
    """A job that is stopped while the second update of its one node waits for its fold."""
    await begin_job(services)
    await finish_round(services, 0)
    await receive_update(services, 1)
    assert await services.driver.submit(JOB, JobStopped(at_ms=NOW)) == ""
