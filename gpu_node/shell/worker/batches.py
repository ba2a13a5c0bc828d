"""The samples and the learning rate of each inner step of a shard.

The rate is indexed by the samples that the whole job has processed. Steps of one node would be the
wrong index: nodes join late, die and take different numbers of steps.
"""

from typing import NamedTuple

import numpy as np

from gpu_node.shell.worker.trainer import ShardError, Trainer
from hypergpu.assignment import Task
from hypergpu.optimizer import schedule_share
from hypergpu.partitions import Indices, Sharding, partition_indices, stream_indices
from hypergpu.units import Samples


class Schedule(NamedTuple):
    """The learning rate over the job."""

    peak: float
    shape: str = "constant"
    """One of `hypergpu.optimizer.SCHEDULES`; ``total_samples`` is their end."""
    warmup_samples: Samples = Samples(0)
    """The rate rises linearly from zero over these."""
    total_samples: Samples = Samples(0)


def learning_rate(schedule: Schedule, processed: Samples) -> float:
    """The rate of the step that brings the job to ``processed`` samples."""
    rate = schedule.peak
    if schedule.warmup_samples > 0:
        rate *= min(1.0, processed / schedule.warmup_samples)
    if schedule.total_samples > 0:
        rate *= schedule_share(schedule.shape, processed / schedule.total_samples)
    return rate


class Batches(NamedTuple):
    """The inner steps of one shard."""

    indices: list[Indices]
    """Indices of the samples of each step."""
    schedule: Schedule
    processed: int
    """Samples the job had processed before the first step."""

    def at(self, step: int) -> tuple[Indices, float]:
        """A step's samples and its learning rate; the first step is 0."""
        batch = self.indices[step]
        processed_samples = self.processed + step * len(self.indices[0]) + len(batch)
        return batch, learning_rate(self.schedule, Samples(processed_samples))


def batches_of(task: Task, trainer: Trainer) -> Batches:
    """Consecutive positions, ``batch_size`` at a time; the last batch takes the rest.

    Raises:
        ShardError: The dataset cannot be divided so, or there is nothing to train on.
    """
    members = _members(task, trainer.samples.labels)
    if task.batch_size < 1 or any(run.start < 0 or run.count < 1 for run in task.ranges):
        raise ShardError("the shard has an empty batch or range")
    indices = stream_indices(members, task.partition, task.data_seed, task.ranges)
    if not len(indices):
        raise ShardError("the shard is empty")
    starts = range(0, len(indices), task.batch_size)
    warmup = Samples(task.warmup_steps * task.usual_batch_size)
    schedule = Schedule(task.learning_rate, task.schedule, warmup, task.total_samples)
    batches = [indices[start : start + task.batch_size] for start in starts]
    return Batches(batches, schedule, int(task.global_samples))


def _members(task: Task, labels: Indices) -> Indices:
    """Indices of the samples in the shard's partition: all where they are the node's own."""
    if task.data_name:
        return np.arange(len(labels))
    sharding = Sharding(task.partitions, task.skew_alpha, task.data_seed)
    try:
        partitions = partition_indices(labels, sharding)
    except ValueError as error:
        raise ShardError(f"the dataset cannot be divided: {error}") from error
    if not 0 <= task.partition < len(partitions):
        raise ShardError(f"partition {task.partition} of {len(partitions)} does not exist")
    return partitions[task.partition]
