"""The first inner steps of a round, taken from this node's own end state of the round before.

They need nothing of the round's model, so a worker takes them while the update before is being
sent. Taken early or once the round is open, they are the same steps from the same end state, which
lies on disk, so the round's update is the same. Their results are kept in memory only.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, SupportsFloat

from msgspec.structs import replace

from gpu_node.shell.worker.batches import batches_of
from gpu_node.shell.worker.end_states import EndState
from gpu_node.shell.worker.protocol import TrainShard
from gpu_node.shell.worker.trainer import InitialState, Trainer
from hypergpu.assignment import Prefetch, Task
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId
from hypergpu.partitions import Indices
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes

_READ_INTERVAL_S = 0.25


class PrefetchWork(NamedTuple):
    """Everything that decides the results of a prefetch: equal ones have equal results."""

    job_id: JobId
    end_round: int
    """The round whose end state the steps start from."""
    task: Task
    state_dir: str
    data_dir: str


def next_prefetch(request: TrainShard) -> PrefetchWork | None:
    """The prefetch that a request allows once its own round is trained."""
    prefetch = request.assignment.prefetch
    return None if prefetch is None else _work(request, prefetch, request.lease.round)


def own_prefetch(request: TrainShard) -> PrefetchWork | None:
    """The prefetch that a request's own round begins with."""
    prefetch, end_round = request.task.prefetched, request.start.resume_from
    if prefetch is None or end_round is None or end_round != prefetch.round - 1:
        return None
    return _work(request, prefetch, end_round)


def _work(request: TrainShard, prefetch: Prefetch, end_round: int) -> PrefetchWork:
    task = replace(
        request.task,
        inner_steps=prefetch.inner_steps,
        ranges=prefetch.ranges,
        seed=prefetch.seed,
        global_samples=prefetch.global_samples,
        total_samples=prefetch.total_samples,
        # The steps depend on neither the round's model nor the codec of its update.
        codec="",
        model=BlobRef(Digest(""), Bytes(0)),
        prefetched=None,
    )
    job_id = request.lease.job_id
    return PrefetchWork(job_id, end_round, task, request.state_dir, request.data_dir)


class PrefetchRun:
    """The steps of a prefetch, as far as they have been taken.

    Args:
        work: The prefetch.
        trainer: Used by nobody else meanwhile.
        end: State of the round before, with its model.
    """

    def __init__(self, work: PrefetchWork, trainer: Trainer, end: EndState) -> None:
        if end.model is None:
            raise AssertionError("a prefetch needs an end state with a model")
        self.work = work
        self.trainer = trainer
        self._batches = batches_of(work.task, trainer)
        self.start = end.model
        self._losses: list[SupportsFloat] = []
        self.compute_s = 0.0
        self._read_at_s = time.monotonic() + _READ_INTERVAL_S
        self.steps_taken = 0
        task = work.task
        trainer.begin(InitialState(end.model, task.seed, end.optimizer, task.optimizer))

    @property
    def is_done(self) -> bool:
        """Whether no step is left to take."""
        return self.steps_taken == len(self._batches.indices)

    @property
    def steps_indices(self) -> Sequence[Indices]:
        """Samples of each step taken."""
        return self._batches.indices[: self.steps_taken]

    @property
    def loss(self) -> float:
        """Loss of the newest step; reading it waits for the device."""
        return float(self._losses[-1]) if self._losses else math.nan

    def advance(self) -> None:
        """Take one step."""
        self._time(self._step)

    @property
    def loss_first(self) -> float:
        """Loss of the first step, once it was taken."""
        return float(self._losses[0])

    def stored_model(self) -> Flat:
        """The model after the steps taken."""
        end = Flat.empty(self.trainer.layout)
        self._time(lambda: self.trainer.store(end))
        return end

    def _step(self) -> None:
        indices, rate = self._batches.at(self.steps_taken)
        loss = self.trainer.step(indices, rate)
        self._losses = [*self._losses[:1], loss]
        self.steps_taken += 1
        # Reading a loss waits for the device: seldom enough to keep it busy, often enough that it
        # is never far behind the host, and that its time is counted.
        if self.is_done or time.monotonic() >= self._read_at_s:
            float(loss)
            self._read_at_s = time.monotonic() + _READ_INTERVAL_S

    def _time(self, work: Callable[[], None]) -> None:
        started_s = time.monotonic()
        work()
        self.compute_s += time.monotonic() - started_s
