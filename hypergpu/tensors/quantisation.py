"""Codecs that say every value: floats, and whole numbers times a scale.

All round half to even with elementwise IEEE operations only, so that every CPU gives the same
bits.

What every codec offers: float32 vectors to bytes and back in records.

A section of `count` values is a sequence of records of `RECORD` values; only the last may be
shorter. All full records of a codec have one size, so the bytes of values [start, start + n),
start a multiple of `RECORD`, begin at ``encoded_bytes(start)`` whatever follows.

Codecs round half to even with elementwise IEEE operations only, so that every CPU gives the same
bits.

Whole numbers in [-7, 7] times one bfloat16 scale for each 256 values: 4.06 bits a value.

Record of 4,096 values: ``16 bfloat16 scales | 2,048 bytes``; of a shorter last record, as many
scales and 128-byte blocks as it needs, padded with zeros. In a block byte j holds value j in its
low half and value j + 128 in its high half, each plus 8.

Scales are bfloat16 and not float16, at the same size. float16 ends at 6e-8 and loses precision
below 6e-5, where the scales of late pseudo-gradients are (1e-6 / 7); bfloat16 has float32's range.
Its coarser steps cost nothing: both sides use the rounded scale, and 7 * (1 + 2**-8) still rounds
to 7.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.layout import Float32s, Octets

RECORD = 4096
"""Values in a full record, for every codec."""

GROUP = 8 * RECORD
"""Values handled at a time: 128 KiB of float32 and its temporaries stay in a core's L2 cache."""


class Flaw(Enum):
    """Why a payload of the right size cannot be used."""

    NOT_FINITE = "a value is not finite"
    MALFORMED = "its places do not ascend within their record"


class Codec(Protocol):
    """One way to write float32 values as fewer bytes."""

    @property
    def name(self) -> str:
        """The name that job files and deltas carry."""
        ...

    @property
    def is_lossless(self) -> bool:
        """Whether every value comes back with the bits that it had."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether a payload names the few values that it says, and nothing of the others."""
        return False

    @property
    def group(self) -> int:
        """Values that it handles at a time, a multiple of `RECORD`."""
        return GROUP

    @property
    def residual_decay(self) -> float:
        """What remains of the residual before new values are added to it."""
        return 1.0

    def encoded_bytes(self, count: int) -> int:
        """Exact size of ``count`` values."""
        ...

    def encode(self, values: Float32s, out: Octets) -> None:
        """Write contiguous ``values`` to exactly ``encoded_bytes(values.size)`` bytes.

        What is not finite is written so that `flaw` finds it.
        """
        ...

    def decode(self, payload: Octets, out: Float32s) -> None:
        """Read exactly ``encoded_bytes(out.size)`` bytes that begin at a record."""
        ...

    def values(self, payload: Octets, scratch: Float32s) -> Float32s:
        """Like `decode` into ``scratch``, or a view of ``payload`` where that needs no work.

        Reading a view instead of a copy makes folding float32 updates a third faster.
        """
        self.decode(payload, scratch)
        return scratch

    def encode_leaving_rest(self, total: Float32s, out: Octets, scratch: Float32s) -> None:
        """Like `encode`, and take from ``total``, in place, what the payload says of it.

        Args:
            scratch: As many values as ``total``; its content is lost.
        """
        self.encode(total, out)
        np.subtract(total, self.values(out, scratch), out=total)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """Return the flaw of whole records of ``count`` values; None when they are well formed.

        Without a flaw, every value that they decode to is finite.
        """
        ...


def groups(codec: Codec, count: int) -> Iterator[tuple[slice, slice]]:
    """Cut a section into the codec's groups: (values, bytes) slices."""
    for start in range(0, count, codec.group):
        stop = min(start + codec.group, count)
        yield slice(start, stop), slice(codec.encoded_bytes(start), codec.encoded_bytes(stop))


class RecordRun(NamedTuple):
    """Records of one length within a group: their values, their bytes, and the length."""

    values: slice
    bytes: slice
    length: int

    @property
    def rows(self) -> int:
        """Number of records."""
        return len(range(self.values.start, self.values.stop, self.length))


def record_runs(codec: Codec, count: int) -> Iterator[RecordRun]:
    """Cut a section into groups, each of them into its full records and a shorter last one."""
    for here, there in groups(codec, count):
        rest = (here.stop - here.start) % RECORD
        middle = here.stop - rest
        cut = there.start + codec.encoded_bytes(middle - here.start)
        if middle > here.start:
            yield RecordRun(slice(here.start, middle), slice(there.start, cut), RECORD)
        if rest:
            yield RecordRun(slice(middle, here.stop), slice(cut, there.stop), rest)


