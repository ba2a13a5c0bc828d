"""Receipts against batches: what was recorded where, by recomputing every root, sum and digest."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from hypergpu.ids import NodeId
from hypergpu.ledger.audit.facts import BatchFact, Form, JobFact
from hypergpu.ledger.audit.finding import Finding, Kind
from hypergpu.ledger.merkle import MerkleTree
from hypergpu.ledger.packing import (
    NO_DIGEST,
    NodeTotals,
    batch_totals,
    next_digest,
    packed,
    totals_words,
)
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers, leaf
from hypergpu.ledger.typed import Receipt, struct_hash
from hypergpu.units import are, several

Number = tuple[NodeId, int]
"""A node and a sequence: names a receipt within its job."""


class Recorded(msgspec.Struct, frozen=True):
    """What was found out about a job's receipts."""

    receipts: Mapping[Number, SignedReceipt]
    """All sound ones."""
    epochs: Mapping[Number, int]
    """Where each receipt that is on the chain is settled, known to us or not."""
    newer: frozenset[Number]
    """Those on the chain that were recorded after the last ones given were read."""
    unread: int
    """Batches that hold such a one: their roots and sums are not checked."""
    findings: tuple[Finding, ...]


def recorded(
    fact: JobFact,
    receipts: Iterable[SignedReceipt],
    signers: Signers,
    *,
    newer_from: int | None = None,
) -> Recorded:
    """Check receipts, and every batch against them.

    Args:
        fact: What the chain says.
        receipts: That are held against it.
        signers: Of the receipts.
        newer_from: See `verify`.
    """
    held, findings = _sound(fact, receipts, signers)
    newer = _newer(fact, held, newer_from)
    epochs: dict[Number, int] = {}
    digest, unread = NO_DIGEST, 0
    for place, batch in enumerate(fact.batches):
        if batch.seq != place:
            findings.append(_batch(batch, f"number {place} is missing"))
            break
        findings += _batch_findings(batch, held, newer)
        unread += not newer.isdisjoint(_numbers(batch))
        digest = next_digest(
            digest, seq=batch.seq, epoch=batch.epoch, root=batch.root, content=batch.content
        )
        if digest != batch.digest:
            findings.append(_batch(batch, "the job's digest after it is another one"))
        _count(batch, epochs)
    if digest != fact.digest:
        text = "the job's digest on the chain is not that of the batches given"
        findings.append(Finding(Kind.BATCH, text))
    for forced in fact.forced:
        epochs[forced.node, forced.sequence] = forced.epoch
    return Recorded(held, epochs, newer, unread, tuple(findings))


def _newer(
    fact: JobFact, held: Mapping[Number, SignedReceipt], newer_from: int | None
) -> frozenset[Number]:
    """What was recorded in that block or later, behind all receipts held of its node.

    Receipts are numbered in the order in which they are made: one that lies before one that is held
    was there to be given.
    """
    if newer_from is None:
        return frozenset()
    following: dict[NodeId, int] = {}
    for node, sequence in held:
        following[node] = max(following.get(node, 0), sequence + 1)
    there = [(one.node, one.sequence) for one in fact.forced if one.block >= newer_from]
    for batch in fact.batches:
        there += _numbers(batch) if batch.block >= newer_from else ()
    return frozenset(one for one in there if one[1] >= following.get(one[0], 0))


def _sound(
    fact: JobFact, receipts: Iterable[SignedReceipt], signers: Signers
) -> tuple[dict[Number, SignedReceipt], list[Finding]]:
    check = ReceiptCheck(signers)
    held: dict[Number, SignedReceipt] = {}
    findings: list[Finding] = []
    for signed in receipts:
        receipt = signed.receipt
        number = (receipt.node, receipt.sequence)
        fault = check.fault(signed)
        if not fault and receipt.job != fact.job:
            fault = "it is of another job"
        if fault:
            what = f"receipt {receipt.sequence} of {receipt.node} is unsound: {fault}"
            findings.append(Finding(Kind.RECEIPT, what, receipt.node, receipt.epoch))
        elif number not in held:
            held[number] = signed
        elif struct_hash(held[number].receipt) != struct_hash(receipt):
            what = f"two different receipts are signed as number {receipt.sequence}"
            findings.append(Finding(Kind.EQUIVOCATION, what, receipt.node, receipt.epoch))
    return held, findings


