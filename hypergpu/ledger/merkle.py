"""Merkle trees as OpenZeppelin lays them out, so that contracts and its tools check our proofs.

A node is the Keccak-256 of its two children, the smaller first, so a proof needs no left and right.
Leaves are hashed twice by whoever makes them (see `hypergpu.ledger.receipt.leaf`): no inner node
can then be passed off as a leaf. The tree is one array; node ``i`` has the children ``2i + 1`` and
``2i + 2``, and the leaves fill its end backwards, in ascending order.
"""

from collections.abc import Iterable, Sequence

from hypergpu.keys.keccak import keccak

HASH_BYTES = 32
PROOF_LENGTH_MAX = 64


class MerkleTree:
    """A tree over some leaves, built at once: 2n hashes."""

    __slots__ = ("_nodes", "_places")

    def __init__(self, leaves: Iterable[bytes]) -> None:
        """Sort the leaves and hash them together.

        Raises:
            ValueError: there is none, one comes twice, or one is not 32 bytes.
        """
        ordered = sorted(leaves)
        count = len(ordered)
        if not count:
            raise ValueError("a tree without leaves has no root")
        if any(len(leaf) != HASH_BYTES for leaf in ordered):
            raise ValueError(f"a leaf is {HASH_BYTES} bytes")
        nodes = [b""] * (count - 1) + ordered[::-1]
        for place in range(count - 2, -1, -1):
            nodes[place] = _joined(nodes[2 * place + 1], nodes[2 * place + 2])
        self._nodes = nodes
        self._places = {nodes[place]: place for place in range(count - 1, 2 * count - 1)}
        if len(self._places) < count:
            raise ValueError("a leaf comes twice: a statement is counted once")

    @property
    def root(self) -> bytes:
        """32 bytes that all leaves went into."""
        return self._nodes[0]

    def proof(self, leaf: bytes) -> tuple[bytes, ...]:
        """What a leaf is joined with on its way up to the root.

        Raises:
            KeyError: it is not in the tree.
        """
        place = self._places[leaf]
        siblings = []
        while place:
            siblings.append(self._nodes[place + 1 if place % 2 else place - 1])
            place = (place - 1) // 2
        return tuple(siblings)


def is_proven(root: bytes, leaf: bytes, proof: Sequence[bytes]) -> bool:
    """Whether ``proof`` leads from the leaf to the root. Proofs come from outside."""
    if len(proof) > PROOF_LENGTH_MAX or any(len(sibling) != HASH_BYTES for sibling in proof):
        return False
    for sibling in proof:
        leaf = _joined(leaf, sibling)
    return leaf == root


def _joined(one: bytes, other: bytes) -> bytes:
    return keccak(one + other if one < other else other + one)
