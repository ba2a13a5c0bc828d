"""Losses of the secret samples of shards at their bases less the updates made of them.

An update is tried as it arrives, while others train. What is missing when the round closes is
measured then. All of it follows from kept blobs and the secret, as the gradients of the same
samples do.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from coordinator.core.training.folding import own_shards
from coordinator.core.training.job.commands import FoldedUpdate, OwnShard
from coordinator.core.training.trust.own_draw import drawn_nodes
from coordinator.shell.aggregation.measurements import OwnGradient, UpdateTrial
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.evaluator.process import TryUpdate
from coordinator.shell.kinds.training.data_folder import data_dir
from coordinator.shell.kinds.training.job_runtime import JobRuntime, evaluated_job
from coordinator.shell.kinds.training.own_gradients import round_draw, shard_samples
from coordinator.shell.store.storage import Storage
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest, NodeId

log = structlog.get_logger()

_PATIENCE_S = 60.0


class TriedUpdate(NamedTuple):
    """An update that is tried."""

    digest: Digest
    codec: str
    experts: tuple[int, ...] = ()
    """Experts that it covers, beside what all share; none: it covers everything."""


@dataclass(frozen=True)
class UpdateTrials:
    """Tries updates on samples of their own shards."""

    storage: Storage
    evaluators: Evaluators

    def prepare(
        self, runtime: JobRuntime, node: NodeId, update: TriedUpdate, secret: bytes
    ) -> None:
        """Begin with an accepted update of the open round, where its node is drawn.

        Args:
            runtime: The job.
            node: Whose update.
            update: The update.
            secret: The job's own, which the samples follow from.
        """
        job = runtime.job
        round_, model = job.round, job.model
        if job.trust.pay is None or round_ is None or model is None or job.lost_model:
            return
        shards = own_shards(round_, model)
        names = drawn_nodes(round_draw(secret, round_.number), job.trust, sorted(shards))
        if node in names and runtime.layout is not None:
            self._begin(runtime, shards[node], update, secret)

    async def trials(
        self,
        runtime: JobRuntime,
        updates: Mapping[NodeId, FoldedUpdate],
        gradients: Mapping[NodeId, OwnGradient],
        secret: bytes,
    ) -> dict[NodeId, UpdateTrial]:
        """Trials of a closed round's updates, as far as they can be had.

        Args:
            runtime: The job.
            updates: Of the round.
            gradients: Of the samples of those nodes that are drawn.
            secret: The job's own.
        """
        if runtime.job.trust.pay is None:
            return {}
        tasks: dict[NodeId, asyncio.Task[float | None]] = {}
        for node, gradient in gradients.items():
            update = updates[node]
            if update.own is not None and gradient.loss is not None:
                tried_update = TriedUpdate(update.blob.digest, update.codec, update.experts)
                tasks[node] = self._begin(runtime, update.own, tried_update, secret)
        measurements = runtime.measurements
        measurements.keep_trials(
            {(each.own.lease, each.blob.digest) for each in updates.values() if each.own}
        )
        if not tasks:
            return {}
        timeout_s = 0.0 if measurements.is_evaluator_slow else _PATIENCE_S
        done_tasks, late_tasks = await asyncio.wait(tasks.values(), timeout=timeout_s)
        measurements.is_evaluator_slow = bool(late_tasks)
        trials = {}
        for node, task in tasks.items():
            loss, after = gradients[node].loss, task.result() if task in done_tasks else None
            if loss is not None and after is not None:
                trials[node] = UpdateTrial(loss, after)
        return trials

    def _begin(
        self, runtime: JobRuntime, shard: OwnShard, update: TriedUpdate, secret: bytes
    ) -> asyncio.Task[float | None]:
        """Try an update, unless that is under way. What failed is tried again."""
        trials, key = runtime.measurements.trials, (shard.lease, update.digest)
        task = trials.get(key)
        if task is None or (task.done() and (task.cancelled() or task.result() is None)):
            work = self._loss_after(runtime, shard, update, secret)
            task = trials[key] = asyncio.create_task(work)
        return task

    async def _loss_after(
        self, runtime: JobRuntime, shard: OwnShard, update: TriedUpdate, secret: bytes
    ) -> float | None:
        """The loss, infinite where it is not finite; None: it could not be measured."""
        job, spec = runtime.job, runtime.job.spec
        try:
            paths = await asyncio.to_thread(
                lambda: [
                    self.storage.blobs.path(each) for each in (shard.base.digest, update.digest)
                ]
            )
            answer = await self.evaluators.try_update(
                evaluated_job(runtime),
                TryUpdate(
                    workload=spec.workload,
                    workload_version=job.workload_version,
                    options=spec.options,
                    data_dir=await data_dir(self.storage, job.manifest),
                    model_path=str(paths[0]),
                    layout_digest=runtime.required_layout.digest,
                    seed=spec.training.seed,
                    sharding=spec.data.sharding,
                    alpha=spec.data.alpha,
                    partitions=len(job.streams),
                    shard=shard_samples(shard, secret),
                    update_path=str(paths[1]),
                    codec=update.codec,
                    experts=update.experts,
                ),
            )
        except (HyperGPUError, OSError) as error:
            log.warning("an update was not tried", job_id=job.job_id, reason=str(error))
            return None
        return math.inf if answer.loss is None else answer.loss
