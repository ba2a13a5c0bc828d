"""A coordinator's services without listeners: blobs in memory, the driver running."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.config import Settings
from coordinator.core.job.events import JobCreated, ModelInitialised
from coordinator.core.job.state import Model
from coordinator.shell.app.payments import PaymentsHost
from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import UploadStore
from coordinator.shell.evaluator.process import EvaluatorProcess
from coordinator.shell.journal.journal import Journal
from coordinator.shell.runtime.connected_nodes import ConnectedNodes, ControlStream
from coordinator.shell.runtime.driver import Driver
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.new_job_terms import NewJobTerms
from coordinator.shell.runtime.node_allocator import NodeAllocator
from coordinator.shell.runtime.services import Pins, Services
from coordinator.shell.runtime.upload_nonces import UploadNonces
from coordinator.shell.telemetry.probe_echo import ProbeEcho
from coordinator.shell.telemetry.probe_tokens import ProbeTokens
from coordinator.shell.telemetry.readings import Readings
from coordinator.shell.translate import Capabilities
from hypergpu.digest import digest_of
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.keys.signature import IdentityKey
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes, Milliseconds, Samples
from tests.journals import FolderJournal
from tests.payments_double import RecordingPayments

JOB = JobId("job-000000000001")
NODE = NodeId("0x" + "a1" * 20)
SPEC = JobSpec(workload="digits-softmax", training=TrainingSettings(nodes=1))
_NOW = Milliseconds(0)
_QUOTA_BYTES = 1 << 20


def services_in(folder: Path, journal: Journal | None = None) -> Services:
    """Everything that acts and servicers get."""
    journal = journal or FolderJournal(folder)
    space = Space(folder, _QUOTA_BYTES)
    blobs = BlobStore(folder, space)
    key, settings = IdentityKey.generate(), Settings(data_dir=folder)
    driver, nodes = Driver(journal), ConnectedNodes()
    payments = RecordingPayments(PaymentsHost(settings, key, journal, driver, nodes))
    return Services(
        settings=settings,
        journal=journal,
        blobs=blobs,
        uploads=UploadStore(folder, blobs, space),
        evaluator=EvaluatorProcess(),
        driver=driver,
        nodes=nodes,
        allocator=NodeAllocator(driver, nodes),
        pins=Pins(),
        nonces=UploadNonces(),
        readings=Readings(),
        echo=ProbeEcho(ProbeTokens(), nodes.streams.__contains__),
        job_terms=NewJobTerms(Address(key.node_id), payments),
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
