"""Plain float32: 4 bytes a value, nothing lost."""

import numpy as np

from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.scheme import Flaw, Scheme


class Fp32(Scheme):
    """Little-endian float32, as in memory."""

    name = "fp32"
    is_lossless = True

    def encoded_bytes(self, count: int) -> int:
        """See `Scheme`."""
        return 4 * count

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Scheme`. The bits are the same, of what is not finite too."""
        np.copyto(out.view(np.float32), values)

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Scheme`."""
        np.copyto(out, payload.view(np.float32))

    def values(self, payload: Octets, scratch: Float32s) -> Float32s:
        """See `Scheme`."""
        return payload.view(np.float32)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Scheme`."""
        return None if np.isfinite(payload.view(np.float32)).all() else Flaw.NOT_FINITE
