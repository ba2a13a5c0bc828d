"""Makes the parts of a coordinator, each of what it uses."""

from coordinator.config import Settings
from coordinator.shell.app.takeover import Turn, open_blobs
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.performing import Performing
from coordinator.shell.engine.evaluation import EngineEvaluator, EvaluatorPlace, Evaluators
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.seat import EvaluatorLimits, SeatMaker, clear_seats, machine_limits
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.performers.resources import WorkResources, add_performers
from coordinator.shell.kinds.serving.perform import ServePerformer
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.perform import TrainingPerformer
from coordinator.shell.kinds.training.update_offers import UpdateOffers
from coordinator.shell.kinds.training.waiting_reasons import WaitingReasons
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.fleet_health import FleetHealth
from coordinator.shell.nodes.fleet_speeds import FleetSpeeds
from coordinator.shell.nodes.identity.spec_keys import SpecKeys
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.nodes.readings import Readings
from coordinator.shell.service.contributions import ResultIntake
from coordinator.shell.service.creation import JobCreation
from coordinator.shell.service.forecasts import JobForecasts
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.gateways import GatewayCertifier
from coordinator.shell.service.greeting import Greeter
from coordinator.shell.service.job import JobServicer
from coordinator.shell.service.job_terms import NewJobTerms
from coordinator.shell.service.model_layouts import ModelLayouts
from coordinator.shell.service.node import NodeServicer, UpdateIntake
from coordinator.shell.service.node_session import ControlSessions, Enrolment
from coordinator.shell.service.own_files import OwnFiles
from coordinator.shell.service.removal import JobRemoval
from coordinator.shell.service.serving import ServingServicer
from coordinator.shell.service.spec_keys import SpecKeyCalls
from coordinator.shell.service.transfer import NodeBlobs, UserFiles
from coordinator.shell.store.blob_collector import BlobNeeds
from coordinator.shell.store.blobs.pins import Pins
from coordinator.shell.store.blobs.upload_commits import Commits
from coordinator.shell.store.blobs.upload_store import UploadStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.messages import BytesReceived, BytesServed
from coordinator.shell.store.bulk.opening import BulkPlace, open_store
from coordinator.shell.store.datasets import clear_unfinished
from coordinator.shell.store.storage import Storage, datasets_dir
from hypergpu.engine.engine import Engine
from hypergpu.engine.opening import open_engine
from hypergpu.extension import PaymentsPlugin
from hypergpu.sandbox.sandbox import SandboxKind
from hypergpu.units import Bytes, Milliseconds


def open_resources(
    settings: Settings, driver: Driver, storage: Storage, fleet: Fleet
) -> WorkResources:
    """Open evaluators and engine, and let performers carry out what jobs command. Blocks."""
    engine = open_engine(settings.engine) if settings.engine else None
    resources = WorkResources(
        settings,
        Performing(driver),
        storage,
        fleet,
        _open_evaluators(settings, engine),
        HeavyWork(engine, settings.engine_parameters_least),
    )
    add_performers(resources)
    return resources


def open_fleet(settings: Settings, driver: Driver) -> Fleet:
    """The nodes, as far as the journal knows them."""
    journal = driver.journal
    nodes, health = (
        ConnectedNodes(journal.pauses(), journal.trust_labels()),
        FleetHealth(journal.health()),
    )
    turn_ms = Milliseconds(settings.job_turn_ms)
    return Fleet(
        nodes,
        Readings(speeds=FleetSpeeds(journal.speeds())),
        health,
        NodeAllocator(driver, nodes, journal, turn_ms, health),
    )


