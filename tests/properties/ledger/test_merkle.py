"""Trees against OpenZeppelin's own library, and what no proof may do."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.keys.keccak import keccak
from hypergpu.ledger.merkle import MerkleTree, is_proven

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "merkle.json").read_text())

hashes = st.binary(min_size=32, max_size=32)
leaf_sets = st.sets(hashes, min_size=1, max_size=70).map(list)


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["leaves"])
def test_trees_are_those_of_openzeppelins_library(vector: dict[str, Any]) -> None:
    count = vector["leaves"]
    values = [hashlib.sha256(f"{count}:{number}".encode()).digest() for number in range(count)]
    leaves = [keccak(keccak(value)) for value in values]
    tree = MerkleTree(leaves)
    assert tree.root.hex() == vector["root"]
    assert leaves[-1].hex() == vector["last_leaf"]
    assert [sibling.hex() for sibling in tree.proof(leaves[-1])] == vector["last_proof"]


@given(leaves=leaf_sets)
def test_the_order_of_the_leaves_does_not_matter(leaves: list[bytes]) -> None:
    shuffled = sorted(leaves, key=lambda leaf: leaf[::-1])
    assert MerkleTree(shuffled).root == MerkleTree(leaves).root


@given(leaves=leaf_sets, stranger=hashes)
def test_every_leaf_is_proven_and_no_other(leaves: list[bytes], stranger: bytes) -> None:
    tree = MerkleTree(leaves)
    for leaf in leaves:
        proof = tree.proof(leaf)
        assert is_proven(tree.root, leaf, proof)
        assert len(proof) <= (len(leaves) - 1).bit_length()
        assert is_proven(tree.root, stranger, proof) == (stranger == leaf)
    if stranger not in leaves:
        with pytest.raises(KeyError):
            tree.proof(stranger)


@given(leaves=st.sets(hashes, min_size=2, max_size=40).map(list), bit=st.integers(0, 255))
def test_a_proof_with_one_bit_turned_proves_nothing(leaves: list[bytes], bit: int) -> None:
    tree = MerkleTree(leaves)
    first, *rest = tree.proof(leaves[0])
    turned = (int.from_bytes(first, "big") ^ (1 << bit)).to_bytes(32, "big")
    assert not is_proven(tree.root, leaves[0], [turned, *rest])


@given(proof=st.lists(st.binary(max_size=40), max_size=80), leaf=hashes, root=hashes)
def test_proofs_from_outside_never_raise(proof: list[bytes], leaf: bytes, root: bytes) -> None:
    assert not is_proven(root, leaf, proof) or leaf == root


@pytest.mark.parametrize("leaves", [[], [bytes(31)], [bytes(32), bytes(32)]])
def test_what_makes_no_tree_is_refused(leaves: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"leaf|leaves"):
        MerkleTree(leaves)
