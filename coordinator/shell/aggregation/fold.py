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
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from coordinator.shell.aggregation.arithmetic import (
    OuterStep,
    SenderMean,
    WeightedMean,
    fold_weights,
    is_all_finite,
    unclipped_rest,
)
from coordinator.shell.aggregation.digested_files import (
    BufferRing,
    InputError,
    InputFile,
    OutputFile,
)
from coordinator.shell.aggregation.fold_files import (
    DamagedUpdatesError,
    FoldInputs,
    FoldOutputs,
    SharedOutput,
    work_path,
)
from coordinator.shell.aggregation.fold_request import (
    DivergedError,
    FoldRequest,
    FoldResult,
    NoUpdatesError,
    OmittedUpdate,
    Reuse,
)
from hypergpu.tensors.codec import Section, sections_of
from hypergpu.tensors.layout import Float32s
from hypergpu.tensors.records import GROUP, RECORD, groups


class CoordinateRange(msgspec.Struct, frozen=True):
    """Some values of one section. Any multiple of `RECORD` may be a border."""

    place: int
    """Which section: 0 large, 1 small, 2 statistics."""
    start: int
    stop: int


class _Span(NamedTuple):
    """Some consecutive coordinates of one section."""

    place: int
    """Which section: 0 large, 1 small, 2 statistics."""
    down: Section
    start: int
    """First value, counted within the section."""
    values_count: int

    @property
    def model_start(self) -> int:
        """Its first byte in a model blob."""
        return 4 * (self.down.values_start + self.start)


class Sweep:
    """One walk. After `fold_all`, ``is_finite`` says whether the model is usable."""

    def __init__(
        self,
        request: FoldRequest,
        inputs: FoldInputs,
        outputs: FoldOutputs,
        *,
        rings: tuple[BufferRing, BufferRing],
        span: int,
    ) -> None:
        self._layout = request.layout
        self._ups = [sections_of(request.layout, codec) for codec in inputs.codecs]
        self._down = sections_of(request.layout, request.down)
        self._inputs = inputs
        self._outputs = outputs
        self._reads, self._writes = rings
        self._span = span
        self._weights = fold_weights(inputs.weights, inputs.clips)
        self._rest = unclipped_rest(inputs.weights, inputs.clips)
        self._scale = np.float32(request.scale)
        self._means = self._means_of_sections(span)
        self._outer = OuterStep(request.outer)
        self._change = np.empty(self._down.large.codec.group, np.float32)
        self.is_finite = True

    def fold_all(self) -> None:
        """Walk every section from its first value to its last.

        Raises:
            InputError: A file could not be read.
            OSError: A file could not be written.
        """
        for place, down in enumerate(self._down.floats):
            self.fold_range(CoordinateRange(place, 0, down.values_count))
        self.copy_integers()

    def fold_range(self, wanted: CoordinateRange) -> None:
        """Walk some values of one section; errors as `fold_all`."""
        span, down = self._span, self._down.floats[wanted.place]
        for start in range(wanted.start, wanted.stop, span):
            here = _Span(wanted.place, down, start, min(span, wanted.stop - start))
            mean = self._average(here)
            if down is self._down.statistics:
                self._write_statistics(here, mean)
            else:
                self._step(here, mean)

    def _means_of_sections(self, span: int) -> tuple[WeightedMean | SenderMean, ...]:
        """A plain mean where everybody sends everything, which only large parameters may lack."""
        plain = WeightedMean(span)
        is_sparse = any(sections.large.codec.is_sparse for sections in self._ups)
        large = SenderMean(span, len(self._ups)) if is_sparse else plain
        return (large, plain, plain)

    def _average(self, here: _Span) -> Float32s:
        mean, reads = self._means[here.place], self._reads
        mean.begin(here.values_count)
        for index, (update, weight) in enumerate(
            zip(self._inputs.updates, self._weights, strict=True)
        ):
            section = self._ups[index].floats[here.place]
            there = section.bytes_of(here.start, here.values_count)
            payload = update.read(reads.take(), there.start, there.stop - there.start)
            mean.add(section.codec, payload, weight)
        return mean.mean()

    def _step(self, here: _Span, mean: Float32s) -> None:
        outputs = self._outputs
        if self._scale != 1:
            np.multiply(mean, self._scale, out=mean)
        base = self._read(self._inputs.base, here, 0)
        exact, momentum = self._read_state(here, base)
        buffer = self._writes.take()
        next_exact = buffer.floats(here.values_count)
        momentum_buffer = self._writes.take() if outputs.has_momentum else None
        next_momentum = momentum_buffer.floats(here.values_count) if momentum_buffer else None
        self._outer.take(
            mean, exact, momentum, out_parameters=next_exact, out_momentum=next_momentum
        )
        self.is_finite = self.is_finite and is_all_finite(next_exact)
        if outputs.state and momentum_buffer and next_momentum is not None:
            start = outputs.momentum_start + here.model_start
            outputs.state.write(momentum_buffer, start, next_momentum.view(np.uint8))
        if outputs.state and outputs.delta:
            outputs.state.write(buffer, here.model_start, next_exact.view(np.uint8))
            self._compress(here, outputs.delta, base, next_exact)
        else:
            outputs.model.write(buffer, here.model_start, next_exact.view(np.uint8))

    def _compress(self, here: _Span, delta: OutputFile, base: Float32s, exact: Float32s) -> None:
        """Compress the change that nodes add to the base, and write the model that they get.

        The error stays in ``exact - model``, which is error feedback without a residual of its own.
        """
        model_buffer, delta_buffer = self._writes.take(), self._writes.take()
        model = model_buffer.floats(here.values_count)
        payload = delta_buffer.octets(here.down.codec.encoded_bytes(here.values_count))
        for values, record_range in groups(here.down.codec, here.values_count):
            change = self._change[: values.stop - values.start]
            np.subtract(exact[values], base[values], out=change)
            here.down.codec.encode(change, payload[record_range])
            here.down.codec.decode(payload[record_range], change)
            np.add(base[values], change, out=model[values])
        self.is_finite = self.is_finite and is_all_finite(model)
        self._outputs.model.write(model_buffer, here.model_start, model.view(np.uint8))
        delta.write(delta_buffer, here.down.bytes_of(here.start, here.values_count).start, payload)

    def _read_state(self, here: _Span, base: Float32s) -> tuple[Float32s, Float32s | None]:
        """The exact parameters, and momentum if there is any and it is of use."""
        inputs = self._inputs
        if inputs.state is None:
            return base, None
        exact = self._read(inputs.state, here, 0) if inputs.has_parameters else base
        if not (inputs.has_momentum and self._outputs.has_momentum):
            return exact, None
        return exact, self._read(inputs.state, here, inputs.momentum_start)

    def _read(self, file: InputFile, here: _Span, vector_start: int) -> Float32s:
        start = vector_start + here.model_start
        return file.read(self._reads.take(), start, 4 * here.values_count).view(np.float32)

    def _write_statistics(self, here: _Span, mean: Float32s) -> None:
        buffer = self._writes.take()
        octets = buffer.octets(4 * here.values_count)
        if self._rest:
            np.add(mean, self._read(self._inputs.base, here, 0) * self._rest, out=mean)
        np.copyto(octets.view(np.float32), mean)
        self._outputs.model.write(buffer, here.model_start, octets)
        if self._outputs.delta:
            there = here.down.bytes_of(here.start, here.values_count)
            self._outputs.delta.write(buffer, there.start, octets)

    def copy_integers(self) -> None:
        """Take those of the lowest slot; errors as `fold_all`."""
        lowest = self._inputs.updates[0]
        source, target = self._ups[0].integers, self._down.integers
        model_start = self._layout.model_bytes - (source.stop - source.start)
        for start in range(0, source.stop - source.start, 4 * self._span):
            count = min(4 * self._span, source.stop - source.start - start)
            octets = lowest.read(self._reads.take(), source.start + start, count)
            buffer = self._writes.take()
            copy = buffer.octets(count)
            np.copyto(copy, octets)
            self._outputs.model.write(buffer, model_start + start, copy)
            if self._outputs.delta:
                self._outputs.delta.write(buffer, target.start + start, copy)


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
    omitted_updates = {
        index: OmittedUpdate(index, "it has no weight")
        for index, update in enumerate(request.updates)
        if update.weight < 1 or update.clip < 1
    }
    while len(omitted_updates) < len(request.updates):
        kept_indices = [
            index for index in range(len(request.updates)) if index not in omitted_updates
        ]
        try:
            result = _fold_kept(request, kept_indices, span=span, reuse=reuse)
        except DamagedUpdatesError as error:
            omitted_updates.update({each.index: each for each in error.omitted})
            continue
        return replace(
            result, omitted=tuple(omitted_updates[index] for index in sorted(omitted_updates))
        )
    raise NoUpdatesError(tuple(omitted_updates[index] for index in sorted(omitted_updates)))


