"""Receipts as files, and every way in which one can be unsound."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest, JobKey, Keccak, NodeId
from hypergpu.ledger.receipt import (
    FORMAT,
    ReceiptCheck,
    ReceiptFile,
    SignedReceipt,
    Signers,
    decoded,
    encoded,
    leaf,
    order,
)
from hypergpu.ledger.typed import Contribution, Domain, Receipt, keccak_of, sign, struct_hash
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples
from tests.properties.ledger.statements import contributions, domains, receipts

COORDINATOR = IdentityKey(bytes(31) + b"\x11")
NODE = IdentityKey(bytes(31) + b"\x22")
STRANGER = IdentityKey(bytes(31) + b"\x33")
SIGNERS = Signers(coordinator=COORDINATOR.address, domain=Domain(chain_id=31337), made_in=Domain())
WORK = Contribution(
    job=JobKey("ab" * 32),
    epoch=1,
    round=12,
    node=NODE.node_id,
    shard=Digest("01" * 32),
    model=Digest("02" * 32),
    update=Digest("03" * 32),
    samples=Samples(640),
    inner_steps=20,
    compute_ms=Milliseconds(800),
    update_bytes=Bytes(4096),
    lease=7,
    nonce=3,
)
RECEIPT = Receipt(
    job=WORK.job,
    epoch=1,
    round=12,
    node=NODE.node_id,
    sequence=0,
    contribution=Keccak(struct_hash(WORK).hex()),
    samples=Samples(640),
    quality_bps=BasisPoints(9_000),
    evaluator=keccak_of("agreement/1"),
)


def signed(
    receipt: Receipt = RECEIPT,
    contribution: Contribution = WORK,
    coordinator: IdentityKey = COORDINATOR,
    node: IdentityKey = NODE,
) -> SignedReceipt:
    return SignedReceipt(
        receipt=receipt,
        signature=sign(coordinator, SIGNERS.domain.separator(), receipt),
        contribution=contribution,
        contribution_signature=sign(node, SIGNERS.made_in.separator(), contribution),
    )


def fault(signed: SignedReceipt, signers: Signers = SIGNERS) -> str:
    return ReceiptCheck(signers).fault(signed)


def test_a_sound_receipt_has_no_fault() -> None:
    assert fault(signed()) == ""


def for_other_work(contribution: Contribution) -> SignedReceipt:
    named = replace(RECEIPT, contribution=Keccak(struct_hash(contribution).hex()))
    return signed(named, contribution)


@pytest.mark.parametrize(
    ("unsound", "why"),
    [
        (signed(contribution=replace(WORK, update=Digest("04" * 32))), "another contribution"),
        (for_other_work(replace(WORK, round=11)), "job, epoch, round or node"),
        (for_other_work(replace(WORK, job=JobKey("cd" * 32))), "job, epoch, round or node"),
        (for_other_work(replace(WORK, node=STRANGER.node_id)), "job, epoch, round or node"),
        (signed(replace(RECEIPT, samples=Samples(641))), "641 samples were checked, 640 assigned"),
        (signed(replace(RECEIPT, quality_bps=BasisPoints(10_001))), "quality is 10001"),
        (signed(coordinator=STRANGER), "coordinator .* did not sign it"),
        (signed(node=STRANGER), "node .* did not sign its contribution"),
        (replace(signed(), signature=b""), "did not sign it"),
        (replace(signed(), contribution=replace(WORK, nonce=2**64)), "cannot be encoded"),
    ],
)
def test_an_unsound_receipt_is_told_apart(unsound: SignedReceipt, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        assert fault(unsound) == "", fault(unsound)


@given(other=domains)
def test_a_receipt_for_another_chain_or_contract_is_unsound(other: Domain) -> None:
    if other == SIGNERS.domain:
        return
    assert "did not sign it" in fault(signed(), replace(SIGNERS, domain=other))
    assert other == SIGNERS.made_in or fault(signed(), replace(SIGNERS, made_in=other)) != ""


octets = st.binary(max_size=65)
signed_receipts = st.builds(
    SignedReceipt,
    receipt=receipts,
    signature=octets,
    contribution=contributions,
    contribution_signature=octets,
)
files = st.lists(signed_receipts, max_size=5).map(tuple)


@given(items=files, domain=domains)
def test_a_file_is_read_back_whatever_the_order_it_was_written_in(
    items: tuple[SignedReceipt, ...], domain: Domain
) -> None:
    signers = replace(SIGNERS, domain=domain)
    content = encoded(ReceiptFile(signers, items))
    assert sorted(decoded(content, source="f").receipts, key=repr) == sorted(items, key=repr)
    assert decoded(content, source="f").signers == signers
    if len({order(item) for item in items}) == len(items):
        assert encoded(ReceiptFile(signers, items[::-1])) == content


def other_format(content: bytes) -> bytes:
    return content.replace(FORMAT.encode(), b"hypergpu-receipts/9")


def reordered(content: bytes) -> bytes:
    head, first, second = content.splitlines()
    return b"\n".join((head, second, first, b""))


def spaced(content: bytes) -> bytes:
    return content.replace(b'"epoch":', b'"epoch": ')


DAMAGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda _: b"", "line 1: it is no header"),
    (lambda content: content.replace(b'"format":"', b'"format":"\xff'), "line 1: it is no head"),
    (
        lambda content: content.replace(b'"receipt":{"job":"', b'"receipt":{"job":"\xff'),
        "no receipt",
    ),
    (lambda content: content[:-9], "line 3: it is no receipt"),
    (lambda content: content[: content.index(b"\n") + 1], "2 receipts are announced, 0 there"),
    (lambda content: content.replace(b'"samples":640', b'"samples":"640"'), "line 2: it is no rec"),
    (
        lambda content: content.replace(b'"epoch":', b'"extra":1,"epoch":'),
        "not in their order or encoding",
    ),
    (
        lambda content: content.replace(b"\n{", b'\n{"x":' + b"[" * 3000, 1),
        "line 2: it is no receipt",
    ),
    (lambda content: content.replace(b"\n{", b"\n" + b" " * 5000 + b"{", 1), "line 2: it has 6"),
    (other_format, "its format is 'hypergpu-receipts/9'"),
    (reordered, "not in their order or encoding"),
    (spaced, "not in their order or encoding"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_a_damaged_file_is_refused_with_its_line(
    damage: Callable[[bytes], bytes], why: str
) -> None:
    two = (signed(), signed(replace(RECEIPT, sequence=1)))
    content = encoded(ReceiptFile(SIGNERS, two))
    assert decoded(content, source="f").receipts == two
    with pytest.raises(HyperGPUError, match=why):
        decoded(damage(content), source="f")


@given(content=st.binary(max_size=200))
def test_bytes_from_outside_are_refused_and_nothing_else(content: bytes) -> None:
    with pytest.raises(HyperGPUError, match="FILE_UNUSABLE"):
        decoded(content, source="f")


@given(first=receipts, second=receipts)
def test_two_receipts_never_share_a_leaf(first: Receipt, second: Receipt) -> None:
    assert (leaf(first) == leaf(second)) == (first == second)


def test_a_node_that_a_receipt_names_must_be_the_one_that_signed() -> None:
    stranger = NodeId(STRANGER.node_id)
    stolen = replace(WORK, node=stranger)
    named = replace(RECEIPT, node=stranger, contribution=Keccak(struct_hash(stolen).hex()))
    assert "did not sign its contribution" in fault(signed(named, stolen))