class Fp32(Codec):
    """Little-endian float32, as in memory."""

    name = "fp32"
    is_lossless = True

    def encoded_bytes(self, count: int) -> int:
        """See `Codec`."""
        return 4 * count

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Codec`. The bits are the same, of what is not finite too."""
        np.copyto(out.view(np.float32), values)

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Codec`."""
        np.copyto(out, payload.view(np.float32))

    def values(self, payload: Octets, scratch: Float32s) -> Float32s:
        """See `Codec`."""
        return payload.view(np.float32)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Codec`."""
        return None if np.isfinite(payload.view(np.float32)).all() else Flaw.NOT_FINITE


Uint16s = npt.NDArray[np.uint16]

_NOT_A_NUMBER = np.uint16(0x7FC0)
_INFINITE = np.uint16(0x7F80)


def bf16_bits(values: Float32s) -> Uint16s:
    """Round to the nearest bfloat16, ties to even; what rounds to 2**128 becomes infinite."""
    bits = values.view(np.uint32)
    # Adding 0x7FFF, and one more when the kept part is odd, carries into it exactly when rounding
    # goes up.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    codes = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():  # The carry would turn some into zero.
        codes[is_nan] = _NOT_A_NUMBER
    return codes


def floats_of_bf16(codes: Uint16s) -> Float32s:
    """Widen bfloat16 bits to float32, exactly."""
    bits = codes.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


class Bf16(Codec):
    """Two bytes a value, no scale: any magnitude below 3.38e38."""

    name = "bf16"

    def encoded_bytes(self, count: int) -> int:
        """See `Codec`."""
        return 2 * count

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Codec`."""
        for here, there in groups(self, values.size):
            out[there].view(np.uint16)[:] = bf16_bits(values[here])

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Codec`."""
        for here, there in groups(self, out.size):
            bits = out[here].view(np.uint32)
            np.copyto(bits, payload[there].view(np.uint16))
            np.left_shift(bits, 16, out=bits)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Codec`."""
        is_bad = ((payload.view(np.uint16) & _INFINITE) == _INFINITE).any()
        return Flaw.NOT_FINITE if is_bad else None


_MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)
_INFINITE_BITS = np.uint32(0x7F80_0000)
_SCALE_MIN = np.float32(2.0**-126)


def largest_magnitude(values: Float32s) -> Float32s:
    """Largest absolute value along the last axis; infinite for a row with anything not finite.

    Magnitudes of floats order like their bits, and a maximum of integers is twice as fast.
    """
    bits = values.view(np.uint32) & _MAGNITUDE_BITS
    largest: npt.NDArray[np.uint32] = np.minimum(bits.max(axis=-1), _INFINITE_BITS)
    return largest.view(np.float32)


def flushed_reciprocal(scales: Float32s) -> Float32s:
    """Set scales below 2**-126 to zero, in place, and give 1 / scale with 0 for those.

    A reciprocal of a smaller scale could be infinite; such values wait in the residual until they
    grow.
    """
    is_usable = scales >= _SCALE_MIN
    scales *= is_usable
    reciprocals = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=reciprocals, where=is_usable)
    return reciprocals


_INT8_SCALE_BYTES = 4
_INT8_CODE_MAX = np.float32(127)
_INT8_SCALE_BITS_END = np.uint32((127 + 121) << 23)
"""Bits of 2**121: any code times a scale below it is finite. Negative scales have larger bits."""