def _numbers(batch: BatchFact) -> list[Number]:
    """The receipts that a batch names; none where it is malformed."""
    try:
        parts = batch.parts()
    except ValueError:
        return []
    return [(node, first + n) for node, first, count in parts for n in range(count)]


def _batch_findings(
    batch: BatchFact, held: Mapping[Number, SignedReceipt], newer: Set[Number]
) -> Iterator[Finding]:
    try:
        parts = batch.parts()
    except ValueError as broken:
        yield _batch(batch, str(broken))
        return
    numbers = [(node, first + n) for node, first, count in parts for n in range(count)]
    lacking = [number for number in numbers if number not in held]
    missing = sum(number not in newer for number in lacking)
    if lacking and not missing:
        return  # It can be checked by whoever has newer receipts.
    if missing:
        whole = several(len(numbers), "receipt")
        yield _batch(batch, f"{missing} of its {whole} {are(missing)} not among those given")
        return
    members = [held[number].receipt for number in numbers]
    if any(receipt.epoch > batch.epoch for receipt in members):
        yield _batch(batch, "it settles receipts of a later epoch")
    is_rooted = not members or MerkleTree(map(leaf, members)).root == batch.root
    if not is_rooted:
        yield _batch(batch, "its root is not that of the receipts")
    if batch.content != _content(batch.form, members):
        yield from _content_findings(batch, members, is_rooted=is_rooted)


def _content_findings(
    batch: BatchFact, members: Sequence[Receipt], *, is_rooted: bool
) -> Iterator[Finding]:
    """What a batch adds for whom, beside what the receipts under its root come to."""
    whose = "the receipts under its root" if is_rooted else "the receipts"
    if batch.form is Form.PACKED:
        yield _batch(batch, f"its records are not those of {whose}")
        return
    due = {one.node: one for one in _totals(members)}
    found = False
    for told in batch.totals():
        own = due.get(told.node)
        if own is not None and (own.samples, own.score) != (told.samples, told.score):
            found = True
            text = (
                f"its sums for {told.node} are {told.samples} samples and a score of {told.score},"
                f" {whose} come to {own.samples} and {own.score}"
            )
            yield Finding(Kind.BATCH, f"batch {batch.seq}: {text}", told.node, batch.epoch)
    if not found:
        yield _batch(batch, f"its sums are not those of {whose}, each node once and ascending")


def _content(form: Form, members: Sequence[Receipt]) -> bytes:
    """What the batch should have held; nothing where no batch can hold these."""
    try:
        return packed(_together(members)) if form is Form.PACKED else totals_words(_totals(members))
    except ValueError:
        return b""


def _totals(members: Sequence[Receipt]) -> tuple[NodeTotals, ...]:
    try:
        return batch_totals(_together(members))
    except ValueError:
        return ()


def _together(members: Sequence[Receipt]) -> list[Receipt]:
    """The receipts as of one epoch, whatever their own."""
    return [msgspec.structs.replace(receipt, epoch=0) for receipt in members]


def _count(batch: BatchFact, epochs: dict[Number, int]) -> None:
    """Note what a batch recorded. What was recorded before stays there."""
    try:
        parts = batch.parts()
    except ValueError:
        return
    for node, first, count in parts:
        if node not in batch.skipped:
            for sequence in range(first, first + count):
                epochs.setdefault((node, sequence), batch.epoch)


def _batch(batch: BatchFact, text: str) -> Finding:
    return Finding(Kind.BATCH, f"batch {batch.seq}: {text}", epoch=batch.epoch)
