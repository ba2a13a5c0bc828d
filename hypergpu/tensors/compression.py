"""Compression schemes by the names that job files use."""

from hypergpu.tensors.bf16 import Bf16
from hypergpu.tensors.feedback import encode_into_residual
from hypergpu.tensors.fp32 import Fp32
from hypergpu.tensors.int4 import Int4
from hypergpu.tensors.int8 import Int8
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
