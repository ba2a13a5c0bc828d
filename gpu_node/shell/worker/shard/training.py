"""Training one shard: from a model file and sample positions to an update file."""

import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.messages import Progress, Train, Trained
from gpu_node.shell.worker.shard.batches import Batches, batches_of
from gpu_node.shell.worker.shard.beginning import Beginning, Begun, asked_for, prefetch_request
from gpu_node.shell.worker.shard.end_state import (
    EndState,
    EndStateError,
    load_end_state,
    save_end_state,
)
from gpu_node.shell.worker.shard.watch import ShardError, Watch
from gpu_node.shell.worker.trainer.interface import Start, Trainer
from hypergpu.digest import digest_of
from hypergpu.files import fill_durably
from hypergpu.tensors.codec import decode_parameters, encode_update
from hypergpu.tensors.layout import Flat, Float32s, Layout
from hypergpu.units import Bytes, Milliseconds, Samples, several

_PROGRESS_INTERVAL_S = 0.25


class Losses(NamedTuple):
    """The first and the last inner step's loss."""

    first: float
    last: float


def train_shard(
    request: Train, trainer: Trainer, watch: Watch, warm: Beginning | None = None
) -> Trained:
    """Train, encode with error feedback, and make end state and update durable, in this order.

    Args:
        request: What to train.
        trainer: What trains.
        watch: Asked and told between inner steps.
        warm: The request's beginning, as far as it was taken before; None: not at all.

    Raises:
        ShardError: The request does not fit the workload, or training left the finite numbers.
        ShardAbortedError: Nothing was written.
    """
    layout = trainer.layout
    batches = batches_of(request, trainer)
    before = read_model(Path(request.model_path), layout, request)
    kept = _end_state_before(request, layout, watch)
    begun = _take_prefetched(request, trainer, watch, kept=kept, warm=warm)
    trainer.begin(_start(request, before, kept, begun))
    started_s = time.monotonic()
    losses = _train(request, trainer, batches, watch, begun)
    after = Flat.empty(layout)
    trainer.store(after)
    compute_s = time.monotonic() - started_s + (begun.compute_s if begun else 0.0)
    # Whatever begins the next round early begins it from here.
    end = None if request.ahead is None else after._replace(parameters=after.parameters.copy())
    np.subtract(before.parameters, after.parameters, out=after.parameters)
    if not (np.isfinite(after.parameters).all() and np.isfinite(after.statistics).all()):
        raise ShardError(_not_finite("the pseudo-gradient", len(batches.indices)))
    encoded = encode_update(layout, request.codec, after, _residual(kept, request, layout))
    optimizer = trainer.optimizer()
    state = EndState(encoded.residual, encoded.payload, request.codec, optimizer, end)
    save_end_state(Path(request.state_dir), request.round, state, layout.digest)
    fill_durably(Path(request.update_path), encoded.payload.tofile)
    return Trained(
        lease=request.lease,
        update_digest=digest_of(encoded.payload.data),
        update_bytes=Bytes(encoded.payload.size),
        inner_steps=len(batches.indices),
        samples=Samples(sum(run.count for run in request.ranges)),
        compute_ms=Milliseconds(round(compute_s * 1000)),
        loss_first=losses.first,
        loss_last=losses.last,
    )


def begun_ahead(request: Train, trainer: Trainer, layout: Layout) -> Beginning | None:
    """What a request lets the worker begin once its update is out; None: nothing.

    Raises:
        ShardError: It cannot be begun here.
    """
    wanted = prefetch_request(request)
    if wanted is None:
        return None
    try:
        kept = load_end_state(Path(request.state_dir), request.round, layout.digest)
    except EndStateError as error:
        raise ShardError(str(error)) from error
    return Beginning(wanted, trainer, batches_of(wanted, trainer), kept)


def _take_prefetched(
    request: Train, trainer: Trainer, watch: Watch, *, kept: EndState | None, warm: Beginning | None
) -> Begun | None:
    """Take what is left of the request's beginning; None: it has none."""
    wanted = asked_for(request)
    if wanted is None or kept is None or kept.model is None:
        return None
    if warm is not None:
        early = several(warm.steps_taken, "inner step")
        watch.log(f"round {request.round} was begun {early} early")
    beginning = warm or Beginning(wanted, trainer, batches_of(wanted, trainer), kept)
    due_s = time.monotonic() + _PROGRESS_INTERVAL_S
    while not beginning.is_done:
        watch.refuse_aborted()
        beginning.advance()
        if time.monotonic() >= due_s:
            taken = beginning.steps_taken
            watch.report(Progress(request.lease, taken, request.inner_steps, beginning.loss))
            due_s = time.monotonic() + _PROGRESS_INTERVAL_S
    begun = beginning.result()
    if not math.isfinite(begun.loss_last):
        raise ShardError(_not_finite(f"the loss ({begun.loss_last})", beginning.steps_taken))
    return begun


def _start(request: Train, before: Flat, kept: EndState | None, begun: Begun | None) -> Start:
    """Where the round's own steps start: at its model, moved by what was begun without it.

    Statistics are means over the last few steps, so those of the steps just taken go on.
    """
    if begun is None:
        optimizer = None if kept is None else kept.optimizer
        return Start(before, request.seed, optimizer, request.weight_decay)
    moved = begun.end.parameters - begun.start.parameters
    moved += before.parameters
    start = begun.end._replace(parameters=moved)
    return Start(start, request.seed, begun.optimizer, request.weight_decay)


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


def _train(
    request: Train, trainer: Trainer, batches: Batches, watch: Watch, begun: Begun | None
) -> Losses:
    """Take the steps that were not begun early."""
    first, last = (begun.loss_first, begun.loss_last) if begun else (math.nan, math.nan)
    taken = request.begun.inner_steps if begun and request.begun else 0
    steps = len(batches.indices)
    due_s = time.monotonic() + _PROGRESS_INTERVAL_S
    for number in range(taken + 1, steps + 1):
        watch.refuse_aborted()
        loss = trainer.step(*batches.at(number - 1))
        now_s = time.monotonic()
        # Reading the loss makes the host wait for the device, so it is not read at every step.
        if number in {1, steps} or now_s >= due_s:
            last = float(loss)
            if not math.isfinite(last):
                raise ShardError(_not_finite(f"the loss ({last})", number))
            first = last if number == 1 else first
            if now_s >= due_s:
                watch.report(Progress(request.lease, number, steps, last))
                due_s = now_s + _PROGRESS_INTERVAL_S
    return Losses(first, last)


def _not_finite(what: str, steps: int) -> str:
    taken = several(steps, "inner step")
    return f"{what} is not finite after {taken}. Fix: lower inner.learning_rate"


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
