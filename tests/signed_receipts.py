"""Receipts with real signatures, and journal records of them."""

import msgspec

from coordinator.shell.journal.ledger.records import ReceiptRecord
from hypergpu.digest import digest_of
from hypergpu.ids import JobId, Keccak
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.receipt import SignedReceipt, leaf
from hypergpu.ledger.typed import (
    Contribution,
    Domain,
    Receipt,
    job_key,
    keccak_of,
    sign,
    struct_hash,
)
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples

COORDINATOR = IdentityKey(keccak(b"a coordinator's key"))
EVALUATOR = keccak_of("agreement/1")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a test says of a contribution."""

    node: IdentityKey
    sequence: int
    epoch: int = 0
    samples: int = 320
    quality_bps: int = 9_000


def node_key(number: int) -> IdentityKey:
    """The key of a node of a test; the same each time."""
    return IdentityKey(keccak(b"the key of node %d" % number))


def receipt_record(
    job_id: JobId,
    work: Work,
    *,
    domain: Domain | None = None,
    coordinator: IdentityKey = COORDINATOR,
) -> ReceiptRecord:
    """A receipt as a coordinator keeps it."""
    separator = (domain or Domain()).separator()
    job = job_key(coordinator.node_id, job_id)
    contribution = Contribution(
        job=job,
        epoch=work.epoch,
        round=work.sequence,
        node=work.node.node_id,
        shard=digest_of(b"shard"),
        model=digest_of(b"model %d" % work.sequence),
        update=digest_of(b"update %d of %s" % (work.sequence, work.node.node_id.encode())),
        samples=Samples(work.samples),
        inner_steps=10,
        compute_ms=Milliseconds(1_000),
        update_bytes=Bytes(4_096),
        lease=work.sequence + 1,
        nonce=work.sequence + 1,
    )
    receipt = Receipt(
        job=job,
        epoch=work.epoch,
        round=work.sequence,
        node=work.node.node_id,
        sequence=work.sequence,
        contribution=Keccak(struct_hash(contribution).hex()),
        samples=Samples(work.samples),
        quality_bps=BasisPoints(work.quality_bps),
        evaluator=EVALUATOR,
    )
    signed = SignedReceipt(
        receipt=receipt,
        signature=sign(coordinator, separator, receipt),
        contribution=contribution,
        contribution_signature=sign(work.node, separator, contribution),
    )
    return ReceiptRecord(job_id, signed, leaf(receipt))
