"""Performs what served models command, and has their calls answered."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from msgspec.structs import replace

from coordinator.core.serving.commands import (
    CheckAgain,
    RefuseAnswer,
    RefuseStage,
    RequestSignature,
    ServeCommand,
)
from coordinator.core.serving.events import (
    CountsClosed,
    ModelUnloaded,
    ModelWanted,
    ReplicaHandedBack,
    ServeCreated,
    VersionPublished,
    WindowCounted,
    WindowSigned,
)
from coordinator.core.serving.leasing import node_work
from coordinator.core.serving.state import CountedWindow, ServeJob, ServePhase
from coordinator.core.work.work_commands import CancelWork
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.performers.file_admission import admit_files
from coordinator.shell.kinds.performers.packed_work import (
    ForeignBlobs,
    PackedCommand,
    PackedWorkPerformer,
)
from coordinator.shell.kinds.performers.resources import WorkResources
from coordinator.shell.kinds.serving.answer_checks import CheckEvent
from coordinator.shell.kinds.serving.desk import CallDesk
from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from coordinator.shell.kinds.serving.ring_desk import CallReports
from coordinator.shell.kinds.serving.ring_keeping import RingKeeper
from coordinator.shell.kinds.serving.ring_parts import StageEvent
from coordinator.shell.kinds.serving.round_storage import TrainerPorts
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.tunings import Tunings
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.assignment import Lease
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.ledger_terms import separator_of
from hypergpu.result_statements import CountStatement, count_contribution
from hypergpu.serving.tuned_model import VersionOffer
from hypergpu.statements import SignedContribution, is_signed_by
from hypergpu.units import Milliseconds, several
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.messages import digest_message, terms_message

COUNT, CHECK, CLOSE = "count", "check", "close counts"
TRUST = "take a model from a node"
FOLLOW, IDLE, WANTED = "follow a training", "unload when idle", "load again"
_IDLE_LOOK_S = 30.0
_IDLE_LATER_S = 0.05
_NOW = Milliseconds(0)  # stamped by the driver


def count_statement(job: ServeJob, number: int, window: CountedWindow) -> CountStatement:
    """What a node signs of a count."""
    lease = Lease(job.job_id, number, window.lease)
    return CountStatement(lease, window.count.units, window.answers)


class ServePerformer(PackedWorkPerformer):
    """Carries out what served models have commanded."""

    def __init__(self, resources: WorkResources) -> None:
        super().__init__(resources)
        self._storage = resources.storage
        self._tunings = Tunings(self._driver, resources.storage)
        settings = resources.settings
        self._relay_limit = RelayLimit(settings.line_mbit_s, settings.relay_percent)
        self._desks: dict[JobId, CallDesk] = {}
        self._fleet.nodes.on_stream_end.append(self._drop_node)
        self._fleet.nodes.on_stream_begin.append(self._request_signatures)
        self._fleet.nodes.on_label_change.append(self._review_trust)
        self._report_numbers = itertools.count()
        self._rings = RingKeeper(
            resources.performing, resources.fleet, lambda runtime: self.desk(runtime).ring
        )

    @asynccontextmanager
    async def admit(
        self, event: ServeCreated, foreign: ForeignBlobs
    ) -> AsyncIterator[StampedEvent]:
        """See `PackedWorkPerformer.admit`: an owner serves one model of a name.

        Raises:
            HyperGPUError: REQUEST_INVALID, the owner serves another one of that name; or as
                `admit_files`.
        """
        for runtime in self._driver.runtimes_of(ServeRuntime).values():
            job = runtime.job
            if job.is_served and job.owner == event.owner and job.request.model == event.model:
                detail = f"{job.job_id} serves a model of the name {event.model!r}"
                fix = f"stop it: hypergpu serve stop {event.model}; or give another name: --name"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
        if event.request.source is not None:
            async with self._tunings.admit(event, event.request.source, foreign) as tuned_event:
                yield tuned_event
            return
        async with admit_files(self._storage, event.request.files.values(), foreign):
            yield event

    def perform(self, runtime: ServeRuntime, command: PackedCommand | ServeCommand) -> None:
        """Start a command and return at once."""
        match command:
            case RequestSignature(window=window):
                self._request_signature(runtime.job, window)
            case CheckAgain(answer=answer):
                self.desk(runtime).checks.check_again(answer)
            case RefuseAnswer(answer=answer, reason=reason):
                self.desk(runtime).checks.refuse(answer, reason)
            case RefuseStage(check=check, node=node, reason=reason):
                if (ring := self.desk(runtime).ring) is not None:
                    ring.checks.refuse(check, node, reason)
            case _:
                super().perform(runtime, command)

    def _request_signature(self, job: ServeJob, number: int) -> None:
        """Ask a node to sign a count; one that is away is asked when it dials in."""
        window = job.windows.get(number)
        stream = self._fleet.nodes.streams.get(window.node) if window is not None else None
        if window is None or stream is None or not stream.signs_counts:
            return
        message = work_pb2.WorkCount(
            job_id=job.job_id,
            lease=window.lease,
            number=number,
            units=window.count.units,
            answers=digest_message(window.answers),
            terms=terms_message(job.terms, epoch=0),
        )
        stream.send(node_pb2.ControlResponse(work_count=message))

    def _request_signatures(self, node: NodeId) -> None:
        """Ask a node that dials in for what it has not signed yet."""
        for runtime in self._driver.runtimes_of(ServeRuntime).values():
            for number, window in runtime.job.windows.items():
                if window.node == node:
                    self._request_signature(runtime.job, number)

    def with_claim(
        self, runtime: ServeRuntime, event: WindowSigned, signature: bytes
    ) -> WindowSigned:
        """See `PackedWorkPerformer.with_claim`."""
        job = runtime.job
        window = job.windows.get(event.window)
        if window is None:
            return event  # It is signed already, as the machine says.
        statement = count_contribution(
            job.terms, event.node, count_statement(job, event.window, window)
        )
        separator = separator_of(job.terms.domain)
        if not is_signed_by(event.node, separator, statement, signature):
            detail = "the signature does not cover this count: sign what the coordinator counted"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        return replace(event, claim=SignedContribution(statement, signature))

    async def take_up(self, runtime: ServeRuntime) -> None:
        """See `PackedWorkPerformer.take_up`: what was not journalled before the start is lost."""
        await super().take_up(runtime)
        self._watch(runtime)
        self._rings.place_if_due(runtime)
        if runtime.job.phase is ServePhase.SETTLING:
            self._performing.perform_outstanding(runtime)
            self._close_counts_if_due(runtime)

    def inputs(self, runtime: ServeRuntime, node: NodeId) -> frozenset[Digest]:
        """See `PackedWorkPerformer.inputs`."""
        replica = runtime.job.leases.get(node)
        if replica is None:
            return frozenset()
        if replica.span is not None:
            return frozenset(blob.digest for blob in node_work(runtime.job, node).inputs)
        offer = self._newest_offer(runtime)
        return runtime.input_digests | (frozenset() if offer is None else {offer.blob.digest})

    def take_output(
        self, runtime: ServeRuntime, stream: ControlStream, output: work_pb2.WorkOutput
    ) -> None:
        """See `PackedWorkPerformer.take_output`."""
        self.desk(runtime).hear(stream, output)

    def after_drain(self, runtime: ServeRuntime) -> None:
        """See `PackedWorkPerformer.after_drain`: calls leave replicas whose lease is void."""
        super().after_drain(runtime)
        self.desk(runtime).review_leases()
        self.desk(runtime).offer_versions()
        self._watch(runtime)
        self._rings.place_if_due(runtime)
        self._close_counts_if_due(runtime)
        job = runtime.job
        if job.phase is ServePhase.STOPPED:
            self._desks.pop(job.job_id, None)

    def _watch(self, runtime: ServeRuntime) -> None:
        """Follow the training of a model that does, and let go of one that nobody calls."""
        job = runtime.job
        if job.is_served and job.tuning is not None and job.tuning.follows:
            self._performing.start(runtime, (FOLLOW, 0), self._follow(runtime))
        is_loaded = job.phase is ServePhase.SERVING and not job.is_unloaded
        if is_loaded and job.request.idle_ms:
            self._performing.start(runtime, (IDLE, 0), self._unload_when_idle(runtime))

    async def _follow(self, runtime: ServeRuntime) -> None:
        """Publish each newer model of a training, until that has ended."""
        source = runtime.job.request.source
        while source is not None and runtime.job.is_served:
            change = self._tunings.change_of(source.job)
            files = self._tunings.files_if_there(source)
            job_tuning = runtime.job.tuning
            if change is None or job_tuning is None:
                return
            if files is not None and files.version.round > job_tuning.version.round:
                version = files.version
                event = VersionPublished(at_ms=_NOW, rounds=version.round, blob=version.blob)
                await self._driver.report(runtime.job.job_id, event)
            if files is not None and files.has_ended:
                return
            await change.wait()

    async def _unload_when_idle(self, runtime: ServeRuntime) -> None:
        """Have nodes let go of the model once nobody has called for as long as stated."""
        desk, idle_ms = self.desk(runtime), runtime.job.request.idle_ms
        while runtime.job.phase is ServePhase.SERVING and not runtime.job.is_unloaded:
            is_in_use = desk.open_calls or desk.waiting_calls or not desk.ready_replicas
            left_ms = idle_ms if is_in_use else desk.used_ms + idle_ms - monotonic_ms()
            if left_ms <= 0:
                reason = f"nobody called for {_time_text(idle_ms)}: the next call loads it again"
                event = ModelUnloaded(at_ms=_NOW, reason=reason)
                await self._driver.report(runtime.job.job_id, event)
                return
            await asyncio.sleep(min(left_ms / 1000, _IDLE_LOOK_S) + _IDLE_LATER_S)

    def _report_wanted(self, runtime: ServeRuntime) -> None:
        report = self._driver.report(runtime.job.job_id, ModelWanted(at_ms=_NOW))
        self._performing.start(runtime, (WANTED, 0), report)

    def _newest_offer(self, runtime: ServeRuntime) -> VersionOffer | None:
        """The version that replicas are to hold, with the delta that leads to it if it is known."""
        job = runtime.job
        job_tuning, source = job.tuning, job.request.source
        if job_tuning is None or source is None or not job_tuning.follows:
            return None
        files = self._tunings.files_if_there(source)
        is_newest = files is not None and files.version == job_tuning.version
        return VersionOffer(job_tuning.version, files.delta if files and is_newest else None)

    def _close_counts_if_due(self, runtime: ServeRuntime) -> None:
        """Report that no count comes any more, once all were reported."""
        job = runtime.job
        is_due = job.phase is ServePhase.SETTLING and not job.are_counts_closed
        if not is_due or self.desk(runtime).tally.units:
            return
        event = CountsClosed(at_ms=_NOW)
        self._performing.start(runtime, (CLOSE, 0), self._driver.report(runtime.job.job_id, event))

    def desk(self, runtime: ServeRuntime) -> CallDesk:
        """The calls of a model."""
        job_id = runtime.job.job_id
        if job_id not in self._desks:
            reports = CallReports(
                partial(self._report_count, runtime),
                partial(self._report_check, runtime),
                partial(self._report_wanted, runtime),
                partial(self._newest_offer, runtime),
                partial(self._rings.report_fault, runtime),
                partial(self._report_stage, runtime),
                self._relay_limit,
                TrainerPorts(
                    self._storage,
                    partial(self._driver.report, runtime.job.job_id),
                    partial(self._report_count, runtime),
                ),
            )
            self._desks[job_id] = CallDesk(runtime, self._fleet, reports)
        return self._desks[job_id]

    def _report_count(self, runtime: ServeRuntime, event: WindowCounted) -> None:
        desk = self.desk(runtime)

        async def report() -> None:
            try:
                failpoint("window.counted")
                await self._driver.report(runtime.job.job_id, event)
            finally:
                desk.tally.units -= event.count.units
                self._close_counts_if_due(runtime)

        self._performing.start(runtime, (COUNT, next(self._report_numbers)), report())

    def _report_check(self, runtime: ServeRuntime, event: CheckEvent) -> None:
        async def report() -> None:
            await self._driver.report(runtime.job.job_id, event)
            self.desk(runtime).checks.settle(event.answer)

        self._performing.start(runtime, (CHECK, next(self._report_numbers)), report())

    def _report_stage(self, runtime: ServeRuntime, event: StageEvent) -> None:
        async def report() -> None:
            try:
                await self._driver.report(runtime.job.job_id, event)
            finally:
                if (ring := self.desk(runtime).ring) is not None:
                    ring.checks.settle(event.check)

        self._performing.start(runtime, (CHECK, next(self._report_numbers)), report())

    def _review_trust(self, node: NodeId) -> None:
        """Take models from a node that has not the labels any more that they ask for."""
        labels = self._fleet.nodes.trust_labels(node)
        for runtime in self._driver.runtimes_of(ServeRuntime).values():
            job = runtime.job
            if node in job.leases and not labels.issuperset(job.request.trusted):
                lease = job.leases[node].lease
                reason = "an operator took its label"
                event = ReplicaHandedBack(
                    at_ms=_NOW, node=node, lease=lease, reason=reason, is_lasting=True
                )
                cancel = CancelWork(node, Lease(job.job_id, 0, lease), reason)
                self.perform(runtime, cancel)
                report = self._driver.report(job.job_id, event)
                self._performing.start(runtime, (TRUST, next(self._report_numbers)), report)

    def _drop_node(self, node: NodeId) -> None:
        for desk in self._desks.values():
            desk.drop_node(node)
        self._rings.note_absence(node)


def _time_text(duration_ms: Milliseconds) -> str:
    minutes, seconds = divmod(round(duration_ms / 1000), 60)
    return several(seconds, "second") if not minutes else several(minutes, "minute")
