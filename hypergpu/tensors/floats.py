"""Codecs that say every value as a float."""

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.records import Codec, Flaw, groups


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
    rounded_bits = bits >> 16
    rounded_bits &= 1
    rounded_bits += 0x7FFF
    rounded_bits += bits
    rounded_bits >>= 16
    codes = rounded_bits.astype(np.uint16)
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
