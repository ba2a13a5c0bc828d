"""A coordinator's services without listeners: blobs in memory, the driver running."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

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
from coordinator.shell.app.payments_host import PaymentsHost
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.job_runtime import JobRuntime
from coordinator.shell.driver.job_terms import NewJobTerms
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.process import COMMAND
from coordinator.shell.evaluator.seat import EvaluatorLimits, SeatMaker, machine_limits
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet_health import FleetHealth
from coordinator.shell.nodes.fleet_speeds import FleetSpeeds
from coordinator.shell.nodes.readings import Readings
from coordinator.shell.nodes.update_offers import UpdateOffers
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.probe_tokens import ProbeTokens
from coordinator.shell.services import Services
from coordinator.shell.store.blobs.pins import Pins
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_commits import Commits
from coordinator.shell.store.blobs.upload_store import UploadStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.embedded import EmbeddedStore
from coordinator.shell.store.journal.coordinators import OtherCoordinators
from coordinator.shell.store.journal.journal import Journal
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


def services_in(folder: Path, journal: Journal | None = None) -> Services:
    """Everything that acts and servicers get."""
    journal = journal or FolderJournal(folder)
    space = Space(folder, _QUOTA_BYTES)
    blobs = BlobStore(folder, space)
    uploads = UploadStore(folder, blobs, space)
    key, settings = IdentityKey.generate(), Settings(data_dir=folder)
    driver, nodes = Driver(journal, KINDS), ConnectedNodes(journal.pauses())
    health = FleetHealth(journal.health())
    payments = RecordingPayments(PaymentsHost(settings, key, journal, driver, nodes))
    return Services(
        settings=settings,
        journal=journal,
        blobs=blobs,
        uploads=uploads,
        evaluator=NoEvaluators(COMMAND, folder),
        driver=driver,
        nodes=nodes,
        allocator=NodeAllocator(driver, nodes, journal, health=health),
        pins=Pins(),
        offers=UpdateOffers(),
        commits=Commits(),
        heavy=HeavyWork(),
        readings=Readings(speeds=FleetSpeeds(journal.speeds())),
        echo=ProbeEcho(ProbeTokens(), nodes.streams.__contains__),
        bulk=EmbeddedStore(folder, uploads, lambda _: None),
        job_terms=NewJobTerms(Address(key.node_id), payments),
        others=OtherCoordinators(),
        health=health,
        sketch_secret=bytes(32),
    )


def payments_of(services: Services) -> RecordingPayments:
    """The payments package of `services_in`."""
    assert isinstance(services.job_terms.payments, RecordingPayments)
    return services.job_terms.payments


@asynccontextmanager
async def driving(services: Services) -> AsyncIterator[None]:
    """Run the driver inside the block; commands go nowhere."""
    running = asyncio.create_task(services.driver.run(lambda *_: None, lambda *_: None))
    try:
        yield
    finally:
        services.driver.close()
        await running


async def prepared_job(services: Services) -> JobRuntime:
    """A job with a model that waits for its one node."""
    model = Model(0, BlobRef(digest_of(b"model"), Bytes(5)))
    created = JobCreated(at_ms=_NOW, job_id=JOB, spec=SPEC)
    initialised = ModelInitialised(at_ms=_NOW, model=model, partition_sizes=(Samples(1000),))
    for event in (created, initialised):
        assert await services.driver.submit(JOB, event) == ""
    return services.driver.runtimes[JOB]


def connect_node(services: Services, node: NodeId = NODE) -> ControlStream:
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


async def receive_update(services: Services, number: int) -> None:
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


async def finish_round(services: Services, number: int) -> None:
    """An update comes in, is folded and measured."""
    await receive_update(services, number)
    folded = AggregateReady(at_ms=NOW, round=number, model=model(number + 1))
    assert await services.driver.submit(JOB, folded) == ""


async def begin_job(services: Services, funding: Funding | None = None) -> None:
    """A job in round 0."""
    terms = services.job_terms.terms(JOB, PAYS.pay)
    created = JobCreated(at_ms=NOW, job_id=JOB, spec=PAYS, terms=terms, funding=funding)
    first = ModelInitialised(at_ms=NOW, model=model(0), partition_sizes=(Samples(1000),))
    for event in (created, first, NodeJoined(at_ms=NOW, node=NODE)):
        assert await services.driver.submit(JOB, event) == ""


async def stop_in_second_round(services: Services) -> None:
    """A job that is stopped while the second update of its one node waits for its fold."""
    await begin_job(services)
    await finish_round(services, 0)
    await receive_update(services, 1)
    assert await services.driver.submit(JOB, JobStopped(at_ms=NOW)) == ""
