"""Calls that are packed by hand say what the generic encoder says."""

import pytest
from eth_abi.abi import encode
from hypothesis import given, settings
from hypothesis import strategies as st

from hypergpu.chain.ledger import Batch, LedgerCalls, NodeTotals, PackedReceipt
from hypergpu.ids import JobKey, NodeId
from hypergpu.keys.keccak import keccak

CALLS = LedgerCalls()
U32 = st.integers(0, 2**32 - 1)
NODES = st.binary(min_size=20, max_size=20).map(lambda node: NodeId("0x" + node.hex()))
BATCHES = st.builds(
    Batch,
    job=st.binary(min_size=32, max_size=32).map(lambda job: JobKey(job.hex())),
    epoch=U32,
    sequence=U32,
    root=st.binary(min_size=32, max_size=32),
)
TOTALS = st.builds(
    NodeTotals,
    node=NODES,
    first=st.integers(0, 2**48 - 1),
    receipts=U32,
    samples=st.integers(0, 2**64 - 1),
    score=st.integers(0, 2**80 - 1),
)
RECEIPTS = st.builds(
    PackedReceipt,
    round=U32,
    samples=U32,
    quality_bps=st.integers(0, 2**16 - 1),
    contribution=st.binary(min_size=32, max_size=32),
)
PARTS = st.tuples(NODES, st.integers(0, 2**48 - 1), st.lists(RECEIPTS, max_size=3))


def header(batch: Batch) -> tuple[bytes, int, int, bytes]:
    return bytes.fromhex(batch.job), batch.epoch, batch.sequence, batch.root


@settings(max_examples=50)
@given(BATCHES, st.lists(TOTALS, max_size=4))
def test_sums_are_packed_as_the_abi_has_them(batch: Batch, totals: list[NodeTotals]) -> None:
    rows = "(address,uint48,uint32,uint64,uint80)[]"
    types = ["bytes32", "uint32", "uint32", "bytes32", rows]
    words = encode(types, [*header(batch), totals])
    selector = keccak(f"submitAggregate({','.join(types)})".encode())[:4]
    assert CALLS.record(batch, totals).call == selector + words


@settings(max_examples=50)
@given(BATCHES, st.lists(PARTS, max_size=3))
def test_packed_receipts_are_bytes_as_the_abi_has_them(
    batch: Batch, parts: list[tuple[NodeId, int, list[PackedReceipt]]]
) -> None:
    call = CALLS.record_packed(batch, parts).call
    content = b"".join(
        bytes.fromhex(node[2:])
        + first.to_bytes(6, "big")
        + len(receipts).to_bytes(2, "big")
        + b"".join(
            each.round.to_bytes(4, "big")
            + each.samples.to_bytes(4, "big")
            + each.quality_bps.to_bytes(2, "big")
            + each.contribution[:6]
            for each in receipts
        )
        for node, first, receipts in parts
    )
    expected = CALLS.abi.call("submitContributions", *header(batch), content)
    assert call == expected


def test_a_number_that_does_not_fit_has_no_call() -> None:
    batch = Batch(JobKey("00" * 32), 2**32, 0, bytes(32))
    with pytest.raises(ValueError, match="does not fit its field"):
        CALLS.record(batch, [])
    with pytest.raises(ValueError, match="does not fit its field"):
        CALLS.record_packed(batch, [])
    totals = NodeTotals(NodeId("0x" + "00" * 20), 0, 0, 0, 2**80)
    with pytest.raises(ValueError, match="does not fit its field"):
        CALLS.record(batch._replace(epoch=0), [totals])
