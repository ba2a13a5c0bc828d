"""Puts receipts that wait into batches, and batches into calls of the ledger."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from coordinator.core.settlement.epoch import Epoch
from coordinator.core.settlement.sealing import Metering
from coordinator.shell.journal.ledger.records import (
    AccountName,
    BatchRecord,
    EpochRecord,
    Span,
    UnsealedReceipt,
)
from hypergpu.chain.gas import NODES_MAX
from hypergpu.chain.ledger import Batch, ContractCall, LedgerCalls, NodeTotals, PackedReceipt
from hypergpu.ids import JobId, JobKey, NodeId
from hypergpu.ledger.merkle import MerkleTree
from hypergpu.ledger.pay import score
from hypergpu.units import BasisPoints, Samples


class Group(NamedTuple):
    """Receipts of one job that are settled in one epoch, by node and sequence."""

    epoch: Epoch
    is_left: bool
    receipts: tuple[UnsealedReceipt, ...]


def groups(unsealed: Sequence[UnsealedReceipt], epochs: Sequence[EpochRecord]) -> tuple[Group, ...]:
    """Sort what waits of one job by the epoch that it is settled in, earliest first.

    A receipt whose own epoch is closed goes into the next that is not, once the job has begun that,
    and into one behind the last where the job is over. None goes into an earlier epoch than one
    before it of its node: a round that a slow evaluator measured late has receipts with numbers
    behind those of later rounds, which may be of later epochs.

    Args:
        unsealed: Of one job, a node's in order.
        epochs: Every epoch of the job, final ones too.
    """
    known = {record.epoch.number: record for record in epochs}
    ended = [number for number, record in known.items() if record.epoch.is_ended]
    first_open = max(ended, default=-1) + 1
    reached: dict[NodeId, int] = {}
    sorted_in: dict[int, list[UnsealedReceipt]] = {}
    for receipt in unsealed:
        number = max(receipt.epoch, reached.get(receipt.node, first_open))
        reached[receipt.node] = number
        sorted_in.setdefault(number, []).append(receipt)
    is_over = any(record.is_last for record in epochs)
    found = []
    for number, receipts in sorted(sorted_in.items()):
        if record := known.get(number):
            found.append(Group(record.epoch, record.is_left, tuple(receipts)))
        elif is_over:
            behind = Epoch(job_id=receipts[0].job_id, number=number)
            found.append(Group(behind, is_left=True, receipts=tuple(receipts)))
    return tuple(found)


def parted(
    receipts: Sequence[UnsealedReceipt], metering: Metering, receipts_max: int
) -> Iterator[tuple[UnsealedReceipt, ...]]:
    """Cut a group into batches, a node's receipts in order."""
    most = 1 if metering is Metering.EACH else receipts_max
    part: list[UnsealedReceipt] = []
    nodes: set[NodeId] = set()
    for receipt in receipts:
        is_new = receipt.node not in nodes
        if len(part) >= most or (is_new and len(nodes) >= NODES_MAX):
            yield tuple(part)
            part, nodes = [], set()
        part.append(receipt)
        nodes.add(receipt.node)
    if part:
        yield tuple(part)


def spans(receipts: Sequence[UnsealedReceipt]) -> tuple[Span, ...]:
    """What a batch adds for each node, by node.

    Raises:
        ValueError: a node's receipts do not follow on each other.
    """
    found = []
    for node, of_node in groupby(receipts, key=lambda one: one.node):
        each = list(of_node)
        if any(later.sequence != one.sequence + 1 for one, later in pairwise(each)):
            raise ValueError(f"receipts of {node} do not follow on each other")
        weights = [score(Samples(one.samples), BasisPoints(one.quality_bps)) for one in each]
        samples = sum(one.samples for one in each)
        found.append(Span(node, each[0].sequence, len(each), samples, sum(weights)))
    return tuple(found)


def batch_record(
    account: AccountName, epoch: Epoch, receipts: Sequence[UnsealedReceipt], sequence: int
) -> BatchRecord:
    """What is kept of a batch. Its nonce is not known yet."""
    return BatchRecord(
        account=account,
        nonce=-1,
        job_id=epoch.job_id,
        epoch=epoch.number,
        sequence=sequence,
        root=MerkleTree(one.leaf for one in receipts).root,
        spans=spans(receipts),
    )


def batch_call(
    ledger: LedgerCalls,
    job: JobKey,
    batch: BatchRecord,
    receipts: Sequence[UnsealedReceipt],
    metering: Metering,
) -> ContractCall:
    """The call that records a batch."""
    header = Batch(job, batch.epoch, batch.sequence or 0, batch.root)
    if metering is Metering.BATCHED:
        return ledger.record(header, [_totals(span) for span in batch.spans])
    packed = []
    for node, of_node in groupby(receipts, key=lambda one: one.node):
        each = list(of_node)
        rows = [PackedReceipt(r.round, r.samples, r.quality_bps, r.contribution) for r in each]
        packed.append((node, each[0].sequence, rows))
    return ledger.record_packed(header, packed)


def by_job(unsealed: Sequence[UnsealedReceipt]) -> Iterator[tuple[JobId, list[UnsealedReceipt]]]:
    """What waits, job by job."""
    for job_id, receipts in groupby(unsealed, key=lambda one: one.job_id):
        yield job_id, list(receipts)


def _totals(span: Span) -> NodeTotals:
    return NodeTotals(span.node, span.first, span.receipts, span.samples, span.score)
