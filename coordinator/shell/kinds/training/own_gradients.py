"""Gradients of secret samples of the shards that a round's nodes work on, at their bases.

They are measured while the nodes train. What is missing when the round closes, of shards that
changed hands and of leases over several rounds, is measured then.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from blake3 import blake3

from coordinator.core.training.folding import own_shards
from coordinator.core.training.job.commands import Aggregate, OwnShard
from coordinator.core.training.trust.own_draw import drawn_nodes, drawn_positions
from coordinator.shell.aggregation.measurements import OwnGradient
from coordinator.shell.aggregation.sketch import WIDTH
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.evaluator.process import MeasureShards, ShardSamples
from coordinator.shell.kinds.training.data_folder import data_dir
from coordinator.shell.kinds.training.job_runtime import JobRuntime, evaluated_job
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId

log = structlog.get_logger()

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class OwnGradients:
    """Measures gradients of own samples."""

    storage: Storage
    evaluators: Evaluators

    def prepare(self, runtime: JobRuntime, secret: bytes) -> None:
        """Begin with the shards of the open round, once.

        Args:
            runtime: The job.
            secret: Its own, which the samples and the signs of sketches follow from.
        """
        job, measurements = runtime.job, runtime.measurements
        round_, model = job.round, job.model
        if round_ is None or model is None or not job.trust.by_own_samples or job.lost_model:
            return
        if measurements.own_round == round_.number or runtime.layout is None:
            return
        measurements.own_round = round_.number
        shards = own_shards(round_, model)
        measurements.keep_own({each.lease for each in shards.values()})
        chosen_nodes = drawn_nodes(round_draw(secret, round_.number), job.trust, sorted(shards))
        self._begin(runtime, [shards[node] for node in chosen_nodes], secret)

    async def gradients(
        self, runtime: JobRuntime, command: Aggregate, secret: bytes
    ) -> dict[NodeId, OwnGradient]:
        """Gradients for the nodes of a closed round that are drawn, as far as they can be had.

        Where all shards are of one partition, the mean of all of one base stands for each: their
        samples are alike, and it is the clearer for it.
        """
        shards = {each.node: each.own for each in command.updates if each.own is not None}
        if not command.trust.by_own_samples or not shards:
            return {}
        draw = round_draw(secret, command.round)
        drawn_shards = {
            node: shards[node] for node in drawn_nodes(draw, command.trust, sorted(shards))
        }
        self._begin(runtime, list(drawn_shards.values()), secret)
        own = runtime.measurements.own
        tasks = {own[each.lease] for each in drawn_shards.values()}
        is_slow = runtime.measurements.is_evaluator_slow
        done_tasks, late_tasks = await asyncio.wait(tasks, timeout=0 if is_slow else _PATIENCE_S)
        runtime.measurements.is_evaluator_slow = bool(late_tasks)
        by_lease = {lease: each for task in done_tasks for lease, each in task.result().items()}
        gradients = {
            node: by_lease[shard.lease]
            for node, shard in drawn_shards.items()
            if shard.lease in by_lease
        }
        return (
            _shared_means(gradients, drawn_shards) if len(runtime.job.streams) == 1 else gradients
        )

    def _begin(self, runtime: JobRuntime, shards: Iterable[OwnShard], secret: bytes) -> None:
        """Begin to measure what is not measured, base by base. What failed is tried again."""
        own = runtime.measurements.own
        missing_shards: dict[BlobRef, list[OwnShard]] = {}
        for shard in shards:
            task = own.get(shard.lease)
            if task is None or _lacks(task, shard):
                missing_shards.setdefault(shard.base, []).append(shard)
        for base, of_base in missing_shards.items():
            task = asyncio.create_task(self._measure(runtime, base, of_base, secret))
            own.update((each.lease, task) for each in of_base)

    async def _measure(
        self, runtime: JobRuntime, base: BlobRef, shards: Sequence[OwnShard], secret: bytes
    ) -> dict[int, OwnGradient]:
        job, spec = runtime.job, runtime.job.spec
        samples = tuple(shard_samples(each, secret) for each in shards)
        try:
            path = await asyncio.to_thread(self.storage.blobs.path, base.digest)
            measurement = await self.evaluators.measure_shards(
                evaluated_job(runtime),
                MeasureShards(
                    workload=spec.workload,
                    workload_version=job.workload_version,
                    options=spec.options,
                    data_dir=await data_dir(self.storage, job.manifest),
                    model_path=str(path),
                    layout_digest=runtime.required_layout.digest,
                    seed=spec.training.seed,
                    sharding=spec.data.sharding,
                    alpha=spec.data.alpha,
                    partitions=len(job.streams),
                    shards=samples,
                    sketch_secret=secret,
                ),
            )
        except (HyperGPUError, OSError) as error:
            log.warning("no gradients of own samples", job_id=job.job_id, reason=str(error))
            return {}
        sketches = (np.frombuffer(each, np.float64) for each in measurement.sketches)
        return {
            shard.lease: OwnGradient(each.reshape(-1, WIDTH), loss)
            for shard, each, loss in zip(shards, sketches, measurement.losses, strict=True)
        }


def _lacks(task: "asyncio.Task[dict[int, OwnGradient]]", shard: OwnShard) -> bool:
    return task.done() and (task.cancelled() or shard.lease not in task.result())


def _shared_means(
    gradients: Mapping[NodeId, OwnGradient], shards: Mapping[NodeId, OwnShard]
) -> dict[NodeId, OwnGradient]:
    """The same with the mean of all of one base in the place of each."""
    by_base: dict[BlobRef, list[OwnGradient]] = {}
    for node, each in gradients.items():
        by_base.setdefault(shards[node].base, []).append(each)
    means = {
        base: np.mean([each.layers for each in of_base], axis=0)
        for base, of_base in by_base.items()
    }
    return {
        node: OwnGradient(means[shards[node].base], each.loss) for node, each in gradients.items()
    }


def shard_samples(shard: OwnShard, secret: bytes) -> ShardSamples:
    """The samples of a shard that are looked at."""
    positions = drawn_positions(_lease_draw(secret, shard), shard.ranges)
    return ShardSamples(shard.partition, positions)


def round_draw(secret: bytes, number: int) -> str:
    """Draw of the nodes whose samples are looked at in a round."""
    return blake3(f"own samples of round {number}".encode(), key=secret).hexdigest(16)


def _lease_draw(secret: bytes, shard: OwnShard) -> str:
    return blake3(f"own samples of lease {shard.lease}".encode(), key=secret).hexdigest(16)
