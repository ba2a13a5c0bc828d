"""Files and roots of receipts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.errors import HyperGPUError
from hypergpu.keys.keccak import keccak
from hypergpu.statements.receipt import Receipt
from hypergpu.statements.signing import struct_hash
from hypergpu.units import Wei
from payments.core.merkle import leaf, merkle_root
from payments.core.receipt_file import ReceiptFile, decode_file, encode_file
from tests.properties.statements.strategies import (
    JOB,
    TERMS,
    Work,
    node_key,
    receipts,
    signed_receipt,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "merkle.json").read_text())
SIGNED = tuple(
    signed_receipt(node_key(node), Work(round=number), sequence=number, before=number * 2_880_000)
    for node in range(3)
    for number in range(4)
)
FILE = ReceiptFile(JOB, TERMS, Wei(7), SIGNED)
LINES = encode_file(FILE).splitlines(keepends=True)


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["leaves"])
def test_roots_are_those_of_openzeppelins_library(vector: dict[str, Any]) -> None:
    count = vector["leaves"]
    values = [hashlib.sha256(f"{count}:{number}".encode()).digest() for number in range(count)]
    leaves = [keccak(keccak(value)) for value in values]
    assert merkle_root(leaves).hex() == vector["root"]
    assert merkle_root(reversed(leaves)).hex() == vector["root"]


@pytest.mark.parametrize("leaves", [[], [bytes(31)], [bytes(32), bytes(32)]])
def test_leaves_that_make_no_tree_are_refused(leaves: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"leaf|leaves"):
        merkle_root(leaves)


@given(receipt=receipts)
def test_a_leaf_is_hashed_twice(receipt: Receipt) -> None:
    assert leaf(receipt) == keccak(struct_hash(receipt)) == keccak(keccak(receipt.encode_data()))


@given(order=st.permutations(SIGNED))
def test_the_same_receipts_give_the_same_file(order: list[Any]) -> None:
    content = encode_file(ReceiptFile(JOB, TERMS, Wei(7), tuple(order)))
    assert content == b"".join(LINES)
    assert decode_file(content, source="file").receipts == SIGNED_IN_ORDER


SIGNED_IN_ORDER = decode_file(b"".join(LINES), source="file").receipts


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1: no header"),
        (b"[" * 100_000, "line 1: no header"),
        (b"".join(LINES).replace(b"receipts/2", b"receipts/1"), "format 'hypergpu-receipts/1'"),
        (b"".join(LINES).replace(JOB.encode(), b"job-000000000000"), "not those of"),
        (b"".join(LINES[:-1]), "12 receipts announced, 11 present"),
        (b"".join([LINES[0], *LINES[2:], LINES[1]]), "another order"),
        (b"".join([*LINES[:-1], b"{}\n"]), "line 13: no receipt"),
        (b"".join([*LINES[:-1], b"x" * 5_000]), "line 13: 5000 bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(content: bytes, said: str) -> None:
    with pytest.raises(HyperGPUError, match=said):
        decode_file(content, source="file")
