"""Training one shard: from a model file and sample positions to an update file and an end state."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_node.core.events import TrainedUpdate
from gpu_node.shell.worker.batches import Batches, batches_of
from gpu_node.shell.worker.end_states import EndState, EndStateError, load_end_state, save_end_state
from gpu_node.shell.worker.prefetch import PrefetchRun, next_prefetch, own_prefetch
from gpu_node.shell.worker.protocol import ShardProgress, TrainShard
from gpu_node.shell.worker.trainer import InitialState, ShardCallbacks, ShardError, Trainer
from hypergpu.assignment import Task
from hypergpu.digests import digest_of
from hypergpu.durable import fill_durably
from hypergpu.partitions import Indices
from hypergpu.tensors.codec import decode_parameters, encode_update
from hypergpu.tensors.layout import Flat, Float32s, Layout
from hypergpu.units import Bytes, Milliseconds, Samples, round_text, several
from hypergpu.workloads.datasets import all_finite

_PROGRESS_INTERVAL_S = 0.25


class Losses(NamedTuple):
    """The first and the last inner step's loss."""

    first: float
    last: float


def train_shard(
    request: TrainShard,
    trainer: Trainer,
    callbacks: ShardCallbacks,
    early: PrefetchRun | None = None,
) -> TrainedUpdate:
    """Train, encode with error feedback, and make end state and update durable, in this order.

    Args:
        request: The shard.
        trainer: Trains the workload.
        callbacks: Called between inner steps.
        early: The request's own prefetch as far as it was taken early; None: not at all.

    Raises:
        ShardError: The request does not fit the workload, or training left the finite numbers.
        ShardAbortedError: Nothing was written.
    """
    layout, task, round_number = trainer.layout, request.task, request.lease.round
    batches = batches_of(task, trainer)
    before = read_model(Path(request.model_path), layout, task)
    kept_state = _end_state_before(request, layout, callbacks)
    prefetch = _complete_prefetch(request, trainer, callbacks, kept=kept_state, early=early)
    trainer.begin(_initial_state(task, before, kept_state, prefetch))
    started_s = time.monotonic()
    losses = _take_steps(request, trainer, batches, callbacks, prefetch)
    after = Flat.empty(layout)
    trainer.store(after)
    compute_s = time.monotonic() - started_s + (prefetch.compute_s if prefetch else 0.0)
    keeps_model = request.assignment.prefetch is not None
    end = after._replace(parameters=after.parameters.copy()) if keeps_model else None
    np.subtract(before.parameters, after.parameters, out=after.parameters)
    if not (np.isfinite(after.parameters).all() and np.isfinite(after.statistics).all()):
        raise _not_finite("the pseudo-gradient", trainer, batches.indices)
    trained_s = time.monotonic()
    encoded_update = encode_update(
        layout, task.codec, after, _residual(kept_state, request, layout)
    )
    state = EndState(
        encoded_update.residual, encoded_update.payload, task.codec, trainer.optimizer(), end
    )
    save_end_state(Path(request.state_dir), round_number, state, layout.digest)
    fill_durably(Path(request.update_path), encoded_update.payload.tofile)
    return TrainedUpdate(
        digest=digest_of(encoded_update.payload.data),
        size_bytes=Bytes(encoded_update.payload.size),
        inner_steps=len(batches.indices),
        samples=task.samples,
        compute_ms=Milliseconds(round(compute_s * 1000)),
        loss_first=_finite(losses.first),
        loss_last=_finite(losses.last),
        encode_ms=Milliseconds(round((time.monotonic() - trained_s) * 1000)),
        data_samples=Samples(len(trainer.samples.labels) if task.data_name else 0),
        memory_before_bytes=trainer.memory.before_bytes,
        memory_peak_bytes=trainer.memory.peak_bytes,
    )


def begin_prefetch(request: TrainShard, trainer: Trainer) -> PrefetchRun | None:
    """Begin the next round as far as a request allows it; None: it does not.

    Raises:
        ShardError: It cannot be begun here.
    """
    work = next_prefetch(request)
    if work is None:
        return None
    try:
        end = load_end_state(Path(request.state_dir), work.end_round, trainer.layout.digest)
    except EndStateError as error:
        raise ShardError(str(error)) from error
    return PrefetchRun(work, trainer, end)


def _complete_prefetch(
    request: TrainShard,
    trainer: Trainer,
    callbacks: ShardCallbacks,
    *,
    kept: EndState | None,
    early: PrefetchRun | None,
) -> PrefetchRun | None:
    """Take the rest of the request's own prefetch; None: it has none."""
    work = own_prefetch(request)
    if work is None or kept is None or kept.model is None:
        return None
    if early is not None:
        steps_text = several(early.steps_taken, "inner step")
        callbacks.log(f"{round_text(request.lease.round)} was begun {steps_text} early")
    run = early or PrefetchRun(work, trainer, kept)
    due_s = time.monotonic() + _PROGRESS_INTERVAL_S
    while not run.is_done:
        callbacks.raise_if_aborted()
        run.advance()
        if time.monotonic() >= due_s:
            steps = request.task.inner_steps
            callbacks.report(ShardProgress(request.lease, run.steps_taken, steps, run.loss))
            due_s = time.monotonic() + _PROGRESS_INTERVAL_S
    if not math.isfinite(run.loss):
        raise _not_finite(f"the loss ({run.loss})", trainer, run.steps_indices)
    return run


