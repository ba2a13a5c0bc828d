"""Vouchers: what a node can take to the contract without asking the coordinator again.

A node keeps only the newest voucher of each job. Its amount counts from the job's start, so that a
voucher cannot be paid twice, and one that was lost costs nothing.
"""

import msgspec

from hypergpu.ids import Address, JobKey, NodeId
from hypergpu.ledger.terms import Terms, separator_of
from hypergpu.ledger.typed import Voucher, signer
from hypergpu.units import Wei, several

RECEIPTS_MOST = 2**48 - 1
"""Of a node in a job: the contract's field for how many it has counted."""


class SignedVoucher(msgspec.Struct, frozen=True):
    """A voucher with the coordinator's signature."""

    voucher: Voucher
    signature: bytes


_vouchers = msgspec.json.Decoder(SignedVoucher)


def next_amount(previous: Wei, earned: Wei, advanced: Wei) -> Wei:
    """A voucher's amount, which never falls.

    An update is advanced a part of its pay before its quality is known. Where the quality turns out
    lower than that, the voucher stands still until the node has earned the difference; a node that
    sends worthless updates is so advanced once, and never again.

    Args:
        previous: The amount of the voucher before it; 0 where there is none.
        earned: By all of the node's receipts in the job.
        advanced: `pay.guaranteed` of the accepted updates without a receipt yet, summed.
    """
    return max(previous, Wei(earned + advanced))


def voucher_fault(
    signed: SignedVoucher, *, separator: bytes, coordinator: Address, held: Voucher
) -> str:
    """Why a node should not take a voucher in place of the one it holds; empty: it should.

    Args:
        signed: As it arrived.
        separator: Of the domain that the job is settled in.
        coordinator: Who signs for the job.
        held: The voucher held so far; of amount 0 where there is none.
    """
    voucher = signed.voucher
    if (voucher.job, voucher.node) != (held.job, held.node):
        return "it is for another job or node"
    if voucher.amount < held.amount or voucher.sequence < held.sequence:
        return (
            f"it is worth {voucher.amount} for {several(voucher.sequence, 'receipt')},"
            f" less than {held.amount} for {held.sequence} before"
        )
    if voucher.sequence > RECEIPTS_MOST:
        return f"it is for {voucher.sequence} receipts, a ledger counts {RECEIPTS_MOST} at most"
    if signer(separator, voucher, signed.signature) != coordinator:
        return f"the coordinator {coordinator} did not sign it"
    return ""


def kept_voucher(content: bytes, terms: Terms) -> SignedVoucher:
    """A voucher as a file has it, where that is still what the job's coordinator signed.

    Raises:
        ValueError: it is not, and why.
    """
    try:
        signed = _vouchers.decode(content)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as broken:
        raise ValueError(f"it is no voucher: {broken}") from broken
    if signed.voucher.job != terms.job:
        raise ValueError("it is for another job")
    if signer(separator_of(terms.domain), signed.voucher, signed.signature) != terms.coordinator:
        raise ValueError(f"the coordinator {terms.coordinator} did not sign it")
    return signed


def no_voucher(job: JobKey, node: NodeId) -> Voucher:
    """What a node holds before its first voucher."""
    return Voucher(job=job, node=node, sequence=0, amount=Wei(0))
