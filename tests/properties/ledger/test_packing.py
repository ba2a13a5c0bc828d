"""Batches as bytes: nothing is lost, nothing is added, and what has no bytes is refused."""

import pytest
from eth_abi.abi import encode
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.ids import JobKey, Keccak, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.ledger import packing
from hypergpu.ledger.typed import Receipt, keccak_of
from hypergpu.units import BasisPoints, Samples
from tests.properties.ledger.statements import addresses, u32, words

EMPTY = Receipt(
    job=JobKey("ab" * 32),
    epoch=3,
    round=0,
    node=NodeId("0x" + "00" * 20),
    sequence=0,
    contribution=Keccak("00" * 32),
    samples=Samples(0),
    quality_bps=BasisPoints(0),
    evaluator=keccak_of("quality/1 agreement"),
)


@st.composite
def batches(draw: st.DrawFn) -> list[Receipt]:
    nodes = draw(st.lists(addresses.map(NodeId), min_size=1, max_size=5, unique=True))
    receipts: list[Receipt] = []
    for node in nodes:
        first = draw(st.integers(0, 2**40))
        receipts += [
            replace(
                EMPTY,
                node=node,
                sequence=first + offset,
                round=draw(u32),
                samples=Samples(draw(u32)),
                quality_bps=BasisPoints(draw(st.integers(0, 10_000))),
                contribution=Keccak(draw(words)),
            )
            for offset in range(draw(st.integers(1, 6)))
        ]
    return draw(st.permutations(receipts))


@given(receipts=batches())
def test_packed_bytes_hold_every_receipt_once(receipts: list[Receipt]) -> None:
    content = packing.packed(receipts)
    held = [
        (run.node, run.first_sequence + place, record)
        for run in packing.unpacked(content)
        for place, record in enumerate(run.records)
    ]
    assert held == sorted(held, key=lambda one: one[:2])
    expected = {
        (one.node, one.sequence): packing.PackedRecord(
            one.round, one.samples, one.quality_bps, one.contribution[:12]
        )
        for one in receipts
    }
    assert {(node, sequence): record for node, sequence, record in held} == expected
    assert len(held) == len(receipts)
    assert packing.packed(receipts[::-1]) == content


@given(receipts=batches())
def test_sums_and_packed_receipts_say_the_same(receipts: list[Receipt]) -> None:
    totals = packing.batch_totals(receipts)
    runs = packing.unpacked(packing.packed(receipts))
    assert [(one.node, one.first_sequence, one.receipts) for one in totals] == [
        (run.node, run.first_sequence, len(run.records)) for run in runs
    ]
    assert [(one.samples, one.score) for one in totals] == [
        (
            sum(record.samples for record in run.records),
            sum(record.samples * record.quality_bps for record in run.records),
        )
        for run in runs
    ]


@given(receipts=batches())
def test_words_are_those_of_the_abi(receipts: list[Receipt]) -> None:
    totals = packing.batch_totals(receipts)
    rows = [(one.node, one.first_sequence, one.receipts, one.samples, one.score) for one in totals]
    encoded = encode(["(address,uint48,uint32,uint64,uint80)[]"], [rows])
    assert encoded[64:] == packing.totals_words(totals)


@given(digest=st.binary(min_size=32, max_size=32), seq=u32, epoch=u32, content=st.binary())
def test_a_jobs_digest_is_that_of_the_abi(
    digest: bytes, seq: int, epoch: int, content: bytes
) -> None:
    root = keccak(content)
    expected = keccak(
        encode(
            ["bytes32", "uint32", "uint32", "bytes32", "bytes32"],
            [digest, seq, epoch, root, keccak(content)],
        )
    )
    found = packing.next_digest(digest, seq=seq, epoch=epoch, root=root, content=content)
    assert found == expected


def test_a_long_run_gets_several_heads() -> None:
    receipts = [replace(EMPTY, sequence=number) for number in range(packing.RUN_RECEIPTS_MAX + 2)]
    runs = packing.unpacked(packing.packed(receipts))
    assert [(run.first_sequence, len(run.records)) for run in runs] == [(0, 65_535), (65_535, 2)]


@pytest.mark.parametrize(
    ("receipts", "why"),
    [
        ([EMPTY, EMPTY], "not dense"),
        ([EMPTY, replace(EMPTY, sequence=2)], "not dense"),
        ([EMPTY, replace(EMPTY, sequence=1, epoch=4)], "one job and epoch"),
        ([replace(EMPTY, samples=Samples(2**32))], "does not fit"),
        ([replace(EMPTY, sequence=2**48)], "does not fit"),
    ],
)
def test_what_is_no_batch_is_refused(receipts: list[Receipt], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        packing.packed(receipts)


@pytest.mark.parametrize("score", [-1, 2**80])
def test_sums_that_do_not_fit_are_refused(score: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        packing.totals_words([packing.NodeTotals(EMPTY.node, 0, 1, Samples(1), score)])


@given(content=st.binary(min_size=1, max_size=27))
def test_bytes_that_end_within_a_head_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="end within a run"):
        packing.unpacked(content)


@pytest.mark.parametrize(
    "content", [bytes(28), bytes(27) + b"\x01", bytes(27) + b"\x02" + bytes(16)]
)
def test_runs_that_hold_less_than_they_say_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="holds"):
        packing.unpacked(content)