def _fold_kept(request: FoldRequest, kept: Sequence[int], *, span: int, reuse: Reuse) -> FoldResult:
    has_threads = request.layout.model_bytes > 4 * span * _SPANS_ALONE
    inputs = FoldInputs(request, kept)
    inputs.check_sizes()
    with ExitStack() as on_failure:

        def create(_name: str, size_bytes: int) -> OutputFile:
            path = work_path(request.output_dir)
            reuse(path, size_bytes)
            return OutputFile(path, on_failure)

        outputs = FoldOutputs(request, create)
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
                "the next model is not finite: finite updates add up beyond float32; look for huge"
                " values in the data, or lower a learning rate if losses rose before"
            )
        result = outputs.close()
        on_failure.pop_all()
        return result


class ShardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Some coordinates of one outer step, into files that are there."""

    fold: FoldRequest
    """Every update counts, and whoever asks checks the digests."""
    ranges: tuple[CoordinateRange, ...]
    has_integers: bool
    outputs: dict[str, Path]
    """By the names of `output_sizes`."""


def fold_shard(request: ShardRequest, *, span: int = SPAN) -> bool:
    """Fold some coordinates: the same bits as `fold` writes there. One thread.

    Returns:
        Whether all that was written is finite.

    Raises:
        InputError: A file could not be read.
        OSError: A file could not be written.
    """
    fold_request = request.fold
    inputs = FoldInputs(fold_request, range(len(fold_request.updates)))
    inputs.check_sizes()
    inputs.skip_digests()
    shared_outputs = {name: SharedOutput(path) for name, path in request.outputs.items()}
    try:
        with (
            BufferRing(_INPUT_BUFFERS, 4 * span, has_thread=False) as reads,
            BufferRing(_OUTPUT_BUFFERS, 4 * span, has_thread=False) as writes,
            np.errstate(all="ignore"),
        ):
            outputs = FoldOutputs(fold_request, lambda name, _size: shared_outputs[name])
            sweep = Sweep(fold_request, inputs, outputs, rings=(reads, writes), span=span)
            for each in request.ranges:
                sweep.fold_range(each)
            if request.has_integers:
                sweep.copy_integers()
    finally:
        for output in shared_outputs.values():
            output.release()
    return sweep.is_finite
