"""Performs what served models command, and has their calls answered."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.core.serving.events import ServeCreated
from coordinator.core.serving.state import ServePhase
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.kinds.performers.file_admission import admit_files
from coordinator.shell.kinds.performers.packed_work import ForeignBlobs, PackedWorkPerformer
from coordinator.shell.kinds.performers.resources import WorkResources
from coordinator.shell.kinds.serving.desk import CallDesk
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.v1 import work_pb2


class ServePerformer(PackedWorkPerformer):
    """Carries out what served models have commanded."""

    def __init__(self, resources: WorkResources) -> None:
        super().__init__(resources)
        self._storage = resources.storage
        self._desks: dict[JobId, CallDesk] = {}
        self._fleet.nodes.on_stream_end.append(self._drop_node)

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
            is_live = job.phase is not ServePhase.STOPPED
            if is_live and job.owner == event.owner and job.request.model == event.model:
                detail = f"{job.job_id} serves a model of the name {event.model!r}"
                fix = f"stop it: hypergpu serve stop {event.model}; or give another name: --name"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
        async with admit_files(self._storage, event.request.files.values(), foreign):
            yield event

    def inputs(self, runtime: ServeRuntime, node: NodeId) -> frozenset[Digest]:
        """See `PackedWorkPerformer.inputs`."""
        return runtime.input_digests if node in runtime.job.leases else frozenset()

    def take_output(
        self, runtime: ServeRuntime, stream: ControlStream, output: work_pb2.WorkOutput
    ) -> None:
        """See `PackedWorkPerformer.take_output`."""
        self.desk(runtime).hear(stream, output)

    def after_drain(self, runtime: ServeRuntime) -> None:
        """See `PackedWorkPerformer.after_drain`: calls leave replicas whose lease is void."""
        super().after_drain(runtime)
        self.desk(runtime).review_leases()
        if runtime.job.phase is ServePhase.STOPPED:
            self._desks.pop(runtime.job.job_id, None)

    def desk(self, runtime: ServeRuntime) -> CallDesk:
        """The calls of a model."""
        job_id = runtime.job.job_id
        if job_id not in self._desks:
            self._desks[job_id] = CallDesk(runtime, self._fleet)
        return self._desks[job_id]

    def _drop_node(self, node: NodeId) -> None:
        for desk in self._desks.values():
            desk.drop_node(node)
