"""The demo past one machine: the fixed job twice. First one coordinator has it, undisturbed. Then
the coordinator that drives is killed half-way and loses its folder, and another one goes on, from a
PostgreSQL and an object store.
"""

import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from benchmarks.ours.demo.postgresql import PostgresServer, check_installed
from benchmarks.ours.demo.takeover import GATEWAYS, SharedServices, TakeoverCluster
from hypergpu.clock import unix_ms
from hypergpu.command_line import program
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import JobSpec
from hypergpu.journal.events import CoordinatorChangedEvent, RoundRecordedEvent, UpdateReceivedEvent
from hypergpu.units import Milliseconds, several
from hypergpu.user.cli.demo.fixed import follow_fixed
from hypergpu.user.cli.demo.folder import (
    ACCOUNTS_NAME,
    BUCKETS_NAME,
    CHAIN_NAME,
    DATABASE_NAME,
    LOGS_NAME,
    MODEL_NAME,
    UNDISTURBED_NAME,
    demo_folder,
)
from hypergpu.user.cli.demo.following import Undisturbed
from hypergpu.user.cli.demo.job import PAY, DemoPlan
from hypergpu.user.cli.demo.logs import logged_ms
from hypergpu.user.cli.demo.settlement import DemoPay, missing_package, settle_demo
from hypergpu.user.client import Coordinator, JobEvent
from hypergpu.user.client.history import History
from hypergpu.user.cluster.children import ChildStart, OwnedProcesses
from hypergpu.user.cluster.cluster import LocalCluster, SettlingBy, StartRefusedError, read_line
from hypergpu.user.cluster.folder import run_folder
from hypergpu.user.cluster.s3_server import BUCKET, S3Server, server_program
from hypergpu.user.terminal.output import amount_text, say, span

_EXTRAS = {"psycopg": "postgresql", "ray": "ray", "boto3": "s3"}
"""Extras that it needs, by a package of each."""
_CHAIN_WITHIN_S = 60.0
_RAY_COMPUTES = "Ray computes"


class ChainLine(msgspec.Struct, frozen=True):
    """The line that a local chain prints once it listens."""

    url: str


class TakenOver(NamedTuple):
    """How another coordinator came to drive the job."""

    round: int
    """Round in which the first one was killed; counts from 1."""
    after_s: float
    """From the kill to the first update that its successor accepted."""


class LosesCoordinator(Protocol):
    """A cluster with a coordinator to lose."""

    logs: Path
    """See `TakeoverCluster`, here and below."""

    def lose_active(self) -> int: ...

    def dead(self) -> list[str]: ...


class CoordinatorFault:
    """Kills the coordinator that drives half-way, in a round of which it has some of the updates.

    Then it looks for the first update that its successor accepts.
    """

    is_paused = False

    def __init__(self, cluster: LosesCoordinator, spec: JobSpec) -> None:
        """See `Fault`.

        Args:
            cluster: Whose coordinator is killed.
            spec: The job.
        """
        self._cluster = cluster
        self._spec = spec
        self._held = 0
        """Updates of the open round that the coordinator has."""
        self._killed_ms = Milliseconds(0)
        self._killed_in = 0
        self._has_changed = False
        self.taken_over: TakenOver | None = None

    def dead(self) -> list[str]:
        """See `Fault`."""
        return self._cluster.dead()

    def advance(self, events: Sequence[JobEvent], history: History) -> str:
        """Kill it, or say when work went on."""
        if not self._killed_in:
            return self._kill(len(history.rounds) + 1) if self._is_time(events, history) else ""
        if self.taken_over or not self._is_at_work(events):
            return ""
        after_s = (self._accepted_ms() - self._killed_ms) / 1000
        self.taken_over = TakenOver(self._killed_in, after_s)
        return f"{after_s:.1f} s after the kill coordinator-2 accepted the next update"

    def _is_time(self, events: Sequence[JobEvent], history: History) -> bool:
        for event in events:
            if isinstance(event.content, RoundRecordedEvent):
                self._held = 0
            elif isinstance(event.content, UpdateReceivedEvent):
                self._held += 1
        quarters = 4 * sum(each.samples for each in history.rounds) // self._spec.stated_samples
        is_within = 0 < self._held < self._spec.training.nodes
        # Where the events of whole rounds come at once, any instant will do.
        return quarters >= 3 or (quarters == 2 and is_within)

    def _kill(self, number: int) -> str:
        self._killed_in, self._killed_ms = number, unix_ms()
        process_id = self._cluster.lose_active()
        share_text = f"which had {self._held} of {several(self._spec.training.nodes, 'update')}"
        kill_text = (
            f"SIGKILL to coordinator-1 (process {process_id}) in round {number}, {share_text}"
        )
        return f"{kill_text}; its folder is deleted"

    def _accepted_ms(self) -> Milliseconds:
        """When a node was told of the first update that the successor accepted."""
        serving_ms = logged_ms(self._cluster.logs, "coordinator-2.log", "serving")
        accepted_ms = logged_ms(self._cluster.logs, "node-*.log", "UploadAccepted")
        return next(
            (each for each in accepted_ms if serving_ms and each >= serving_ms[0]), unix_ms()
        )

    def _is_at_work(self, events: Sequence[JobEvent]) -> bool:
        """Whether an update was accepted by the successor: some before may be seen late."""
        for event in events:
            self._has_changed |= isinstance(event.content, CoordinatorChangedEvent)
            if self._has_changed and isinstance(event.content, UpdateReceivedEvent):
                return True
        return False