def open_storage(settings: Settings, turn: Turn, driver: Driver, readings: Readings) -> Storage:
    """Open files and what carries them. An object store that is away is waited for. Blocks."""
    jobs = driver.runtimes_of(JobRuntime)

    def count_bytes(moved: BytesServed | BytesReceived) -> None:
        if isinstance(moved, BytesReceived):
            if moved.sender is not None:
                readings.upload_meter(moved.sender).add(moved)
                failpoint("upload.received")
        elif (runtime := jobs.get(moved.purpose)) is not None:
            runtime.bytes_down = Bytes(runtime.bytes_down + moved.size_bytes)

    folder = settings.data_dir
    space = Space(folder, settings.disk_quota_bytes)
    blobs = open_blobs(folder, space, turn.kept)
    uploads = UploadStore(folder, blobs, space)
    clear_unfinished(datasets_dir(folder))
    place = BulkPlace(folder, settings.blobs, turn.key.node_id)
    bulk = open_store(place, blobs, uploads, count_bytes, turn.kept)
    return Storage(folder, blobs, uploads, Commits(), Pins(), bulk)


def _open_evaluators(settings: Settings, engine: Engine | None) -> Evaluators:
    clear_seats(settings.data_dir)
    limits = evaluator_limits(settings)
    pool = EvaluatorPool(SeatMaker(settings.data_dir, limits))
    if engine is None:
        return pool
    place = EvaluatorPlace(str(settings.data_dir.absolute()), limits)
    return EngineEvaluator(engine, pool, place)


def evaluator_limits(settings: Settings) -> EvaluatorLimits:
    """What evaluators may take on this machine."""
    return machine_limits(
        EvaluatorLimits(
            answer_s=settings.evaluator_limit_s,
            memory_bytes=settings.evaluator_memory_bytes,
            places=settings.evaluators,
            spares=settings.evaluator_spares,
            sandbox=SandboxKind(settings.evaluator_sandbox),
        )
    )


def waiting_reasons(resources: WorkResources) -> WaitingReasons:
    """What training jobs may wait for."""
    bulk, allocator = resources.storage.bulk, resources.fleet.allocator
    return WaitingReasons(bulk, resources.evaluators, allocator)


def job_servicer(resources: WorkResources, job_terms: NewJobTerms, needs: BlobNeeds) -> JobServicer:
    """The calls of users."""
    performing, storage, fleet = resources.performing, resources.storage, resources.fleet
    driver, training = performing.driver, performing.performer(TrainingPerformer)
    own_files, keys = OwnFiles(driver), SpecKeyCalls(driver, SpecKeys(driver.journal))
    jobs, evaluators = driver.runtimes_of(JobRuntime), resources.evaluators
    layouts = ModelLayouts(jobs, storage.blobs, evaluators)
    settings, heavy, times = resources.settings, resources.heavy, training.command_times
    return JobServicer(
        performing=performing,
        storage=storage,
        fleet=fleet,
        files=UserFiles(storage, heavy, own_files),
        preparation=training.preparation,
        creation=JobCreation(performing, storage, fleet.allocator, job_terms, own_files, keys),
        removal=JobRemoval(driver, storage, needs, job_terms.payments),
        forecasts=JobForecasts(settings, fleet, times, heavy, layouts),
        reasons=waiting_reasons(resources),
    )


def serving_servicer(
    resources: WorkResources, known: KnownNodes, certifier: GatewayCertifier
) -> ServingServicer:
    """The calls to served models."""
    performing = resources.performing
    performer = performing.performer(ServePerformer)
    return ServingServicer(performing.driver, performer, resources.fleet, known, certifier)


def node_servicer(
    resources: WorkResources,
    greeter: Greeter,
    gate: NodeGate,
    enrolment: Enrolment,
    payments: PaymentsPlugin | None,
) -> NodeServicer:
    """The calls of nodes."""
    performing, storage, fleet = resources.performing, resources.storage, resources.fleet
    driver, training = performing.driver, performing.performer(TrainingPerformer)
    heavy, weighing = resources.heavy, training.weighing
    return NodeServicer(
        gate,
        enrolment,
        ControlSessions(gate, greeter, driver, fleet, performing, payments),
        NodeBlobs(performing, storage, fleet),
        UpdateIntake(driver, storage, fleet, heavy, weighing, UpdateOffers()),
        ResultIntake(performing, storage, heavy, fleet.nodes),
    )
