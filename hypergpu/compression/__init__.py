"""Compression schemes by the names that job files use."""

from hypergpu.compression.bf16 import Bf16
from hypergpu.compression.feedback import encode_into_residual
from hypergpu.compression.fp32 import Fp32
from hypergpu.compression.int4 import Int4
from hypergpu.compression.int8 import Int8
from hypergpu.compression.scheme import GROUP, RECORD, Flaw, Scheme, groups
from hypergpu.compression.topk import TOP_K, Entries, TopK

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
    """The scheme of a name in `hypergpu.spec.SCHEMES`.

    Raises:
        ValueError: There is none.
    """
    scheme = _SCHEMES.get(name)
    if scheme is None:
        raise ValueError(f"no compression scheme {name!r}: use one of {', '.join(_SCHEMES)}")
    return scheme