class ScaleOutcome(NamedTuple):
    """Findings that are compared at the end."""

    undisturbed: str
    """Digest of the model that one coordinator made."""
    model: str
    """Digest of the model that two coordinators made."""
    updates: int
    """Updates that the job consists of."""
    accepted: Sequence[tuple[int, str]]
    """Round and node of each accepted update."""
    pay: DemoPay
    ray_starts: int
    """Coordinators for which Ray computed."""
    taken_over: TakenOver | None


def outcome_faults(outcome: ScaleOutcome) -> list[str]:
    """Say what is not as it should be."""
    counts = Counter(outcome.accepted)
    twice = [f"round {each[0] + 1} of {each[1]}" for each, count in counts.items() if count > 1]
    pay = outcome.pay
    faults = {
        "the models differ": outcome.model != outcome.undisturbed,
        "no update was accepted after the kill": outcome.taken_over is None,
        f"accepted twice: {', '.join(twice)}": bool(twice),
        f"{len(counts)} of {outcome.updates} updates were accepted": (
            len(counts) != outcome.updates
        ),
        f"{pay.receipts} receipts were signed for {len(counts)} updates": (
            pay.receipts != len(counts)
        ),
        f"{pay.paid} of {pay.earned} was paid": pay.paid not in (None, pay.earned),
        "Ray computed for one coordinator only": outcome.ray_starts == 1,
        "Ray computed nothing": outcome.ray_starts == 0,
    }
    return [text for text, is_so in faults.items() if is_so]


def demonstrate_scale(folder: Path, chosen: DemoPlan) -> None:
    """Train undisturbed, train with the loss of the coordinator, and compare.

    Args:
        folder: Gets logs, models and the ledger.
        chosen: A fixed plan.

    Raises:
        HyperGPUError: MACHINE_UNFIT, something that it starts is not installed; DEMO_MISSED, the
            second time came to something else than the first; FILE_UNUSABLE, as of any demo.
    """
    _check_installed()
    with run_folder(demo_folder(folder)), ExitStack() as owner:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        nodes = [f"node-{number}" for number in range(1, chosen.spec.training.nodes + 1)]
        undisturbed_model = _train_undisturbed(folder / UNDISTURBED_NAME, chosen, nodes)
        say()
        services, pays = _start_services(folder, chosen, owner)
        cluster = owner.enter_context(TakeoverCluster(folder, chosen.worker, services))
        spec = replace(chosen.spec, pay=PAY) if pays else chosen.spec
        outcome = _train_with_loss(cluster, chosen._replace(spec=spec), nodes, folder)
        _say_end(outcome._replace(undisturbed=undisturbed_model), folder)


def _check_installed() -> None:
    """Before anything is started."""
    missing_packages = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing_packages:
        extras = ",".join(_EXTRAS[name] for name in missing_packages)
        detail = f"this demo needs packages that are not installed: {', '.join(missing_packages)}"
        fix = f"install the extras: pip install 'hypergpu[{extras}]'"
        raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix)
    check_installed()
    server_program()


def _train_undisturbed(folder: Path, chosen: DemoPlan, nodes: Sequence[str]) -> str:
    """What `--fixed` alone does, without lines; returns the model's digest."""
    say(f"first without any loss: one coordinator, {len(nodes)} nodes; logs: {folder}/{LOGS_NAME}")
    with LocalCluster(folder, chosen.worker) as cluster:
        cluster.start_coordinator()
        with cluster.operator() as coordinator:
            job_id = coordinator.submit(replace(chosen.spec, name="undisturbed"))
            cluster.start_nodes({name: {} for name in nodes})
            title = f"{len(nodes)} nodes train {chosen.spec.workload}, undisturbed"
            nobody = Undisturbed(cluster)
            digest = follow_fixed(coordinator, job_id, title, nobody, folder / MODEL_NAME)
    say(f"model {digest}")
    return digest


