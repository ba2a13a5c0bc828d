"""One outer step over files: updates on disk become the next model, outer state and delta.

Theory of operation. A sweep walks the coordinates once, a span at a time. For each span it reads
every update's bytes of it in slot order and sums them, takes the outer step, compresses the change
that nodes receive, and writes. Memory is a fixed set of span buffers, whatever the number of
updates; and since slot order alone decides the order of every addition, so are the bits, whatever
the order of arrival. All files are digested on the way. A damaged update is omitted and the
sweep done again without it: that is rare, and a float32 sum cannot be taken back exactly.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from coordinator.shell.aggregation.files import DamagedUpdatesError, FoldInputs, FoldOutputs
from coordinator.shell.aggregation.request import (
    DivergedError,
    FoldRequest,
    FoldResult,
    NoUpdatesError,
    OmittedUpdate,
    Reuse,
)
from coordinator.shell.aggregation.streams import BufferRing, InputError
from coordinator.shell.aggregation.sweep import Sweep
from hypergpu.tensors.compression import GROUP, RECORD

SPAN = 8 * GROUP
"""Values in a span: 1 MiB of float32."""

_INPUT_BUFFERS = 6
_OUTPUT_BUFFERS = 8
_SPANS_ALONE = 16
"""Up to here threads wait for one another longer than they would work side by side: a third of the
time of a model of 1M parameters was measured.
"""


def _reuse_nothing(_path: Path, _size_bytes: int) -> bool:
    return False


def fold(request: FoldRequest, *, span: int = SPAN, reuse: Reuse = _reuse_nothing) -> FoldResult:
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
    omitted = {
        index: OmittedUpdate(index, "it has no samples")
        for index, update in enumerate(request.updates)
        if update.samples < 1
    }
    while len(omitted) < len(request.updates):
        kept = [index for index in range(len(request.updates)) if index not in omitted]
        try:
            result = _fold_kept(request, kept, span=span, reuse=reuse)
        except DamagedUpdatesError as damaged:
            omitted.update({each.index: each for each in damaged.omitted})
            continue
        cosines = dict(zip(kept, result.agreements, strict=True))
        return replace(
            result,
            omitted=tuple(omitted[index] for index in sorted(omitted)),
            agreements=tuple(cosines.get(index) for index in range(len(request.updates))),
        )
    raise NoUpdatesError(tuple(omitted[index] for index in sorted(omitted)))


def _fold_kept(request: FoldRequest, kept: Sequence[int], *, span: int, reuse: Reuse) -> FoldResult:
    has_threads = request.layout.model_bytes > 4 * span * _SPANS_ALONE
    inputs = FoldInputs(request, kept)
    inputs.check_sizes()
    with ExitStack() as on_failure:
        outputs = FoldOutputs(request, on_failure, reuse)
        with (
            BufferRing(_INPUT_BUFFERS, 4 * span, has_thread=has_threads) as reads,
            BufferRing(_OUTPUT_BUFFERS, 4 * span, has_thread=has_threads) as writes,
        ):
            sweep = Sweep(request, inputs, outputs, rings=(reads, writes), span=span)
            try:
                with np.errstate(all="ignore"):
                    sweep.fold_all()
            except InputError as error:
                inputs.raise_damaged([error])
            reads.drain()
            inputs.check_digests()
            writes.drain()
        if not sweep.is_finite:
            raise DivergedError(
                "the next model is not finite: lower the inner or the outer learning rate"
            )
        result = outputs.close()
        on_failure.pop_all()
        return replace(result, agreement=sweep.agreement, agreements=sweep.cosines)
