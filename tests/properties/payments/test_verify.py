"""Sound pay has no fault, every way to cheat on it is found; files and roots of receipts."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.crypto import keccak, sign, struct_hash
from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId
from hypergpu.statements import Receipt, SignedReceipt
from hypergpu.units import Wei
from payments.core.settlement import leaf, merkle_root
from payments.core.transactions import AccountView, ShareState, ShareView, TotalsEntry
from payments.core.verify import (
    BatchRecord,
    LedgerRecords,
    ReceiptFile,
    SingleRecord,
    Verification,
    decode_file,
    encode_file,
    verify,
)
from tests.properties.payments.paying_jobs import PRICE, WINDOW_S, LedgerModel
from tests.properties.statements import (
    COORDINATOR,
    JOB,
    TERMS,
    Work,
    node_key,
    receipts,
    signed_receipt,
)

SAMPLES, QUALITY = 320, 9_000
SCORE = SAMPLES * QUALITY
KEYS = [node_key(0), node_key(1)]
ONE, OTHER = (key.node_id for key in KEYS)


def receipts_of(count: int) -> tuple[SignedReceipt, ...]:
    """Receipts of both nodes for so many rounds, three rounds an epoch."""
    return tuple(
        signed_receipt(
            key, Work(number, number // 3, SAMPLES, QUALITY), sequence=number, before=number * SCORE
        )
        for key in KEYS
        for number in range(count)
    )


FILE = ReceiptFile(JOB, TERMS, Wei(PRICE), receipts_of(6))


def ledger_records(*, escrow: int = 10**12, is_paid: bool = True) -> LedgerRecords:
    """Two epochs in a batch each, closed, and paid after their window."""
    model = LedgerModel(PRICE, tokens=0)
    model.is_open, model.free = True, escrow
    batches = []
    for epoch in range(2):
        count = 3 * (epoch + 1)
        entries = tuple(TotalsEntry(node, count, count * SCORE) for node in (ONE, OTHER))
        root = merkle_root(
            leaf(each.receipt) for each in FILE.receipts if each.receipt.epoch == epoch
        )
        batches.append(BatchRecord(epoch, epoch, root, entries))
        for entry in entries:
            model.record(entry, epoch)
        model.distribute(epoch, ())
    model.now_s += WINDOW_S
    if is_paid:
        model.distribute(0, (ONE, OTHER))
        model.distribute(1, (ONE, OTHER))
    return LedgerRecords(7, model.view(), batches)


def with_account(records: LedgerRecords, node: NodeId, **changes: int) -> LedgerRecords:
    accounts = dict(records.view.accounts)
    accounts[node] = accounts[node]._replace(**changes)  # type: ignore[arg-type]
    return records._replace(view=records.view._replace(accounts=accounts))


def only(found: Verification, faults: tuple[str, ...], open_: tuple[str, ...] = ()) -> None:
    for texts, parts in ((found.faults, faults), (found.open, open_)):
        assert len(texts) == len(parts), texts
        for text, part in zip(texts, parts, strict=True):
            assert part in text


def test_paid_receipts_have_no_fault_and_nothing_open() -> None:
    verification = verify(FILE, ledger_records())
    only(verification, ())
    one = verification.nodes[0] if verification.nodes[0].node == ONE else verification.nodes[1]
    assert (one.receipts, one.total_score, one.recorded_score) == (6, 6 * SCORE, 6 * SCORE)
    assert one.worth == one.allotted == one.paid == PRICE * 6 * SCORE // 1_000_000
    assert verification.block == 7


def test_receipts_alone_are_checked_without_a_chain() -> None:
    verification = verify(FILE)
    only(verification, ())
    assert verification.block is None
    assert [node.worth for node in verification.nodes] == [PRICE * 6 * SCORE // 1_000_000] * 2


def signed_with(signed: SignedReceipt, **changes: object) -> SignedReceipt:
    """The same receipt with changes that the coordinator signs."""
    receipt: Receipt = replace(signed.receipt, **changes)
    return replace(
        signed, receipt=receipt, signature=sign(COORDINATOR, TERMS.domain.separator(), receipt)
    )


FIRST = FILE.receipts[0]
UNSOUND: list[tuple[str, Callable[[], tuple[SignedReceipt, ...]], str]] = [
    (
        "forged evaluator",
        lambda: (replace(FIRST, receipt=replace(FIRST.receipt, evaluator="ab" * 32)),),
        "did not sign it",
    ),
    (
        "higher total",
        lambda: (signed_with(FIRST, total_score=SCORE + 1),),
        "the receipts give",
    ),
    ("another job", lambda: (signed_with(FIRST, job="ab" * 32),), "another job"),
    (
        "two of one sequence",
        lambda: (FIRST, signed_receipt(KEYS[0], Work(5, 1, 1, 1))),
        "has the same sequence",
    ),
    (
        "a round twice",
        lambda: (
            FIRST,
            signed_receipt(KEYS[0], Work(0, 0, SAMPLES, QUALITY), sequence=1, before=SCORE),
        ),
        "round 0 follows 0",
    ),
]


@pytest.mark.parametrize(("_", "receipts", "said"), UNSOUND, ids=[each[0] for each in UNSOUND])
def test_unsound_receipts_are_named(
    _: str, receipts: Callable[[], tuple[SignedReceipt, ...]], said: str
) -> None:
    only(verify(replace_receipts(receipts())), (said,))


def replace_receipts(receipts: tuple[SignedReceipt, ...]) -> ReceiptFile:
    return replace(FILE, receipts=receipts)


def test_receipts_that_are_missing_are_open_and_no_fault() -> None:
    kept_receipts = tuple(each for each in FILE.receipts if each.receipt.sequence != 2)
    only(
        verify(replace_receipts(kept_receipts)), (), ("1 of its 6 receipts", "1 of its 6 receipts")
    )


SOUND = ledger_records()
BATCH = SOUND.records[1]
assert isinstance(BATCH, BatchRecord)
CHEATS: list[tuple[str, LedgerRecords, tuple[str, ...]]] = [
    (
        "more is recorded than receipts prove",
        with_account(SOUND, ONE, total_score=6 * SCORE + 1),
        (f"6 of score {6 * SCORE} are proven",),
    ),
    (
        "more is allotted than the score is worth",
        with_account(SOUND, ONE, earned=10**9),
        ("is allotted for a score that is worth", "its shares come to"),
    ),
    (
        "another price",
        SOUND._replace(view=SOUND.view._replace(unit_price=Wei(1))),
        ("unit price is 1,", "is allotted for", "is allotted for"),
    ),
    (
        "another root",
        SOUND._replace(records=[SOUND.records[0], BATCH._replace(root=bytes(32))]),
        ("batch 1 of epoch 1: its root",),
    ),
    (
        "another total in a batch",
        SOUND._replace(
            records=[
                SOUND.records[0],
                BATCH._replace(entries=(TotalsEntry(ONE, 6, 1), BATCH.entries[1])),
            ]
        ),
        (f"score 1 for 6 receipts of {ONE}",),
    ),
    (
        "a node that has no receipt",
        SOUND._replace(
            view=SOUND.view._replace(
                accounts={
                    **SOUND.view.accounts,
                    NodeId("0x" + "11" * 20): AccountView(1, 5, Wei(0)),
                }
            )
        ),
        ("0 of score 0 are proven",),
    ),
]


@pytest.mark.parametrize(("_", "records", "faults"), CHEATS, ids=[each[0] for each in CHEATS])
def test_records_that_contradict_the_receipts_are_named(
    _: str, records: LedgerRecords, faults: tuple[str, ...]
) -> None:
    verification = verify(FILE, records)
    assert len(verification.faults) == len(faults), verification.faults
    assert all(part in text for part, text in zip(faults, verification.faults, strict=True))


def test_work_that_is_not_recorded_or_not_paid_is_open() -> None:
    unpaid_verification = verify(FILE, ledger_records(is_paid=False))
    assert unpaid_verification.faults == ()
    assert all("closed, in its window or unpaid" in text for text in unpaid_verification.open)
    assert len(unpaid_verification.open) == 2
    later = receipts_of(7)
    newer = verify(replace_receipts(later), ledger_records())
    missing_amount = 7 * SCORE * PRICE // 1_000_000 - 6 * SCORE * PRICE // 1_000_000
    only(newer, (), (f"{missing_amount} of its work", f"{missing_amount} of its work"))


def test_a_short_escrow_is_open_for_the_node_that_came_last() -> None:
    verification = verify(FILE, ledger_records(escrow=2 * (6 * SCORE * PRICE // 1_000_000) - 5))
    only(verification, (), ("5 is recorded, and the escrow was short of it",))


def test_a_void_share_is_no_fault_and_is_shown() -> None:
    epochs = dict(SOUND.view.epochs)
    amount = epochs[0].shares[ONE].amount
    void = {**epochs[0].shares, ONE: ShareView(ShareState.VOID, amount)}
    epochs[0] = epochs[0]._replace(shares=void)
    verification = verify(FILE, SOUND._replace(view=SOUND.view._replace(epochs=epochs)))
    only(verification, ())
    assert {node.void for node in verification.nodes} == {0, amount}


@given(forced=st.integers(1, 5))
def test_a_forced_receipt_and_the_batch_after_it_are_no_fault(forced: int) -> None:
    entry = TotalsEntry(ONE, forced, forced * SCORE)
    for covered_count in (0, forced):
        batch = [
            each.receipt
            for each in FILE.receipts
            if each.receipt.sequence >= (covered_count if each.receipt.node == ONE else 0)
        ]
        entries = (TotalsEntry(ONE, 6, 6 * SCORE), TotalsEntry(OTHER, 6, 6 * SCORE))
        record = BatchRecord(1, 0, merkle_root(map(leaf, batch)), entries)
        verification = verify(FILE, SOUND._replace(records=[SingleRecord(0, entry), record]))
        assert verification.faults == ()


VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "merkle.json").read_text())
SIGNED = tuple(
    signed_receipt(node_key(node), Work(round=number), sequence=number, before=number * 2_880_000)
    for node in range(3)
    for number in range(4)
)
RECEIPTS_FILE = ReceiptFile(JOB, TERMS, Wei(7), SIGNED)
LINES = encode_file(RECEIPTS_FILE).splitlines(keepends=True)


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


def test_a_file_whose_terms_hold_no_address_is_refused() -> None:
    content = encode_file(FILE)
    address = TERMS.coordinator.encode()
    with pytest.raises(HyperGPUError, match="the terms are malformed: an address is 0x and 40"):
        decode_file(content.replace(address, address[:-2]), source="a file")
