"""Whole numbers in [-7, 7] times one bfloat16 scale for each 256 values: 4.06 bits a value.

Record of 4,096 values: ``16 bfloat16 scales | 2,048 bytes``; of a shorter last record, as many
scales and 128-byte blocks as it needs, padded with zeros. In a block byte j holds value j in its
low half and value j + 128 in its high half, each plus 8.

Scales are bfloat16 and not float16, at the same size. float16 ends at 6e-8 and loses precision
below 6e-5, where the scales of late pseudo-gradients are (1e-6 / 7); bfloat16 has float32's range.
Its coarser steps cost nothing: both sides use the rounded scale, and 7 * (1 + 2**-8) still rounds
to 7.
"""

import numpy as np

from hypergpu.tensors.floats import bf16_bits, floats_of_bf16
from hypergpu.tensors.int8 import flushed_reciprocal, largest_magnitude
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.scheme import Flaw, Scheme, record_runs

_BLOCK = 256
_HALF = _BLOCK // 2
_SCALE_BYTES = 2
_BLOCK_BYTES = _SCALE_BYTES + _HALF
_CODE_MAX = np.float32(7)
_CODE_BIAS = 8
_SCALE_BITS_END = np.uint16((127 + 125) << 7)
"""Bits of 2**125: any code times a scale below it is finite. Negative scales have larger bits."""


class Int4(Scheme):
    """Error at most half a scale. A block whose scale would be below 2**-126 becomes zero."""

    name = "int4"

    def encoded_bytes(self, count: int) -> int:
        """See `Scheme`."""
        return _BLOCK_BYTES * -(-count // _BLOCK)

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Scheme`."""
        for run in record_runs(self, values.size):
            blocks = -(-run.length // _BLOCK)
            rows = values[run.values].reshape(run.rows, run.length)
            if run.length < blocks * _BLOCK:
                rows = np.pad(rows, ((0, 0), (0, blocks * _BLOCK - run.length)))
            records = out[run.bytes].reshape(run.rows, -1)
            _encode_rows(rows.reshape(run.rows, blocks, _BLOCK), records)

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Scheme`."""
        for run in record_runs(self, out.size):
            blocks = -(-run.length // _BLOCK)
            records = payload[run.bytes].reshape(run.rows, -1)
            if run.length == blocks * _BLOCK:
                _decode_rows(records, out[run.values].reshape(run.rows, blocks, _BLOCK))
            else:
                padded = np.empty((1, blocks, _BLOCK), np.float32)
                _decode_rows(records, padded)
                out[run.values] = padded.reshape(-1)[: run.length]

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Scheme`. A negative scale is one too: no encoder writes one."""
        for run in record_runs(self, count):
            records = payload[run.bytes].reshape(run.rows, -1)
            scales = records[:, : _SCALE_BYTES * -(-run.length // _BLOCK)].copy()
            if (scales.view(np.uint16) >= _SCALE_BITS_END).any():
                return Flaw.NOT_FINITE
        return None


def _encode_rows(values: Float32s, records: Octets) -> None:
    """Write ``float32[rows, blocks, 256]`` as ``uint8[rows, blocks * 130]``."""
    rows, blocks, _ = values.shape
    scales_end = _SCALE_BYTES * blocks
    with np.errstate(invalid="ignore"):  # What is not finite gives a scale that is not finite.
        codes_of_scales = bf16_bits(largest_magnitude(values) / _CODE_MAX)
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


def _decode_rows(records: Octets, out: Float32s) -> None:
    """Read ``uint8[rows, blocks * 130]`` as ``float32[rows, blocks, 256]``."""
    rows, blocks, _ = out.shape
    scales_end = _SCALE_BYTES * blocks
    scales = floats_of_bf16(records[:, :scales_end].copy().view(np.uint16))  # [rows, blocks]
    packed = records[:, scales_end:].reshape(rows, blocks, _HALF)
    codes = np.empty((rows, blocks, 2, _HALF), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    signed = codes.view(np.int8)
    signed -= _CODE_BIAS
    np.copyto(out, signed.reshape(out.shape))
    np.multiply(out, scales[:, :, None], out=out)
