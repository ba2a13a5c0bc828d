"""Checks a job's accounts from its receipts alone: whoever has them needs to trust nobody."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.account import LedgerView
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.audit.finding import Finding
from hypergpu.ledger.audit.verify import verify
from hypergpu.ledger.pay import PRICED_SCORE, score
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import Domain, Receipt
from hypergpu.units import are, several
from hypergpu.v1 import job_pb2
from hypergpu.wire.ledger import receipt_value

_SHOWN = 20


class Verification(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/verified/1"):
    """What was found."""

    job: str
    receipts: int
    nodes: int
    is_sound: bool
    faults: list[str]
    open: list[str] = []
    """What has not happened yet, by the chain."""
    batches: int | None = None
    """That the chain recorded and that were checked; None: no chain was asked."""
    newer: int = 0
    """Receipts that the chain has recorded since the file was written: it does not hold them."""
    block: int | None = None
    """Of the chain, that all of it holds for."""
    file_block: int | None = None
    """That the file is of; None: it names none that the chain has, or no chain was asked."""
    file: str = ""
    """That the receipts were read from; empty: the coordinator told them, and what it owes."""


def received(pages: Iterable[job_pb2.ListReceiptsResponse]) -> list[SignedReceipt]:
    """Receipts off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, one is malformed.
    """
    return [
        receipt_value(message, NodeId(page.node_id)) for page in pages for message in page.receipts
    ]


def verified(
    view: LedgerView,
    terms: Terms,
    receipts: Sequence[SignedReceipt],
    later: LedgerView | None = None,
) -> Verification:
    """Recompute everything that the coordinator says of a job.

    Args:
        view: What it said before it gave the receipts.
        terms: Of the job.
        receipts: All that it gave.
        later: What it said after that; None: nothing has changed since.
    """
    faults = [*receipt_faults(terms, receipts), *_account_faults(view, later or view, receipts)]
    if not terms.is_of(JobId(view.job)):
        faults.insert(0, f"the key {terms.job} is not that of {view.job} and {terms.coordinator}")
    return Verification(
        job=view.job,
        receipts=len(receipts),
        nodes=len({signed.receipt.node for signed in receipts}),
        is_sound=not faults,
        faults=faults,
    )


def audited(
    found: Verification,
    fact: JobFact,
    receipts: Sequence[SignedReceipt],
    *,
    signed_for: Domain | None = None,
    newer_from: int | None = None,
) -> Verification:
    """The same with what the chain says: every batch, score, pool and payment is made again.

    Args:
        found: From the receipts alone.
        fact: What the chain says.
        receipts: All of the job.
        signed_for: See `verify`.
        newer_from: See `verify`.
    """
    verdict = verify(fact, receipts, signed_for=signed_for, newer_from=newer_from)
    wrong = [f"chain: {finding.kind.value}: {finding.said}" for finding in verdict.wrong]
    return msgspec.structs.replace(
        found,
        is_sound=found.is_sound and not wrong,
        faults=[*found.faults, *wrong],
        open=[f"{finding.said}{_when(finding, fact.time_s)}" for finding in verdict.open],
        batches=verdict.batches,
        newer=verdict.newer,
        block=fact.block,
    )


def not_audited(found: Verification, why: str) -> Verification:
    """The same with why something was not checked."""
    return msgspec.structs.replace(found, open=[*found.open, why])


def _when(finding: Finding, now_s: int) -> str:
    """When an open thing falls due, or since when anybody may see to it."""
    if not finding.at_s:
        return ""
    if finding.at_s <= now_s:
        return f"; since {moment(finding.at_s)} anybody may have it paid"
    return f"; due at {moment(finding.at_s)}"


def _cut(lines: Sequence[str]) -> list[str]:
    """No more lines than people read, and how many there are beside them."""
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {more} more of such: see --json"] if more > 0 else [])]


def verdict_lines(found: Verification) -> list[str]:
    """What was found, in words."""
    lines = _cut(found.faults)
    if found.is_sound:
        is_paid = not found.newer and (found.batches is not None or not found.file)
        of_nodes = f"{several(found.receipts, 'receipt')} of {several(found.nodes, 'node')}"
        pay = ", and so is the pay" if is_paid else ""
        lines.append(f"{of_nodes} {are(found.receipts)} sound{pay}")
        lines += _audited_lines(found) if found.batches is not None else ()
    return [*lines, *_cut([f"not yet: {text}" for text in found.open])]


def _audited_lines(found: Verification) -> Iterator[str]:
    """What was held against the chain, and what was not."""
    batches = several(found.batches or 0, "batch", "es")
    if not found.newer:
        yield (
            f"the chain recorded them in {batches}, whose roots and sums are those of the receipts;"
            f" every score, pool and payment of it follows from them (block {found.block})"
        )
        return
    yield (
        f"audited: {batches} of which the file holds every receipt, whose roots and sums are those"
        f" of the receipts (block {found.block})"
    )
    yield (
        f"not audited: {several(found.newer, 'receipt')} that the chain has recorded since block"
        f" {found.file_block}, of which the file is, with the batches that hold them; what scores,"
        " pools and payments rest on them is as the chain says it: export the receipts again"
    )


def receipt_faults(terms: Terms, receipts: Sequence[SignedReceipt]) -> Iterable[str]:
    """What is wrong with receipts by themselves; each node's come in the order of their numbers."""
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    check = ReceiptCheck(signers)
    following: dict[NodeId, int] = {}
    leases: set[tuple[NodeId, int]] = set()
    for signed in receipts:
        receipt = signed.receipt
        name = f"receipt {receipt.sequence} of {receipt.node}"
        if receipt.job != terms.job:
            yield f"{name}: it is for another job"
        if receipt.sequence != following.get(receipt.node, 0):
            yield f"{name}: number {following.get(receipt.node, 0)} is missing or said twice"
        following[receipt.node] = receipt.sequence + 1
        lease = (receipt.node, signed.contribution.lease)
        if lease in leases:
            yield f"{name}: the work under lease {lease[1]} has a receipt already"
        leases.add(lease)
        if fault := check.fault(signed):
            yield f"{name}: {fault}"


