"""Performs what jobs of packed work command: all that a kind needs here whose work and results are
structs, and whose machine gives no other commands than those of `core.work.work_commands`.
"""

from collections.abc import Callable, Set
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from coordinator.core.work.demand import JobDemand
from coordinator.core.work.members import LeasedJob, staying_members
from coordinator.core.work.work_commands import AssignWork, CancelWork, ReleaseNode, ReportAt
from coordinator.core.work.work_events import CoordinatorChanged, StampedEvent
from coordinator.shell import translate
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.performers.resources import WorkResources
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.messages import lease_message
from hypergpu.wire.work import work_assignment_message

PackedCommand = AssignWork | CancelWork | ReportAt | ReleaseNode
ForeignBlobs = Callable[[Set[Digest]], frozenset[Digest]]
"""Those of some blobs that a caller has not shown to have."""


class PackedWorkPerformer:
    """Carries out commands of packed work."""

    def __init__(self, resources: WorkResources) -> None:
        """Take what is used of the resources."""
        self._performing = resources.performing
        self._driver = resources.performing.driver
        self._fleet = resources.fleet
        self._grace_ms = Milliseconds(resources.settings.reconnect_grace_ms)

    def perform(self, runtime: Any, command: PackedCommand) -> None:
        """Start a command and return at once."""
        match command:
            case AssignWork(node=node, assignment=assignment):
                work = work_assignment_message(assignment)
                self._fleet.nodes.send(node, node_pb2.ControlResponse(work_assignment=work))
            case CancelWork(node=node, lease=lease, reason=reason):
                cancel = node_pb2.Cancel(lease=lease_message(lease), reason=reason)
                self._fleet.nodes.send(node, node_pb2.ControlResponse(cancel=cancel))
            case ReportAt(at_ms=at_ms, event=event):
                self._performing.report_at(runtime, at_ms, event)
            case ReleaseNode():
                self._fleet.allocator.review()

    async def take_up(self, runtime: Any) -> None:
        """Go on with a job after a start: its nodes may dial in and are told their work."""
        machine = self._driver.kinds.of_job(runtime.job).core
        is_open = not machine.has_ended(runtime.job)
        if is_open:
            present = [node for node, member in runtime.job.members.items() if member.is_present]
            self._fleet.nodes.expect(present, self._grace_ms)
            runtime.takeover = self._driver.journal.database.takeover
            if runtime.takeover:
                takeover_event = CoordinatorChanged(at_ms=Milliseconds(0), reason=runtime.takeover)
                await self._driver.insist(runtime.job.job_id, takeover_event)
        runtime.is_recovering = False
        if is_open:
            self._performing.perform_outstanding(runtime)
            failpoint("recover.done")
            self._fleet.allocator.review()

    def result_bytes_most(self, runtime: Any, node: NodeId) -> Bytes:
        """Size of the blob that the result of a node's work may name; 0: it names none."""
        return Bytes(0)

    def inputs(self, runtime: Any, node: NodeId) -> frozenset[Digest]:
        """Blobs that the work of a node needs, which it alone may fetch now."""
        return frozenset()

    def admit(self, event: Any, foreign: ForeignBlobs) -> AbstractAsyncContextManager[StampedEvent]:
        """Complete the event that creates a job; what it needs stays stored until it is journalled.

        Args:
            event: As the request has it.
            foreign: Tells which blobs the caller has not shown to have.

        Raises:
            HyperGPUError: The job cannot be created, with the reason.
        """
        return nullcontext(event)

    async def check_result(
        self, runtime: Any, event: Any, blob: BlobRef | None, content: bytes
    ) -> None:
        """Check a result and its blob, which is stored, before the event is decided on.

        Args:
            runtime: The job.
            event: Of the result.
            blob: The blob that came with it; None: none did.
            content: The blob's bytes where they came beside the result; else empty.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is not what the work gives.
        """

    def with_claim(self, runtime: Any, event: Any, signature: bytes) -> Any:
        """The event of a result with its node's statement, where the kind has receipts.

        Args:
            runtime: The job.
            event: Of a result whose blob was not looked at yet.
            signature: The node's, of the result's contribution; empty: it sent none.

        Raises:
            HyperGPUError: SIGNATURE_INVALID, it is not the node's over this result.
        """
        return event

    def take_output(self, runtime: Any, stream: ControlStream, output: work_pb2.WorkOutput) -> None:
        """Take in what a node says of a call to its work: nothing, where a kind answers no calls.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is malformed.
        """

    def after_drain(self, runtime: Any) -> None:
        """Tell every node that ever worked for a job that has ended."""
        job: LeasedJob = runtime.job
        if not self._driver.kinds.of_job(job).core.has_ended(job):
            return
        message = translate.release_message(job.job_id, job.reason)
        for node in job.members:
            self._fleet.nodes.send(node, message)

    def after_command(self, runtime: Any, command: str, took_ms: Milliseconds) -> None:
        """Do nothing more: no command of packed work is a long one."""


def packed_demand(kind: str, version: int) -> Callable[[WorkRuntime[Any]], JobDemand]:
    """The demand of jobs that any node can work for whose worker does work of the kind."""

    def demand(runtime: WorkRuntime[Any]) -> JobDemand:
        job: LeasedJob = runtime.job
        return JobDemand(
            job_id=job.job_id,
            nodes_min=1,
            workload=kind,
            workload_version=version,
            members=staying_members(job),
            owner=job.owner,
        )

    return demand


def result_owner(job_id: JobId, node: NodeId) -> str:
    """A node in one job, as the quarantine knows it: it has one upload of a result at a time."""
    return f"result/{job_id}/{node}"