class Int8(Codec):
    """Error at most half a scale. A record whose scale would be below 2**-126 becomes zero."""

    name = "int8"

    def encoded_bytes(self, count: int) -> int:
        """See `Codec`."""
        return count + _INT8_SCALE_BYTES * -(-count // RECORD)

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Codec`."""
        for run in record_runs(self, values.size):
            rows = values[run.values].reshape(run.rows, run.length)
            _encode_int8_rows(rows, out[run.bytes].reshape(run.rows, -1))

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Codec`."""
        for run in record_runs(self, out.size):
            rows = out[run.values].reshape(run.rows, run.length)
            _decode_int8_rows(payload[run.bytes].reshape(run.rows, -1), rows)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Codec`. A negative scale is one too: no encoder writes one."""
        for run in record_runs(self, count):
            scales = payload[run.bytes].reshape(run.rows, -1)[:, :_INT8_SCALE_BYTES].copy()
            if (scales.view(np.uint32) >= _INT8_SCALE_BITS_END).any():
                return Flaw.NOT_FINITE
        return None


def _encode_int8_rows(values: Float32s, records: Octets) -> None:
    with np.errstate(invalid="ignore"):  # What is not finite gives a scale that is not finite.
        scales = largest_magnitude(values) / _INT8_CODE_MAX
        reciprocals = flushed_reciprocal(scales)
        records[:, :_INT8_SCALE_BYTES] = scales.view(np.uint8).reshape(-1, _INT8_SCALE_BYTES)
        quotients = values * reciprocals[:, None]
        codes: npt.NDArray[np.int8] = records[:, _INT8_SCALE_BYTES:].view(np.int8)
        np.rint(quotients, out=codes, casting="unsafe")


def _decode_int8_rows(records: Octets, out: Float32s) -> None:
    scales = records[:, :_INT8_SCALE_BYTES].copy().view(np.float32)  # [rows, 1]
    np.copyto(out, records[:, _INT8_SCALE_BYTES:].view(np.int8))
    np.multiply(out, scales, out=out)


_BLOCK = 256
_HALF = _BLOCK // 2
_INT4_SCALE_BYTES = 2
_BLOCK_BYTES = _INT4_SCALE_BYTES + _HALF
_INT4_CODE_MAX = np.float32(7)
_CODE_BIAS = 8
_INT4_SCALE_BITS_END = np.uint16((127 + 125) << 7)
"""Bits of 2**125: any code times a scale below it is finite. Negative scales have larger bits."""


class Int4(Codec):
    """Error at most half a scale. A block whose scale would be below 2**-126 becomes zero."""

    name = "int4"

    def encoded_bytes(self, count: int) -> int:
        """See `Codec`."""
        return _BLOCK_BYTES * -(-count // _BLOCK)

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Codec`."""
        for run in record_runs(self, values.size):
            blocks = -(-run.length // _BLOCK)
            rows = values[run.values].reshape(run.rows, run.length)
            if run.length < blocks * _BLOCK:
                rows = np.pad(rows, ((0, 0), (0, blocks * _BLOCK - run.length)))
            records = out[run.bytes].reshape(run.rows, -1)
            _encode_int4_rows(rows.reshape(run.rows, blocks, _BLOCK), records)

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Codec`."""
        for run in record_runs(self, out.size):
            blocks = -(-run.length // _BLOCK)
            records = payload[run.bytes].reshape(run.rows, -1)
            if run.length == blocks * _BLOCK:
                _decode_int4_rows(records, out[run.values].reshape(run.rows, blocks, _BLOCK))
            else:
                padded = np.empty((1, blocks, _BLOCK), np.float32)
                _decode_int4_rows(records, padded)
                out[run.values] = padded.reshape(-1)[: run.length]

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Codec`. A negative scale is one too: no encoder writes one."""
        for run in record_runs(self, count):
            records = payload[run.bytes].reshape(run.rows, -1)
            scales = records[:, : _INT4_SCALE_BYTES * -(-run.length // _BLOCK)].copy()
            if (scales.view(np.uint16) >= _INT4_SCALE_BITS_END).any():
                return Flaw.NOT_FINITE
        return None


def _encode_int4_rows(values: Float32s, records: Octets) -> None:
    """Write ``float32[rows, blocks, 256]`` as ``uint8[rows, blocks * 130]``."""
    rows, blocks, _ = values.shape
    scales_end = _INT4_SCALE_BYTES * blocks
    with np.errstate(invalid="ignore"):  # What is not finite gives a scale that is not finite.
        codes_of_scales = bf16_bits(largest_magnitude(values) / _INT4_CODE_MAX)
        scales = floats_of_bf16(codes_of_scales)
        reciprocals = flushed_reciprocal(scales)
        quotients = values * reciprocals[:, :, None]
        codes = np.empty(values.shape, np.int8)
        np.rint(quotients, out=codes, casting="unsafe")
    codes += _CODE_BIAS
    halves = codes.view(np.uint8)
    records[:, :scales_end] = bf16_bits(scales).view(np.uint8)
    high = halves[:, :, _HALF:] << 4
    packed = records[:, scales_end:].reshape(rows, blocks, _HALF)
    np.bitwise_or(high, halves[:, :, :_HALF], out=packed)


def _decode_int4_rows(records: Octets, out: Float32s) -> None:
    """Read ``uint8[rows, blocks * 130]`` as ``float32[rows, blocks, 256]``."""
    rows, blocks, _ = out.shape
    scales_end = _INT4_SCALE_BYTES * blocks
    scales = floats_of_bf16(records[:, :scales_end].copy().view(np.uint16))  # [rows, blocks]
    packed = records[:, scales_end:].reshape(rows, blocks, _HALF)
    codes = np.empty((rows, blocks, 2, _HALF), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    signed = codes.view(np.int8)
    signed -= _CODE_BIAS
    np.copyto(out, signed.reshape(out.shape))
    np.multiply(out, scales[:, :, None], out=out)
