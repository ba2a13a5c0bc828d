"""Updates and deltas as bytes, with no header: ``codec(large) | small | float32 statistics |
int64 integers``.

The size follows from layout and codec alone. A residual keeps what a payload leaves out.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from hypergpu.digests import RunningDigest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.tensors.floats import Bf16, Fp32
from hypergpu.tensors.integers import Int4, Int8
from hypergpu.tensors.layout import Flat, Float32s, Layout, Octets
from hypergpu.tensors.records import RECORD, Codec, Flaw, groups
from hypergpu.tensors.topk import TOP_K
from hypergpu.units import Bytes

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Fp32(), Bf16(), Int8(), Int4(), *TOP_K)
}


def codec_named(name: str) -> Codec:
    """The codec of a name in `hypergpu.jobfile.spec.CODECS`.

    Raises:
        ValueError: There is none.
    """
    codec = _CODECS.get(name)
    if codec is None:
        raise ValueError(f"no codec {name!r}: use one of {', '.join(_CODECS)}")
    return codec


def encode_into_residual(
    codec: Codec, values: Float32s, residual: Float32s, payload: Octets
) -> None:
    """Encode ``values + decay * residual``; what the payload leaves unsaid is the new residual.

    The decay is the codec's: 1 but for sparse ones. The difference is exact for fp32 and bf16,
    and to within one unit in the last place of the sum for the others.

    Args:
        codec: How.
        values: ``float32[n]``, contiguous; unchanged.
        residual: ``float32[n]``, what earlier payloads left unsaid; becomes the new one.
        payload: Filled; of the size that the codec gives.
    """
    scratch = np.empty(min(codec.group, values.size), np.float32)
    decay = np.float32(codec.residual_decay)
    with np.errstate(invalid="ignore", over="ignore"):  # The receiver refuses what is not finite.
        for here, there in groups(codec, values.size):
            total = residual[here]
            if decay != 1:
                np.multiply(total, decay, out=total)
            np.add(values[here], total, out=total)
            codec.encode_leaving_rest(total, payload[there], scratch[: total.size])


_READ_BYTES = 1 << 20


class Section(NamedTuple):
    """A stretch of float32 values that one codec encodes. Counts are values, offsets are bytes."""

    codec: Codec
    values_start: int
    """First value among parameters and statistics, which a model holds in this order."""
    values_count: int
    bytes_start: int

    @property
    def values(self) -> slice:
        """Its values within parameters and statistics."""
        return slice(self.values_start, self.values_start + self.values_count)

    @property
    def bytes(self) -> slice:
        """Its bytes within the update."""
        return slice(self.bytes_start, self.bytes_end)

    @property
    def bytes_end(self) -> int:
        """Where the next section begins."""
        return self.bytes_start + self.codec.encoded_bytes(self.values_count)

    def bytes_of(self, start: int, count: int) -> slice:
        """Bytes within the update of some values; ``start`` is a multiple of `RECORD` in it."""
        encoded_bytes = self.codec.encoded_bytes
        first = self.bytes_start + encoded_bytes(start)
        return slice(first, self.bytes_start + encoded_bytes(start + count))


class Sections(NamedTuple):
    """Where everything is in an update."""

    large: Section
    small: Section
    statistics: Section
    integers: slice
    """Bytes of the integers; they end the update."""

    @property
    def floats(self) -> tuple[Section, Section, Section]:
        """Everything but the integers."""
        return (self.large, self.small, self.statistics)


@cache
def _small_codec(codec: str) -> Codec:
    return codec_named("fp32" if codec == "fp32" else "bf16")


def sections_of(layout: Layout, codec: str) -> Sections:
    """Lay out an update or a delta.

    Raises:
        ValueError: There is no such codec.
    """
    large = Section(codec_named(codec), 0, layout.large_count, 0)
    small = Section(_small_codec(codec), layout.large_count, layout.small_count, large.bytes_end)
    statistics = Section(
        codec_named("fp32"), layout.parameters_count, layout.statistics_count, small.bytes_end
    )
    integers_start = statistics.bytes_end
    return Sections(
        large, small, statistics, slice(integers_start, integers_start + 8 * layout.integers_count)
    )


def update_bytes(layout: Layout, codec: str) -> Bytes:
    """Exact size of an update, or of a delta, in bytes."""
    return Bytes(sections_of(layout, codec).integers.stop)


class EncodedUpdate(NamedTuple):
    """An update's bytes and what they left unsaid of its pseudo-gradient."""

    payload: Octets
    residual: Float32s


