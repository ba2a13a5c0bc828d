"""One walk over all coordinates: read, average, step, compress, write."""

from typing import NamedTuple

import numpy as np

from coordinator.shell.aggregation.agreement import Agreement
from coordinator.shell.aggregation.files import FoldInputs, FoldOutputs
from coordinator.shell.aggregation.means import SenderMean, WeightedMean, weights_of
from coordinator.shell.aggregation.outer_step import OuterStep, is_all_finite
from coordinator.shell.aggregation.request import FoldRequest
from coordinator.shell.aggregation.streams import BufferRing, InputFile, OutputFile
from hypergpu.tensors.codec import Section, sections_of
from hypergpu.tensors.compression import groups
from hypergpu.tensors.layout import Float32s


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
        self._ups = [sections_of(request.layout, scheme) for scheme in inputs.schemes]
        self._down = sections_of(request.layout, request.down)
        self._inputs = inputs
        self._outputs = outputs
        self._reads, self._writes = rings
        self._span = span
        self._weights = weights_of(inputs.samples)
        self._scale = np.float32(request.scale)
        self._means = self._means_of_sections(span)
        has_large = request.layout.large_count > 0
        self._compared = self._down.large if has_large else self._down.small
        self._agreement = Agreement(len(inputs.updates), self._compared.values_count)
        self._outer = OuterStep(request.outer)
        self._change = np.empty(self._down.large.scheme.group, np.float32)
        self.is_finite = True

    def fold_all(self) -> None:
        """Walk every section from its first value to its last.

        Raises:
            InputError: A file could not be read.
            OSError: A file could not be written.
        """
        span = self._span
        for place, down in enumerate(self._down.floats):
            for start in range(0, down.values_count, span):
                here = _Span(place, down, start, min(span, down.values_count - start))
                mean = self._average(here)
                if down is self._down.statistics:
                    self._write_statistics(here, mean)
                else:
                    self._step(here, mean)
        self._copy_integers()

    @property
    def agreement(self) -> float | None:
        """How far the updates agree on large parameters, once all is folded; None without any."""
        return self._agreement.agreement() if self._layout.large_count else None

    @property
    def cosines(self) -> tuple[float | None, ...]:
        """Cosine of each update with the sum of the others, once all is folded."""
        return self._agreement.cosines()

    def _means_of_sections(self, span: int) -> tuple[WeightedMean | SenderMean, ...]:
        """A plain mean where everybody sends everything, which only large parameters may lack."""
        plain = WeightedMean(span)
        is_sparse = any(sections.large.scheme.is_sparse for sections in self._ups)
        large = SenderMean(span, len(self._ups)) if is_sparse else plain
        return (large, plain, plain)

    def _average(self, here: _Span) -> Float32s:
        mean, reads = self._means[here.place], self._reads
        span = range(here.start, here.start + here.values_count)
        mean.begin(here.values_count)
        for index, (update, weight) in enumerate(
            zip(self._inputs.updates, self._weights, strict=True)
        ):
            section = self._ups[index].floats[here.place]
            there = section.bytes_of(here.start, here.values_count)
            payload = update.read(reads.take(), there.start, there.stop - there.start)
            mean.add(section.scheme, payload, weight)
            if here.down is self._compared:
                self._agreement.add(index, section.scheme, payload, span)
        self._agreement.end_span()
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
        payload = delta_buffer.octets(here.down.scheme.encoded_bytes(here.values_count))
        for values, encoded in groups(here.down.scheme, here.values_count):
            change = self._change[: values.stop - values.start]
            np.subtract(exact[values], base[values], out=change)
            here.down.scheme.encode(change, payload[encoded])
            here.down.scheme.decode(payload[encoded], change)
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
        np.copyto(octets.view(np.float32), mean)
        self._outputs.model.write(buffer, here.model_start, octets)
        if self._outputs.delta:
            there = here.down.bytes_of(here.start, here.values_count)
            self._outputs.delta.write(buffer, there.start, octets)

    def _copy_integers(self) -> None:
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
