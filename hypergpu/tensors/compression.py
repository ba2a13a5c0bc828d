"""Compression schemes by the names that job files use, and error feedback.

A residual keeps what a payload leaves out. It is plain float32 in parameter units, so a job may
change its scheme and keep the residual.
"""

import numpy as np

from hypergpu.tensors.floats import Bf16, Fp32
from hypergpu.tensors.int4 import Int4
from hypergpu.tensors.int8 import Int8
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.scheme import GROUP, RECORD, Flaw, Scheme, groups
from hypergpu.tensors.topk import TOP_K, Entries, TopK

__all__ = [
    "GROUP",
    "RECORD",
    "Entries",
    "Flaw",
    "Scheme",
    "TopK",
    "encode_into_residual",
    "groups",
    "scheme_named",
]

_SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in (Fp32(), Bf16(), Int8(), Int4(), *TOP_K)
}


def scheme_named(name: str) -> Scheme:
    """The scheme of a name in `hypergpu.jobfile.spec.SCHEMES`.

    Raises:
        ValueError: There is none.
    """
    scheme = _SCHEMES.get(name)
    if scheme is None:
        raise ValueError(f"no compression scheme {name!r}: use one of {', '.join(_SCHEMES)}")
    return scheme


def encode_into_residual(
    scheme: Scheme, values: Float32s, residual: Float32s, payload: Octets
) -> None:
    """Encode ``values + decay * residual``; what the payload leaves unsaid is the new residual.

    The decay is the scheme's: 1 but for sparse ones. The difference is exact for fp32 and bf16,
    and to within one unit in the last place of the sum for the others.

    Args:
        scheme: How.
        values: ``float32[n]``, contiguous; unchanged.
        residual: ``float32[n]``, what earlier payloads left unsaid; becomes the new one.
        payload: Filled; of the size that the scheme gives.
    """
    said = np.empty(min(scheme.group, values.size), np.float32)
    decay = np.float32(scheme.residual_decay)
    with np.errstate(invalid="ignore", over="ignore"):  # The receiver refuses what is not finite.
        for here, there in groups(scheme, values.size):
            total = residual[here]
            if decay != 1:
                np.multiply(total, decay, out=total)
            np.add(values[here], total, out=total)
            scheme.encode_leaving_rest(total, payload[there], said[: total.size])