def encode_update(
    layout: Layout, codec: str, update: Flat, residual: Float32s | None = None
) -> EncodedUpdate:
    """Encode a pseudo-gradient with error feedback, and statistics and integers as they are.

    Args:
        update: The pseudo-gradient as ``parameters``; statistics and integers after training.
        residual: ``float32[parameters]`` from the update before; None is zero.

    Returns:
        The payload and the new residual. Inputs are not changed.
    """
    sections = sections_of(layout, codec)
    payload = np.empty(sections.integers.stop, np.uint8)
    unsaid = np.zeros_like(update.parameters) if residual is None else residual.copy()
    for section in (sections.large, sections.small):
        gradient, there = update.parameters[section.values], payload[section.bytes]
        if residual is None and section.codec.is_lossless:
            section.codec.encode(gradient, there)  # Leaves the zeros of the residual untouched.
        else:
            encode_into_residual(section.codec, gradient, unsaid[section.values], there)
    payload[sections.statistics.bytes] = update.statistics.view(np.uint8)
    payload[sections.integers] = update.integers.view(np.uint8)
    return EncodedUpdate(payload, unsaid)


def decode_update(layout: Layout, codec: str, payload: bytes | Octets) -> Flat:
    """Read a whole update.

    Raises:
        HyperGPUError: The size is wrong.
    """
    octets = _sized_octets(layout, codec, payload)
    sections = sections_of(layout, codec)
    flat = Flat.empty(layout)
    with np.errstate(invalid="ignore", over="ignore"):  # A refused update may say anything.
        for section in (sections.large, sections.small):
            section.codec.decode(octets[section.bytes], flat.parameters[section.values])
    flat.statistics.view(np.uint8)[:] = octets[sections.statistics.bytes]
    flat.integers.view(np.uint8)[:] = octets[sections.integers]
    return flat


def decode_parameters(layout: Layout, codec: str, payload: bytes | Octets) -> Float32s:
    """The pseudo-gradient that an update says, ``float32[parameters]``.

    A refused update goes back to its sender's residual by adding this to it.
    """
    return decode_update(layout, codec, payload).parameters


def _sized_octets(layout: Layout, codec: str, payload: bytes | Octets) -> Octets:
    octets = np.frombuffer(payload, np.uint8)
    expected_bytes = update_bytes(layout, codec)
    if octets.size != expected_bytes:
        raise HyperGPUError(
            Reason.UPDATE_MALFORMED, f"an update has {expected_bytes} bytes, not {octets.size}"
        )
    return octets


_REASONS = {
    Flaw.NOT_FINITE: Reason.UPDATE_NOT_FINITE,
    Flaw.MALFORMED: Reason.UPDATE_MALFORMED,
}


