"""Blobs: bytes that are named by their digest."""

import msgspec

from hypergpu.ids import Digest
from hypergpu.units import Bytes


class BlobRef(msgspec.Struct, frozen=True):
    """A blob by name; it can be fetched by digest."""

    digest: Digest
    size_bytes: Bytes