def _initial_state(
    task: Task, before: Flat, kept: EndState | None, prefetched: PrefetchRun | None
) -> InitialState:
    """State at the start of the round's own steps: its model, moved by a prefetch.

    Statistics are means over the last few steps, so those of the prefetch are kept.
    """
    if prefetched is None:
        optimizer = None if kept is None else kept.optimizer
        return InitialState(before, task.seed, optimizer, task.optimizer)
    end = prefetched.stored_model()
    moved_parameters = end.parameters - prefetched.start.parameters
    moved_parameters += before.parameters
    optimizer = prefetched.trainer.optimizer()
    return InitialState(
        end._replace(parameters=moved_parameters), task.seed, optimizer, task.optimizer
    )


def read_model(path: Path, layout: Layout, task: Task) -> Flat:
    """The model that training starts from; the daemon has checked its digest.

    Raises:
        ShardError: The workload's layout here is not the job's, or the file is not a model of it.
    """
    if layout.digest != task.layout:
        raise ShardError(
            f"workload {task.workload} has another model here than in the job (layouts"
            f" {layout.digest[:12]} and {task.layout[:12]})."
            " Fix: install the same versions on the node and the coordinator"
        )
    try:
        return Flat.view(layout, np.fromfile(path, np.uint8))
    except (OSError, ValueError) as error:
        raise ShardError(f"the model cannot be read: {error}") from error


def _take_steps(
    request: TrainShard,
    trainer: Trainer,
    batches: Batches,
    callbacks: ShardCallbacks,
    prefetched: PrefetchRun | None,
) -> Losses:
    """Take the steps that no prefetch has taken."""
    first = last = math.nan
    taken_steps = 0
    if prefetched is not None:
        first, last, taken_steps = prefetched.loss_first, prefetched.loss, prefetched.steps_taken
    steps = len(batches.indices)
    due_s = time.monotonic() + _PROGRESS_INTERVAL_S
    for number in range(taken_steps + 1, steps + 1):
        callbacks.raise_if_aborted()
        loss = trainer.step(*batches.at(number - 1))
        now_s = time.monotonic()
        # Reading the loss makes the host wait for the device, so it is not read at every step.
        if number in {1, steps} or now_s >= due_s:
            last = float(loss)
            if not math.isfinite(last):
                raise _not_finite(f"the loss ({last})", trainer, batches.indices[:number])
            first = last if number == 1 else first
            if now_s >= due_s:
                callbacks.report(ShardProgress(request.lease, number, steps, last))
                due_s = now_s + _PROGRESS_INTERVAL_S
    return Losses(first, last)


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _not_finite(subject: str, trainer: Trainer, indices: Sequence[Indices]) -> ShardError:
    """The error of training that left the finite numbers, by what it came from.

    Args:
        subject: The quantity that is not finite.
        trainer: Trained.
        indices: Samples of each step taken, the last of which may have been taken in part: its
            loss is that of the model before it.
    """
    what = f"{subject} is not finite after {several(len(indices), 'inner step')}"
    if not all_finite(trainer.samples, indices):
        why = "the data of these steps hold values that are not finite numbers"
        return ShardError(f"{what}: {why}. Fix: remove NaN and infinite values from the data")
    if len(indices) == 1 and subject.startswith("the loss"):
        early = "that is before any step, so that no learning rate had a part in it"
        return ShardError(f"{what}: {early}. Fix: look for huge values in data and workload")
    return ShardError(f"{what}. Fix: lower inner.learning_rate")


def _end_state_before(
    request: TrainShard, layout: Layout, callbacks: ShardCallbacks
) -> EndState | None:
    if request.start.resume_from is None:
        return None
    try:
        return load_end_state(Path(request.state_dir), request.start.resume_from, layout.digest)
    except EndStateError as error:
        callbacks.log(f"the optimizer and the residual start fresh: {error}")
        return None


def _residual(kept: EndState | None, request: TrainShard, layout: Layout) -> Float32s | None:
    if kept is None:
        return None
    if not request.start.returns_update:
        return kept.residual
    sent_values: NDArray[np.float32] = decode_parameters(layout, kept.codec, kept.update)
    # Values that made the coordinator reject the update must not come back with it.
    return kept.residual + np.nan_to_num(sent_values, nan=0.0, posinf=0.0, neginf=0.0)