def _account_faults(
    view: LedgerView, later: LedgerView, receipts: Sequence[SignedReceipt]
) -> Iterable[str]:
    """What the coordinator says that it owes, beside what its receipts add up to.

    A job may go on meanwhile: what was owed first is held against as many receipts as there were.
    """
    price, by_node = int(view.unit_price), _by_node(receipts)
    first, last = ({node.id: node.contributions for node in told.nodes} for told in (view, later))
    for name in first | last:
        least, most = first.get(name, 0), last.get(name, 0)
        there = len(by_node.get(name, ()))
        if not least <= there <= most:
            told = most if there > most else least
            yield f"{name}: {several(told, 'receipt')} {are(told)} told, {there} there"
    for node in view.nodes:
        own = by_node.get(node.id, [])[: node.contributions]
        total = sum(score(each.samples, each.quality_bps) for each in own)
        most = -(-price * total // PRICED_SCORE)
        epochs = len({each.epoch for each in own})
        if not most - 2 * (epochs + 1) <= int(node.earned) <= most:
            yield f"{node.id}: it earned {node.earned} by the coordinator, {most} by its receipts"
        if int(node.vouched) < int(node.earned) and view.is_over:
            yield f"{node.id}: its voucher of {node.vouched} is less than the {node.earned} earned"
    if sum(int(node.earned) for node in view.nodes) > int(view.escrow):
        yield f"more is earned than the escrow of {view.escrow}"


def _by_node(receipts: Iterable[SignedReceipt]) -> dict[NodeId, list[Receipt]]:
    """Each node's receipts, in the order of their numbers."""
    own: dict[NodeId, list[Receipt]] = {}
    for signed in receipts:
        own.setdefault(signed.receipt.node, []).append(signed.receipt)
    return own
