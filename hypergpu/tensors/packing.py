"""Small whole numbers side by side without gaps: 12-bit places and codes of 2 or 4 bits."""

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.layout import Octets

Uint16s = npt.NDArray[np.uint16]


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` numbers of ``bits`` bits need."""
    return -(-count * bits // 8)


def pack_places(places: Uint16s, out: Octets) -> None:
    """Write ``uint16[rows, count]`` below 4,096 as 12 bits each: two in three bytes."""
    rows, count = places.shape
    pairs = np.zeros((rows, -(-count // 2), 2), np.uint16)
    pairs.reshape(rows, -1)[:, :count] = places
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    packed = np.empty((*low.shape, 3), np.uint8)
    np.copyto(packed[:, :, 0], low, casting="unsafe")
    np.copyto(packed[:, :, 1], (low >> 8) | (high << 4), casting="unsafe")
    np.copyto(packed[:, :, 2], high >> 4, casting="unsafe")
    out[:] = packed.reshape(rows, -1)[:, : out.shape[1]]


def unpack_places(packed: Octets, count: int) -> Uint16s:
    """Read what `pack_places` wrote, ``uint8[rows, bytes]`` as ``uint16[rows, count]``."""
    rows = len(packed)
    triples = np.zeros((rows, -(-count // 2), 3), np.uint16)
    triples.reshape(rows, -1)[:, : packed.shape[1]] = packed
    pairs = np.empty((*triples.shape[:2], 2), np.uint16)
    middle = triples[:, :, 1]
    np.bitwise_or(triples[:, :, 0], (middle & 15) << 8, out=pairs[:, :, 0])
    np.bitwise_or(middle >> 4, triples[:, :, 2] << 4, out=pairs[:, :, 1])
    return pairs.reshape(rows, -1)[:, :count]


def pack_codes(codes: Octets, bits: int, out: Octets) -> None:
    """Write ``uint8[rows, count]`` below ``2**bits``, the first in each byte's lowest bits."""
    rows, count = codes.shape
    in_byte = 8 // bits
    padded = np.zeros((rows, out.shape[1], in_byte), np.uint8)
    padded.reshape(rows, -1)[:, :count] = codes
    np.copyto(out, padded[:, :, 0])
    for place in range(1, in_byte):
        out |= padded[:, :, place] << (bits * place)


def unpack_codes(packed: Octets, bits: int, count: int) -> Octets:
    """Read what `pack_codes` wrote, ``uint8[rows, bytes]`` as ``uint8[rows, count]``."""
    in_byte = 8 // bits
    codes = np.empty((*packed.shape, in_byte), np.uint8)
    for place in range(in_byte):
        np.right_shift(packed, bits * place, out=codes[:, :, place])
    codes &= 2**bits - 1
    return codes.reshape(len(packed), -1)[:, :count]