class IncrementalCheck:
    """Judge an update while its bytes arrive: the size is exact, every value finite, every record
    well formed.

    Feed it consecutive pieces of any size, then call `finish`. It holds less than one record.
    """

    def __init__(self, layout: Layout, codec: str) -> None:
        sections = sections_of(layout, codec)
        self._sections = list(sections.floats)
        self._total_bytes = sections.integers.stop
        self._seen_bytes = 0
        self._pending = b""

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Check the next bytes.

        Raises:
            HyperGPUError: There are too many, or a record has a flaw.
        """
        self._seen_bytes += len(piece)
        if self._seen_bytes > self._total_bytes:
            raise HyperGPUError(
                Reason.UPDATE_MALFORMED,
                f"an update has {self._total_bytes} bytes, {self._seen_bytes} came",
            )
        octets = np.frombuffer(self._pending + piece if self._pending else piece, np.uint8)
        self._pending = self._judge_records(octets).tobytes()

    def finish(self) -> None:
        """Declare the end.

        Raises:
            HyperGPUError: Bytes are missing.
        """
        if self._seen_bytes != self._total_bytes:
            raise HyperGPUError(
                Reason.UPDATE_MALFORMED,
                f"an update has {self._total_bytes} bytes, only {self._seen_bytes} came",
            )

    def _judge_records(self, octets: Octets) -> Octets:
        """Judge the whole records of the newest bytes; gives those behind them."""
        start = self._seen_bytes - octets.size
        while self._sections and octets.size:
            section = self._sections[0]
            left_bytes = section.bytes_end - start
            size = min(octets.size, left_bytes)
            if size < left_bytes:
                size -= size % section.codec.encoded_bytes(RECORD)
            self._judge(section, octets[:size], judged_bytes=start - section.bytes_start)
            octets, start = octets[size:], start + size
            if size < left_bytes:
                return octets
            self._sections.pop(0)
        return octets[:0]

    def _judge(self, section: Section, records: Octets, *, judged_bytes: int) -> None:
        """Look at whole records, of which the first begins ``judged_bytes`` into the section."""
        record_bytes = section.codec.encoded_bytes(RECORD)
        left_count = section.values_count - judged_bytes // record_bytes * RECORD
        count = min(left_count, -(-records.size // record_bytes) * RECORD)
        flaw = section.codec.flaw(records, count)
        if flaw is not None:
            raise HyperGPUError(_REASONS[flaw], f"near byte {self._seen_bytes}: {flaw.value}")


class ApplyError(Exception):
    """A delta or its base cannot be read to the end."""


def apply_delta(
    base_path: Path, delta_path: Path, out_path: Path, *, layout: Layout, codec: str
) -> Digest:
    """Write the model that a delta makes of its base, in flat memory.

    The caller compares the digest, syncs and renames.

    Returns:
        The digest of the model written.

    Raises:
        ApplyError: A file has the wrong size.
        OSError: A file cannot be read or written.
    """
    _refuse_wrong_size(base_path, layout.model_bytes)
    _refuse_wrong_size(delta_path, update_bytes(layout, codec))
    running_digest = RunningDigest()
    with base_path.open("rb") as base, delta_path.open("rb") as delta, out_path.open("wb") as out:
        for values in _changed_values(base, delta, sections_of(layout, codec)):
            running_digest.update(values.view(np.uint8).data)
            out.write(values.data)
        while piece := delta.read(_READ_BYTES):
            running_digest.update(piece)
            out.write(piece)
    return running_digest.digest()


def _changed_values(base: BinaryIO, delta: BinaryIO, sections: Sections) -> Iterator[Float32s]:
    """The parameters of ``base`` plus what ``delta`` says of them, group by group."""
    for section in (sections.large, sections.small):
        for here, there in groups(section.codec, section.values_count):
            values = np.frombuffer(base.read(4 * (here.stop - here.start)), np.float32)
            payload = np.frombuffer(delta.read(there.stop - there.start), np.uint8)
            changed_values = np.empty_like(values)
            with np.errstate(invalid="ignore", over="ignore"):  # The digest will tell.
                section.codec.decode(payload, changed_values)
                changed_values += values
            yield changed_values


def _refuse_wrong_size(path: Path, expected_bytes: int) -> None:
    size_bytes = path.stat().st_size
    if size_bytes != expected_bytes:
        raise ApplyError(f"{path.name} has {size_bytes} bytes, not {expected_bytes}")
