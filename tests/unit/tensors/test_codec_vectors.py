"""The bytes of each scheme, fixed: node and coordinator of any two releases agree on them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from hypergpu.jobfile.spec import SCHEMES
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, TensorKind, TensorSpec, layout_of

VECTORS = Path(__file__).parents[2] / "vectors" / "updates.json"
LAYOUT = layout_of(
    (
        TensorSpec("weight", (300, 317)),
        TensorSpec("bias", (317,)),
        TensorSpec("mean", (3,), TensorKind.STATISTIC),
        TensorSpec("steps", (), TensorKind.INTEGER),
    )
)


def dyadic_values(count: int) -> Flat:
    """Values from raw bits alone, so that no library's mathematics is part of the vector."""
    bits = np.random.Philox(key=7).random_raw(count)
    mantissas = (bits & 0xFFFFFF).astype(np.float32) - np.float32(2**23)
    exponents = -((bits >> 24) % 40).astype(np.int32)
    values = np.ldexp(mantissas, exponents)
    return Flat(values, np.array([0.5, -2.0, 3.0], np.float32), np.array([41], np.int64))


def test_the_layout_s_digest_is_the_recorded_one() -> None:
    recorded = msgspec.json.decode(VECTORS.read_bytes(), type=dict[str, str])
    assert LAYOUT.digest == recorded["layout"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_update_s_bytes_are_the_recorded_ones(scheme: str) -> None:
    recorded = msgspec.json.decode(VECTORS.read_bytes(), type=dict[str, str])
    encoded = encode_update(LAYOUT, scheme, dyadic_values(LAYOUT.parameters_count))
    assert blake3(encoded.payload.data).hexdigest() == recorded[scheme]
    assert blake3(encoded.residual.view(np.uint8).data).hexdigest() == recorded[f"{scheme} left"]
