"""The coordinator's signed statement: "I accepted this contribution, of this quality".

A receipt carries the node's running score in the job, so that the newest receipt alone proves all
that the node has earned. Amounts follow from scores and the job's price; no receipt states money.
"""

from struct import Struct

import msgspec

from hypergpu.ids import Address, JobKey, Keccak, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.statements.contribution import Contribution, contribution_hash
from hypergpu.statements.domain import Domain, address_bytes, separator_of, word_bytes
from hypergpu.statements.signing import signer
from hypergpu.units import BasisPoints, Samples

WHOLE_BPS = BasisPoints(10_000)
RECEIPTS_MOST = 2**32 - 1
"""Receipts of one node in one job that a ledger can count."""

_TYPE = keccak(
    b"Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,"
    b"bytes32 contribution,uint64 samples,uint16 qualityBps,bytes32 evaluator,uint64 totalScore)"
)
_WORDS = Struct(">32s32s28xI28xI12x20s24xQ32s24xQ30xH32s24xQ")
_SHARED = ("job", "epoch", "round", "node")


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted contribution, signed by the coordinator once the round's quality is known."""

    job: JobKey
    epoch: int
    round: int
    node: NodeId
    sequence: int
    """Dense for each node in a job, from 0."""
    contribution: Keccak
    """`struct_hash` of the contribution."""
    samples: Samples
    """Samples assigned and checked."""
    quality_bps: BasisPoints
    evaluator: Keccak
    """Keccak-256 of a short name of the measurement."""
    total_score: int
    """Sum of samples x quality_bps over the node's receipts in the job, this one included."""

    @property
    def score(self) -> int:
        """This receipt's part of ``total_score``."""
        return self.samples * self.quality_bps

    def encode_data(self) -> bytes:
        """See `Statement.encode_data`."""
        return _WORDS.pack(
            _TYPE,
            word_bytes(self.job),
            self.epoch,
            self.round,
            address_bytes(self.node),
            self.sequence,
            word_bytes(self.contribution),
            self.samples,
            self.quality_bps,
            word_bytes(self.evaluator),
            self.total_score,
        )


class SignedReceipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receipt with its contribution and both signatures."""

    receipt: Receipt
    signature: bytes
    """The coordinator's signature of the receipt."""
    contribution: Contribution
    contribution_signature: bytes
    """The node's signature of the contribution."""


def receipt_fault(signed: SignedReceipt, domain: Domain, coordinator: Address) -> str:
    """Reason why a ledger would not take a signed receipt; empty if it is sound.

    Safe for content from outside: it never raises. About 0.2 ms, two signatures.
    """
    receipt, contribution = signed.receipt, signed.contribution
    try:
        hashed = contribution_hash(contribution).hex()
    except ValueError as broken:
        return f"its contribution cannot be encoded: {broken}"
    if receipt.contribution != hashed:
        return "it is for another contribution"
    if any(getattr(receipt, name) != getattr(contribution, name) for name in _SHARED):
        return "its job, epoch, round or node differs from its contribution's"
    if fault := _figure_fault(receipt, contribution):
        return fault
    separator = separator_of(domain)
    if signer(separator, receipt, signed.signature) != coordinator:
        return f"the coordinator {coordinator} did not sign it"
    if signer(separator, contribution, signed.contribution_signature) != receipt.node:
        return f"the node {receipt.node} did not sign its contribution"
    return ""


def _figure_fault(receipt: Receipt, contribution: Contribution) -> str:
    if receipt.samples > contribution.samples:
        return f"{receipt.samples} samples were checked, {contribution.samples} assigned"
    if receipt.quality_bps > WHOLE_BPS:
        return f"its quality is {receipt.quality_bps} of {WHOLE_BPS}"
    if not 0 <= receipt.sequence < RECEIPTS_MOST:
        return f"its sequence is {receipt.sequence}, a ledger counts {RECEIPTS_MOST} receipts"
    if receipt.total_score < receipt.score:
        return f"its total score {receipt.total_score} is less than its own {receipt.score}"
    return ""
