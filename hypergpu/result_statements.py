"""The contribution that a node signs with the result of packed work, or for a count of what it
gave: both ends make it alike.
"""

from typing import NamedTuple

from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import Digest, NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.packed_work import PackedWork, WorkAmount
from hypergpu.statements import Contribution
from hypergpu.units import Bytes, Milliseconds, Samples

NO_MODEL = Digest("0" * 64)
"""Packed work begins from no model: all that its result depends on is named in the work."""


def work_digest(work: PackedWork) -> Digest:
    """Name of the work that was assigned, as a contribution has it for its shard."""
    return digest_of(work.body)


def result_contribution(
    terms: Terms, lease: Lease, node: NodeId, work: Digest, blob: BlobRef, amount: WorkAmount
) -> Contribution:
    """The statement of one result.

    Its round is the number of the lease, which a job never gives twice, so that one result has one
    contribution and needs no nonce. Its epoch is 0: results are accepted in another order than
    they come, and a ledger records totals in whichever epoch is open.

    Args:
        terms: The job's; its key says the unit.
        lease: The node's.
        node: Who did the work.
        work: `work_digest` of the assignment.
        blob: The result's blob.
        amount: Units of the result, above 0, and the node's own measurement of its time.
    """
    return Contribution(
        job=terms.job,
        epoch=0,
        round=lease.number,
        node=node,
        shard=work,
        model=NO_MODEL,
        update=blob.digest,
        samples=Samples(amount.units),
        inner_steps=0,
        compute_ms=amount.compute_ms,
        update_bytes=Bytes(blob.size_bytes),
        lease=lease.number,
        nonce=0,
    )


class CountStatement(NamedTuple):
    """A count of the tokens that a node gave under a lease."""

    lease: Lease
    """Its round is the number of the count, which a job never gives twice."""
    units: int
    """Above 0."""
    answers: Digest
    """End of the chain of digests of what was counted: `hypergpu.token_counts`."""


def count_contribution(terms: Terms, node: NodeId, count: CountStatement) -> Contribution:
    """The statement of one count. It names no blob: what was counted is kept nowhere.

    Raises:
        ValueError: A number does not fit its field, once it is encoded.
    """
    return Contribution(
        job=terms.job,
        epoch=0,
        round=count.lease.round,
        node=node,
        shard=NO_MODEL,
        model=NO_MODEL,
        update=count.answers,
        samples=Samples(count.units),
        inner_steps=0,
        compute_ms=Milliseconds(0),
        update_bytes=Bytes(0),
        lease=count.lease.number,
        nonce=0,
    )
