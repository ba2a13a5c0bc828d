"""Error feedback: what a scheme could not say is kept and said later.

The residual is plain float32 in parameter units, so a job may change its scheme and keep it.
"""

import numpy as np

from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.scheme import Scheme, groups


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
