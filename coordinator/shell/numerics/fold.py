"""One outer step over files: updates on disk become the next model, outer state and delta.

Theory of operation. A sweep walks the coordinates once, a span at a time. For each span it reads
every update's bytes of it in slot order and sums them, takes the outer step, compresses what nodes
are to be told, and writes. Memory is a fixed set of span buffers, whatever the number of updates;
and since slot order alone decides the order of every addition, so are the bits, whatever the order
of arrival. All files are digested on the way. An update that turns out damaged is refused and the
sweep is done again without it: that is rare, and a float32 sum cannot be taken back exactly.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from coordinator.shell.numerics.files import DamagedUpdatesError, FoldInputs, FoldOutputs
from coordinator.shell.numerics.request import (
    DivergedError,
    FoldRequest,
    FoldResult,
    NoUpdatesError,
    RefusedUpdate,
    Reuse,
)
from coordinator.shell.numerics.streams import InputError, Ring
from coordinator.shell.numerics.sweep import Sweep
from hypergpu.tensors.compression import GROUP, RECORD

SPAN = 8 * GROUP
"""Values in a span: 1 MiB of float32."""

_INPUT_SLOTS = 6
_OUTPUT_SLOTS = 8
_SPANS_ALONE = 16
"""Up to here threads wait for one another longer than they would work side by side: a third of the
time of a model of 1M parameters was measured.
"""


class _Workshop(NamedTuple):
    span: int
    reuse: Reuse


def _all_new(_path: Path, _size_bytes: int) -> bool:
    return False


def fold(request: FoldRequest, *, span: int = SPAN, reuse: Reuse = _all_new) -> FoldResult:
    """Take one outer step.

    Args:
        span: Values handled at a time; any multiple of `RECORD` gives the same bits.
        reuse: Where the files to write may come from.

    Returns:
        The new files, complete but not synced, and the updates that were left out.

    Raises:
        NoUpdatesError: No update was given, or none is sound.
        BaseDamagedError: The base model or the outer state is not what its digest says.
        DivergedError: The result is not finite.
        OSError: The output directory cannot be written.
        ValueError: The span is none.
    """
    if span <= 0 or span % RECORD:
        raise ValueError(f"a span of {span} values is not a multiple of {RECORD}")
    refused = {
        index: RefusedUpdate(index, "it has no samples")
        for index, update in enumerate(request.updates)
        if update.samples < 1
    }
    workshop = _Workshop(span, reuse)
    while len(refused) < len(request.updates):
        kept = [index for index in range(len(request.updates)) if index not in refused]
        try:
            return _fold_kept(request, kept, _in_order(refused), workshop)
        except DamagedUpdatesError as damaged:
            refused.update({each.index: each for each in damaged.refused})
    raise NoUpdatesError(_in_order(refused))


def _in_order(refused: dict[int, RefusedUpdate]) -> tuple[RefusedUpdate, ...]:
    return tuple(refused[index] for index in sorted(refused))


def _fold_kept(
    request: FoldRequest,
    kept: Sequence[int],
    refused: tuple[RefusedUpdate, ...],
    workshop: _Workshop,
) -> FoldResult:
    span = workshop.span
    has_lanes = request.layout.model_bytes > 4 * span * _SPANS_ALONE
    inputs = FoldInputs(request, kept)
    inputs.refuse_other_sizes()
    with ExitStack() as on_failure:
        outputs = FoldOutputs(request, on_failure, workshop.reuse)
        with (
            Ring(_INPUT_SLOTS, 4 * span, has_lane=has_lanes) as reads,
            Ring(_OUTPUT_SLOTS, 4 * span, has_lane=has_lanes) as writes,
        ):
            sweep = Sweep(request, inputs, outputs, rings=(reads, writes), span=span)
            try:
                with np.errstate(all="ignore"):
                    sweep.fold_all()
            except InputError as error:
                raise inputs.blame(error) from error
            reads.drain()
            inputs.refuse_other_digests()
            writes.drain()
        if not sweep.is_finite:
            raise DivergedError(
                "the next model is not finite: lower the inner or the outer learning rate"
            )
        result = outputs.finished(refused, sweep.agreement)
        on_failure.pop_all()
        return msgspec.structs.replace(
            result, agreements=_place_agreements(request, kept, sweep.agreements)
        )


def _place_agreements(
    request: FoldRequest, kept: Sequence[int], found: tuple[float | None, ...]
) -> tuple[float | None, ...]:
    """What was found of each update, in the places of the request."""
    placed: list[float | None] = [None] * len(request.updates)
    for index, each in zip(kept, found, strict=True):
        placed[index] = each
    return tuple(placed)