def _start_services(
    folder: Path, chosen: DemoPlan, owner: ExitStack
) -> tuple[SharedServices, bool]:
    """Start what outlives a coordinator; says each. Gives also whether there is a chain."""
    logs = folder / LOGS_NAME
    say(f"now with the loss of a coordinator; logs: {logs}")
    beside = OwnedProcesses(logs)
    owner.callback(beside.end)
    database = owner.enter_context(PostgresServer(folder / DATABASE_NAME, logs / "postgresql.log"))
    say(f"postgresql on {database.address}")
    bucket = owner.enter_context(S3Server(folder / BUCKETS_NAME))
    say(f"s3 server, rclone's, on {bucket.url.removeprefix('http://')}")
    chain = _start_chain(folder / CHAIN_NAME, chosen.metering, beside)
    environment = {
        **bucket.environment,
        **chain,
        "HYPERGPU_COORDINATOR_DATABASE_URL": database.url,
        "HYPERGPU_COORDINATOR_ENGINE": "ray",
        # The demo's model is small: else no engine would be asked.
        "HYPERGPU_COORDINATOR_ENGINE_PARAMETERS_LEAST": "0",
        "OMP_NUM_THREADS": "1",
    }
    return SharedServices(f"s3://{BUCKET}/demo", environment), bool(chain)


def _start_chain(folder: Path, metering: str, beside: OwnedProcesses) -> Mapping[str, str]:
    """The coordinators' settings of a local chain; empty where this machine has none."""
    lack = missing_package(None)
    if not lack:
        command = program("payments.shell.local_chain", str(folder))
        child = beside.start("chain", ChildStart(command, is_read=True))
        try:
            url = read_line(child, ChainLine, "the local chain", _CHAIN_WITHIN_S).url
        except StartRefusedError as error:
            lack = error.detail
        else:
            say(f"a local chain of play money, Anvil, on {url.removeprefix('http://')}")
            own = {"HYPERGPU_COORDINATOR_CHAIN_URL": url}
            return SettlingBy("anvil", metering).environment() | own
    say(f"{lack}: nothing is paid")
    return {}


def _start_programs(cluster: TakeoverCluster) -> None:
    cluster.start_coordinators()
    active, standby = cluster.addresses
    say(f"coordinator-1 on {active} drives, coordinator-2 on {standby} stands by")
    say("ray is started by the coordinator that drives, for its first fold")
    address = cluster.start_gateways()
    say(f"{GATEWAYS} gateways share {address}, where nodes join")


def _train_with_loss(
    cluster: TakeoverCluster, chosen: DemoPlan, nodes: Sequence[str], folder: Path
) -> ScaleOutcome:
    """Train with the loss half-way, and wait until all is paid."""
    _start_programs(cluster)
    spec = chosen.spec
    with cluster.operator() as coordinator:
        job_id = coordinator.submit(spec)
        cluster.start_nodes({name: {} for name in nodes})
        title = f"{len(nodes)} nodes train {spec.workload} through gateways"
        fault = CoordinatorFault(cluster, spec)
        digest = follow_fixed(
            coordinator, job_id, f"{title}; coordinator-1 is killed", fault, folder / MODEL_NAME
        )
        say(coordinator.job(job_id).takeover)
        say()
        pay = settle_demo(cluster.ready, coordinator, job_id, folder / ACCOUNTS_NAME)
        accepted_updates = _accepted_updates(coordinator, job_id)
    return ScaleOutcome(
        undisturbed="",
        model=digest,
        updates=spec.training.rounds * len(nodes),
        accepted=accepted_updates,
        pay=pay,
        ray_starts=_count_ray_starts(cluster.logs),
        taken_over=fault.taken_over,
    )


def _accepted_updates(coordinator: Coordinator, job_id: str) -> list[tuple[int, str]]:
    """Round and node of each; rounds count from 0."""
    events = coordinator.read_events(job_id)
    contents = (event.content for event in events)
    return [(each.round, each.node) for each in contents if isinstance(each, UpdateReceivedEvent)]


def _count_ray_starts(logs: Path) -> int:
    """Coordinators that said that Ray computes for them."""
    return sum(bool(logged_ms(logs, f"coordinator-{each}.log", _RAY_COMPUTES)) for each in (1, 2))


def _say_end(outcome: ScaleOutcome, folder: Path) -> None:
    """Print both digests, and whether all is as it should be.

    Raises:
        HyperGPUError: DEMO_MISSED, it is not.
    """
    pay = outcome.pay
    say()
    say(f"undisturbed  model {outcome.undisturbed}")
    say(f"with loss    model {outcome.model}")
    if (loss := outcome.taken_over) is not None:
        say(f"takeover     killed in round {loss.round}, at work again {span(loss.after_s)} later")
    paid_text = "" if pay.paid is None else f", {amount_text(pay.paid, pay.decimals)} paid"
    receipts = several(pay.receipts, "receipt")
    say(f"pay          {receipts} for {several(len(outcome.accepted), 'update')}{paid_text}")
    say(f"files        {folder}{os.sep}")
    if faults := outcome_faults(outcome):
        raise HyperGPUError(Reason.DEMO_MISSED, "; ".join(faults), fix=f"see {folder}/{LOGS_NAME}")
    settlement_text = "all receipts are paid" if pay.paid is not None else "no chain, so no pay"
    say(f"VALID: the same model, no update counts twice, {settlement_text}")
