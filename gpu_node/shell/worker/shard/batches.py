"""Which samples each inner step of a shard takes, and at which learning rate."""

from typing import NamedTuple

from gpu_node.shell.worker.messages import Train
from gpu_node.shell.worker.shard.watch import ShardError
from gpu_node.shell.worker.trainer.interface import Trainer
from gpu_node.shell.worker.trainer.schedule import Schedule, learning_rate
from hypergpu.dataset.sampling import Indices, Sharding, partition_indices, stream_indices
from hypergpu.units import Samples


class Batches(NamedTuple):
    """The inner steps of one shard."""

    indices: list[Indices]
    """Of each step's samples."""
    schedule: Schedule
    processed: int
    """Samples the job had processed before the first step."""

    def at(self, step: int) -> tuple[Indices, float]:
        """A step's samples and its learning rate; the first is 0."""
        batch = self.indices[step]
        processed = self.processed + step * len(self.indices[0]) + len(batch)
        return batch, learning_rate(self.schedule, Samples(processed))


def batches_of(request: Train, trainer: Trainer) -> Batches:
    """Consecutive positions, ``batch_size`` at a time; the last batch takes what is left.

    Raises:
        ShardError: The dataset cannot be divided so, or there is nothing to train on.
    """
    sharding = Sharding(request.partitions, request.skew_alpha, request.data_seed)
    try:
        members = partition_indices(trainer.samples.labels, sharding)
    except ValueError as error:
        raise ShardError(f"the dataset cannot be divided: {error}") from error
    if not 0 <= request.partition < len(members):
        raise ShardError(f"partition {request.partition} of {len(members)} does not exist")
    if request.batch_size < 1 or any(run.start < 0 or run.count < 1 for run in request.ranges):
        raise ShardError("the shard has an empty batch or range")
    indices = stream_indices(
        members[request.partition], request.partition, request.data_seed, request.ranges
    )
    if not len(indices):
        raise ShardError("the shard is empty")
    starts = range(0, len(indices), request.batch_size)
    schedule = Schedule(
        request.learning_rate,
        request.schedule,
        Samples(request.warmup_steps * request.usual_batch_size),
        request.total_samples,
    )
    batches = [indices[start : start + request.batch_size] for start in starts]
    return Batches(batches, schedule, int(request.global_samples))
