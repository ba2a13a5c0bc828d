"""A dispute's bundle held against the chain that it quotes: whoever looks it up needs nobody."""

from collections.abc import Iterator

from msgspec.structs import replace

from hypergpu.ledger import pay
from hypergpu.ledger.audit.dispute import ChainSays, Claim, Dispute, chain_says, dispute_fault
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.audit.recorded import recorded
from hypergpu.units import are, several

_OF_AN_EPOCH = frozenset({Claim.UNDERPAID, Claim.UNRECORDED})
_FIELDS = tuple(name for name in ChainSays.__struct_fields__ if name not in {"block", "block_hash"})


def chain_faults(dispute: Dispute, fact: JobFact) -> tuple[str, ...]:
    """What a bundle says of its chain that the chain does not say. None: it may be believed.

    Args:
        dispute: Any that follows from what it holds: see `dispute_fault`.
        fact: Of the ledger that it names, at the block that it names.
    """
    return tuple(_chain_faults(dispute, fact))


def since(dispute: Dispute, fact: JobFact) -> str:
    """Why the claim of a bundle holds no longer by a later block; empty: it still does."""
    if dispute.claim is Claim.EQUIVOCATION:
        return ""
    return dispute_fault(replace(dispute, chain=_quoted(dispute, fact)))


def claim_text(dispute: Dispute) -> str:
    """What a bundle claims, with its figures."""
    says, numbers = dispute.chain, [one.signed.receipt.sequence for one in dispute.receipts]
    match dispute.claim:
        case Claim.UNDERPAID:
            score = sum(
                pay.score(one.signed.receipt.samples, one.signed.receipt.quality_bps)
                for one in dispute.receipts
            )
            due = pay.reward(says.pool, score, says.total_score)
            return (
                f"the score of {several(len(numbers), 'receipt')} recorded in epoch"
                f" {dispute.epoch} is {score}, and {due} of its pool is due for it; the ledger"
                f" counts {says.score} and {says.reward}"
            )
        case Claim.UNRECORDED:
            return (
                f"{several(len(numbers), 'receipt')} from number {min(numbers)} on, which the"
                f" coordinator signed for epoch {dispute.epoch}, {are(len(numbers))} not recorded"
            )
        case Claim.EQUIVOCATION:
            return f"the coordinator signed two different receipts under number {numbers[0]}"
        case Claim.VOUCHER:
            amount = dispute.voucher.voucher.amount if dispute.voucher is not None else 0
            return (
                f"a voucher promises {amount}; {says.paid} of it was paid, is pending or was"
                f" voided, and the escrow has no more than {says.free} free"
            )


def _chain_faults(dispute: Dispute, fact: JobFact) -> Iterator[str]:
    if fact.coordinator != dispute.signers.coordinator:
        yield (
            f"the job's coordinator is {fact.coordinator} by the ledger, the bundle's receipts"
            f" and vouchers are those of {dispute.signers.coordinator}"
        )
    quoted, says = dispute.chain, _quoted(dispute, fact)
    if quoted.block_hash != says.block_hash:
        yield (
            f"block {quoted.block} is {says.block_hash}, the bundle quotes {quoted.block_hash}: it"
            " is of another chain, or of a block that was reorganised away"
        )
    if dispute.claim is Claim.EQUIVOCATION:
        return  # The signatures alone prove it, whatever was counted and paid.
    for name in _FIELDS:
        told, found = getattr(quoted, name), getattr(says, name)
        if told != found:
            yield f"its {name} is {found} by the ledger, the bundle quotes {told}"
    if dispute.claim is Claim.UNRECORDED and not fact.leaves_out(dispute.epoch):
        yield f"epoch {dispute.epoch} is still being recorded by that block: nothing is left out"
    if dispute.claim is Claim.UNDERPAID:
        yield from _root_faults(dispute, fact)


def _root_faults(dispute: Dispute, fact: JobFact) -> Iterator[str]:
    """Receipts that were not recorded in the epoch, or lie under a root that nobody submitted."""
    if dispute.epoch not in {one.number for one in fact.epochs}:
        yield f"epoch {dispute.epoch} is not closed by that block"
    signed = [one.signed for one in dispute.receipts]
    places = recorded(fact, signed, dispute.signers).epochs
    roots = {batch.root for batch in fact.batches}
    for proven in dispute.receipts:
        sequence = proven.signed.receipt.sequence
        place = places.get((dispute.node, sequence))
        if place != dispute.epoch:
            where = "in no epoch" if place is None else f"in epoch {place}"
            yield f"receipt {sequence} is recorded {where}, not in epoch {dispute.epoch}"
        elif proven.root not in roots:
            yield f"receipt {sequence} is proven by a root that no batch has: {proven.root.hex()}"


def _quoted(dispute: Dispute, fact: JobFact) -> ChainSays:
    epoch = dispute.epoch if dispute.claim in _OF_AN_EPOCH else None
    return chain_says(fact, dispute.node, epoch)
