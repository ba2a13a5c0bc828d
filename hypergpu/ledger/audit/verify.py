"""The whole audit of a job: receipts, batches, scores, pay and escrow."""

from collections.abc import Iterable

import msgspec

from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.audit.finding import Finding
from hypergpu.ledger.audit.payments import payment_findings
from hypergpu.ledger.audit.recorded import recorded
from hypergpu.ledger.receipt import SignedReceipt, Signers
from hypergpu.ledger.typed import Domain
from hypergpu.ledger.voucher import SignedVoucher


class Verdict(msgspec.Struct, frozen=True):
    """What came out."""

    receipts: int
    """Sound ones that were given."""
    batches: int
    """That all receipts were given of."""
    newer: int
    """Receipts on the chain that are newer than those given."""
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What somebody did wrong."""
        return tuple(finding for finding in self.findings if finding.is_wrong)

    @property
    def open(self) -> tuple[Finding, ...]:
        """What has not happened yet."""
        return tuple(finding for finding in self.findings if not finding.is_wrong)


def verify(
    fact: JobFact,
    receipts: Iterable[SignedReceipt],
    vouchers: Iterable[SignedVoucher] = (),
    *,
    signed_for: Domain | None = None,
    newer_from: int | None = None,
) -> Verdict:
    """Recompute everything that the chain says of a job from its receipts.

    Takes about 0.2 ms a receipt: two signatures each.

    Args:
        fact: What the chain says, at one block.
        receipts: All receipts of the job; a node that has only its own is told of the others as
            missing from batches.
        vouchers: Any that are held.
        signed_for: The domain of both signatures of a receipt, by the job's terms: none at all for
            a job that was created without a chain; None: the ledger that it is settled on.
        newer_from: The first block that may hold receipts which are not among those given, since
            they were read before: what is behind the last one given of its node is told as newer
            then, and is no withheld one. None: they were read after the chain was.
    """
    domain = fact.domain if signed_for is None else signed_for
    signers = Signers(coordinator=fact.coordinator, domain=domain, made_in=domain)
    known = recorded(fact, receipts, signers, newer_from=newer_from)
    findings = (*known.findings, *payment_findings(fact, known, vouchers))
    return Verdict(
        len(known.receipts), len(fact.batches) - known.unread, len(known.newer), findings
    )
