"""Root of a Merkle tree as OpenZeppelin lays it out, so that its tools check a batch.

A node is the Keccak-256 of its two children, the smaller first. The tree is one array: node ``i``
has the children ``2i + 1`` and ``2i + 2``, and the leaves fill its end backwards, in ascending
order. Leaves are hashed twice (`leaf`), so that no inner node passes for a leaf.
"""

from collections.abc import Iterable

from hypergpu.keys.keccak import keccak
from hypergpu.statements.receipt import Receipt
from hypergpu.statements.signing import struct_hash

HASH_BYTES = 32


def leaf(receipt: Receipt) -> bytes:
    """Leaf of a receipt in the tree of its batch, the same in every domain.

    Raises:
        ValueError: A number does not fit its field.
    """
    return keccak(struct_hash(receipt))


def merkle_root(leaves: Iterable[bytes]) -> bytes:
    """Root over leaves in any order: n - 1 hashes.

    Raises:
        ValueError: There is no leaf, one comes twice, or one is not 32 bytes.
    """
    ordered = sorted(leaves)
    count = len(ordered)
    if not count:
        raise ValueError("a tree without leaves has no root")
    if any(len(each) != HASH_BYTES for each in ordered):
        raise ValueError(f"a leaf is {HASH_BYTES} bytes")
    if len(set(ordered)) < count:
        raise ValueError("a leaf comes twice: a receipt is counted once")
    nodes = [b""] * (count - 1) + ordered[::-1]
    for place in range(count - 2, -1, -1):
        one, other = nodes[2 * place + 1], nodes[2 * place + 2]
        nodes[place] = keccak(one + other if one < other else other + one)
    return nodes[0]
