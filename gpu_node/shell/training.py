"""Between the machine and its worker: requests out of commands, events out of replies."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

from gpu_node.core.commands import Train
from gpu_node.core.events import (
    Event,
    TrainingAborted,
    TrainingFailed,
    TrainingFinished,
    TrainingProgressed,
    WorkerDied,
    WorkerReady,
)
from gpu_node.core.update import Update
from gpu_node.shell.state.places import Places
from gpu_node.shell.supervision import Ears, WorkerProcess
from gpu_node.shell.transfer_tasks import Inputs
from gpu_node.shell.worker import messages
from hypergpu.process.clock import monotonic_ms
from hypergpu.statements.assignment import Lease, Prefetch, SampleRange
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import lease_message

_REPORT_INTERVAL_MS = 1000
"""Between two reports of progress; the last step is always reported."""


class Trainer:
    """Has the worker train one shard at a time and tells what becomes of it."""

    def __init__(
        self,
        places: Places,
        worker: WorkerProcess,
        *,
        report: Callable[[Event], None],
        send: Callable[[node_pb2.ControlRequest], None],
    ) -> None:
        self._places = places
        self._worker = worker
        self._report = report
        self._send = send
        self._lease: Lease | None = None
        self._progress_at_ms = 0
        worker.listen(Ears(self._hear, self._mourn))

    async def train(self, command: Train, inputs: Inputs) -> None:
        """Start a training. What an unfinished one left behind goes first."""
        lease = command.assignment.lease
        self._lease = lease
        await asyncio.to_thread(forget_unfinished, self._places.job(lease.job_id), command.keeps)
        await self._worker.train(self._request(command, inputs))

    async def start_worker(self) -> None:
        """Start the worker without work."""
        await self._worker.start()
        if self._worker.got_ready:
            self._report(WorkerReady(at_ms=monotonic_ms()))

    def end_worker(self, reason: str) -> None:
        """End a worker that hangs."""
        self._worker.end(reason)

    def abort(self, lease: Lease) -> None:
        """Drop a training."""
        if lease == self._lease:
            self._worker.abort(lease.number)

    def _request(self, command: Train, inputs: Inputs) -> messages.Train:
        assignment, task = command.assignment, command.assignment.task
        lease = assignment.lease
        return messages.Train(
            job_id=lease.job_id,
            round=lease.round,
            lease=lease.number,
            slot=assignment.slot,
            workload=task.workload,
            workload_version=task.workload_version,
            options=task.options,
            inner_steps=task.inner_steps,
            batch_size=task.batch_size,
            stated_batch_size=task.stated_batch_size,
            learning_rate=task.learning_rate,
            weight_decay=task.weight_decay,
            warmup_steps=task.warmup_steps,
            schedule=task.schedule,
            codec=task.codec,
            seed=task.seed,
            global_samples=task.global_samples,
            total_samples=task.total_samples,
            partition=task.partition,
            partitions=task.partitions,
            skew_alpha=task.skew_alpha,
            data_seed=task.data_seed,
            ranges=_ranges(task.ranges),
            model_path=str(inputs.model),
            layout_digest=task.layout,
            data_dir="" if inputs.dataset is None else str(inputs.dataset),
            state_dir=str(self._places.job(lease.job_id)),
            resume_from=command.start.resume_from,
            returns_update=command.start.returns_update,
            update_path=str(self._places.update(lease.job_id, lease.round)),
            begun=_ahead(task.prefetched),
            ahead=_ahead(assignment.prefetch),
        )

    def _hear(self, reply: messages.TrainingReply) -> None:
        lease = self._lease
        if isinstance(reply, messages.Ready):
            self._report(WorkerReady(at_ms=monotonic_ms()))
            return
        if lease is None or reply.lease != lease.number:
            return
        match reply:
            case messages.Progress():
                self._advance(lease, reply)
            case messages.Trained():
                finished = TrainingFinished(
                    at_ms=monotonic_ms(), lease=lease, update=_update(reply)
                )
                self._end(finished)
            case messages.Failed(reason=reason):
                self._end(TrainingFailed(at_ms=monotonic_ms(), lease=lease, reason=reason))
            case messages.Aborted():
                self._end(TrainingAborted(at_ms=monotonic_ms(), lease=lease))

    def _end(self, event: Event) -> None:
        self._lease = None
        self._report(event)

    def _mourn(self, reason: str) -> None:
        was_ready = self._worker.got_ready
        self._end(WorkerDied(at_ms=monotonic_ms(), reason=reason, was_ready=was_ready))

    def _advance(self, lease: Lease, progress: messages.Progress) -> None:
        at_ms = monotonic_ms()
        is_last = progress.steps_done == progress.steps_total
        if not is_last and at_ms - self._progress_at_ms < _REPORT_INTERVAL_MS:
            return
        self._progress_at_ms = at_ms
        done = progress.steps_done
        self._report(TrainingProgressed(at_ms=at_ms, lease=lease, steps_done=done))
        message = node_pb2.Progress(
            lease=lease_message(lease),
            steps_done=progress.steps_done,
            steps_total=progress.steps_total,
            loss=progress.loss,
        )
        self._send(node_pb2.ControlRequest(progress=message))


def _ahead(ahead: Prefetch | None) -> messages.Ahead | None:
    if ahead is None:
        return None
    return messages.Ahead(
        round=ahead.round,
        inner_steps=ahead.inner_steps,
        ranges=_ranges(ahead.ranges),
        seed=ahead.seed,
        global_samples=ahead.global_samples,
        total_samples=ahead.total_samples,
    )


def _ranges(ranges: tuple[SampleRange, ...]) -> tuple[messages.PositionRange, ...]:
    return tuple(messages.PositionRange(run.start, run.count) for run in ranges)


def _update(trained: messages.Trained) -> Update:
    return Update(
        digest=trained.update_digest,
        size_bytes=trained.update_bytes,
        inner_steps=trained.inner_steps,
        samples=trained.samples,
        compute_ms=trained.compute_ms,
        loss_first=_finite(trained.loss_first),
        loss_last=_finite(trained.loss_last),
    )


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def forget_unfinished(folder: Path, keeps: tuple[int, ...]) -> None:
    """Delete end states and updates of rounds that the machine does not remember finishing.

    One of them left in place would push out, as the newer one, the end state that a rollback needs.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = {f"{kind}-{number}" for kind in ("end", "update") for number in keeps}
    for path in folder.iterdir():
        if path.name.partition(".")[0] not in kept:
            path.unlink()
