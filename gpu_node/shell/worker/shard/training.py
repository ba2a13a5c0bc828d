"""Training one shard: from a model file and sample positions to an update file."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.messages import Progress, Train, Trained
from gpu_node.shell.worker.shard.durable import write_durably
from gpu_node.shell.worker.shard.end_state import (
    EndState,
    EndStateError,
    load_end_state,
    save_end_state,
)
from gpu_node.shell.worker.trainer.interface import Start, Trainer
from gpu_node.shell.worker.trainer.schedule import Schedule, learning_rate
from hypergpu.codec import decode_parameters, encode_update
from hypergpu.dataset.sampling import Indices, Sharding, partition_indices, stream_indices
from hypergpu.digest import digest_of
from hypergpu.layout import Flat, Float32s, Layout
from hypergpu.units import Bytes, Milliseconds, Samples

_PROGRESS_INTERVAL_S = 0.25


class ShardError(Exception):
    """The shard cannot be trained; the worker itself is well. The text says why."""


class ShardAbortedError(Exception):
    """The daemon does not want the shard any more."""


class Watch(NamedTuple):
    """How a shard's training and the outside see each other, between inner steps."""

    refuse_aborted: Callable[[], None]
    """Raises `ShardAbortedError` when the shard is not wanted any more."""
    report: Callable[[Progress], None]
    log: Callable[[str], None]


class Losses(NamedTuple):
    """The first and the last inner step's loss."""

    first: float
    last: float


def train_shard(request: Train, trainer: Trainer, watch: Watch) -> Trained:
    """Train, encode with error feedback, and make end state and update durable, in this order.

    Raises:
        ShardError: The request does not fit the workload, or training left the finite numbers.
        ShardAbortedError: Nothing was written.
    """
    layout = trainer.layout
    batches = _batches(request, trainer)
    before = read_model(Path(request.model_path), layout, request)
    kept = _end_state_before(request, layout, watch)
    optimizer = None if kept is None else kept.optimizer
    trainer.begin(Start(before, request.seed, optimizer, request.weight_decay))
    started_s = time.monotonic()
    losses = _train(request, trainer, batches, watch)
    after = Flat.empty(layout)
    trainer.store(after)
    compute_ms = Milliseconds(round((time.monotonic() - started_s) * 1000))
    np.subtract(before.parameters, after.parameters, out=after.parameters)
    if not (np.isfinite(after.parameters).all() and np.isfinite(after.statistics).all()):
        raise ShardError(_not_finite("the pseudo-gradient", len(batches)))
    encoded = encode_update(layout, request.codec, after, _residual(kept, request, layout))
    state = EndState(encoded.residual, encoded.payload, request.codec, trainer.optimizer())
    save_end_state(Path(request.state_dir), request.round, state, layout.digest)
    write_durably(Path(request.update_path), encoded.payload.tofile)
    return Trained(
        lease=request.lease,
        update_digest=digest_of(encoded.payload.data),
        update_bytes=Bytes(encoded.payload.size),
        inner_steps=len(batches),
        samples=Samples(sum(run.count for run in request.ranges)),
        compute_ms=compute_ms,
        loss_first=losses.first,
        loss_last=losses.last,
    )


def read_model(path: Path, layout: Layout, request: Train) -> Flat:
    """The model that training starts from; the daemon has checked its digest.

    Raises:
        ShardError: The workload's layout here is not the job's, or the file is not a model of it.
    """
    if layout.digest != request.layout_digest:
        raise ShardError(
            f"workload {request.workload} has another model here than in the job (layouts"
            f" {layout.digest[:12]} and {request.layout_digest[:12]})."
            " Fix: install the same versions on the node and the coordinator"
        )
    try:
        return Flat.view(layout, np.fromfile(path, np.uint8))
    except (OSError, ValueError) as error:
        raise ShardError(f"the model cannot be read: {error}") from error


def _batches(request: Train, trainer: Trainer) -> list[Indices]:
    """Consecutive positions, ``batch_size`` at a time; the last batch takes what is left."""
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
    return [indices[start : start + request.batch_size] for start in starts]


def _train(request: Train, trainer: Trainer, batches: list[Indices], watch: Watch) -> Losses:
    schedule = Schedule(
        request.learning_rate,
        request.schedule,
        Samples(request.warmup_steps * request.usual_batch_size),
        request.total_samples,
    )
    processed = int(request.global_samples)
    first = last = math.nan
    due_s = time.monotonic() + _PROGRESS_INTERVAL_S
    for number, batch in enumerate(batches, start=1):
        watch.refuse_aborted()
        processed += len(batch)
        loss = trainer.step(batch, learning_rate(schedule, Samples(processed)))
        now_s = time.monotonic()
        # Reading the loss makes the host wait for the device, so it is not read at every step.
        if number in {1, len(batches)} or now_s >= due_s:
            last = float(loss)
            if not math.isfinite(last):
                raise ShardError(_not_finite(f"the loss ({last})", number))
            first = last if number == 1 else first
            if now_s >= due_s:
                watch.report(Progress(request.lease, number, len(batches), last))
                due_s = now_s + _PROGRESS_INTERVAL_S
    return Losses(first, last)


def _not_finite(what: str, steps: int) -> str:
    return f"{what} is not finite after {steps} inner steps. Fix: lower inner.learning_rate"


def _end_state_before(request: Train, layout: Layout, watch: Watch) -> EndState | None:
    if request.resume_from is None:
        return None
    try:
        return load_end_state(Path(request.state_dir), request.resume_from, layout.digest)
    except EndStateError as error:
        watch.log(f"the optimizer and the residual start fresh: {error}")
        return None


def _residual(kept: EndState | None, request: Train, layout: Layout) -> Float32s | None:
    if kept is None:
        return None
    if not request.returns_update:
        return kept.residual
    said: NDArray[np.float32] = decode_parameters(layout, kept.codec, kept.update)
    # What made the coordinator refuse the update must not come back with it.
    return kept.residual + np.nan_to_num(said, nan=0.0, posinf=0.0, neginf=0.0)
