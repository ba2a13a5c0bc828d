"""Bundles with which a node shows any third party that it was paid wrongly.

A bundle holds the signed receipts, their proofs and what the chain said at a block. Whoever gets it
checks two things: that the claim follows from what is in it (`dispute_faults`, offline), and that
the chain says what it quotes (`ChainSays`, one look at the contract).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

import msgspec
from msgspec.structs import replace

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobKey, NodeId
from hypergpu.ledger import pay
from hypergpu.ledger.audit.facts import BatchFact, JobFact
from hypergpu.ledger.audit.recorded import recorded
from hypergpu.ledger.merkle import MerkleTree, is_proven
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers, leaf
from hypergpu.ledger.typed import signer, struct_hash
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.units import Wei

FORMAT = "hypergpu-dispute/1"
BYTES_MAX = 64 << 20


class Claim(Enum):
    """What is wrong."""

    UNDERPAID = "underpaid"
    """The chain counts less for an epoch than the receipts recorded in it give."""
    UNRECORDED = "unrecorded"
    """Countersigned receipts are not on the chain: see `JobFact.leaves_out`."""
    EQUIVOCATION = "equivocation"
    """The coordinator signed two different receipts under one number."""
    VOUCHER = "voucher"
    """A voucher promises more than was ever paid, and the escrow does not cover it."""


class ChainSays(msgspec.Struct, frozen=True, kw_only=True):
    """What the chain said of the node, at a block."""

    block: int
    block_hash: str
    counted: int
    score: int = 0
    total_score: int = 0
    pool: Wei = Wei(0)
    reward: Wei = Wei(0)
    paid: Wei = Wei(0)
    """In the job, pending and voided pay included."""
    free: Wei = Wei(0)
    """What is left of the job's escrow."""


class ProvenReceipt(msgspec.Struct, frozen=True):
    """A receipt, and where it is on the chain."""

    signed: SignedReceipt
    root: bytes = b""
    """Of the batch it was recorded in; empty where it was in none."""
    proof: tuple[bytes, ...] = ()


class Dispute(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle."""

    format: str = FORMAT
    claim: Claim
    job: JobKey
    node: NodeId
    epoch: int = 0
    signers: Signers
    receipts: tuple[ProvenReceipt, ...] = ()
    voucher: SignedVoucher | None = None
    chain: ChainSays


def disputes(
    fact: JobFact,
    receipts: Sequence[SignedReceipt],
    vouchers: Iterable[SignedVoucher],
    *,
    node: NodeId,
    signers: Signers,
) -> tuple[Dispute, ...]:
    """Every bundle that a node can make of what it holds. None: it was paid as it should be.

    Receipts of others belong to it as far as they share a batch: proofs need the whole tree.
    """
    known = recorded(fact, receipts, signers)
    trees = dict(_trees(fact.batches, known.receipts))
    own = {number[1]: signed for number, signed in known.receipts.items() if number[0] == node}
    made: list[Dispute] = []
    by_epoch: dict[int, list[int]] = {}
    missing: list[int] = []
    for sequence in sorted(own):
        if (node, sequence) in known.epochs:
            by_epoch.setdefault(known.epochs[node, sequence], []).append(sequence)
        else:
            missing.append(sequence)
    late_in = {own[one].receipt.epoch for one in missing}
    left_out = {epoch for epoch in late_in if fact.leaves_out(epoch)}
    for epoch in sorted({one.number for one in fact.epochs} | left_out):
        proven = [_proven(own[one], trees) for one in by_epoch.get(epoch, ())]
        late = [own[one] for one in missing if own[one].receipt.epoch == epoch]
        template = Dispute(
            claim=Claim.UNDERPAID,
            job=fact.job,
            node=node,
            epoch=epoch,
            signers=signers,
            receipts=tuple(proven),
            chain=chain_says(fact, node, epoch),
        )
        unproven = tuple(map(ProvenReceipt, late))
        made += [template, replace(template, claim=Claim.UNRECORDED, receipts=unproven)]
    says = chain_says(fact, node, None)
    whole = Dispute(claim=Claim.VOUCHER, job=fact.job, node=node, signers=signers, chain=says)
    made += [
        replace(whole, claim=Claim.EQUIVOCATION, receipts=pair) for pair in _pairs(receipts, node)
    ]
    made += [
        replace(whole, voucher=voucher) for voucher in vouchers if voucher.voucher.node == node
    ]
    return tuple(dispute for dispute in made if not dispute_fault(dispute))


def dispute_fault(dispute: Dispute) -> str:
    """Why the claim does not follow from what the bundle holds; empty: it does."""
    if dispute.format != FORMAT:
        return f"its format is {dispute.format[:40]!r}, not {FORMAT!r}"
    match dispute.claim:
        case Claim.UNDERPAID:
            return _receipts_fault(dispute) or _underpaid_fault(dispute)
        case Claim.UNRECORDED:
            return _receipts_fault(dispute) or _unrecorded_fault(dispute)
        case Claim.EQUIVOCATION:
            return _equivocation_fault(dispute)
        case Claim.VOUCHER:
            return _voucher_fault(dispute)


def encoded_dispute(dispute: Dispute) -> bytes:
    """A bundle as JSON."""
    return msgspec.json.format(msgspec.json.encode(dispute), indent=1)


def decoded_dispute(content: bytes, *, source: str) -> Dispute:
    """Read a bundle.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is too large or no bundle.
    """
    if len(content) > BYTES_MAX:
        what = f"{source} has {len(content)} bytes, at most {BYTES_MAX} are read"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what)
    try:
        return msgspec.json.decode(content, type=Dispute)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as broken:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{source} is no dispute: {broken}") from broken


def _receipts_fault(dispute: Dispute) -> str:
    check = ReceiptCheck(dispute.signers)
    seen: set[int] = set()
    for proven in dispute.receipts:
        receipt = proven.signed.receipt
        if (receipt.job, receipt.node) != (dispute.job, dispute.node):
            return f"receipt {receipt.sequence} is of another job or node"
        if receipt.sequence in seen:
            return f"receipt {receipt.sequence} comes twice"
        seen.add(receipt.sequence)
        if fault := check.fault(proven.signed):
            return f"receipt {receipt.sequence} is unsound: {fault}"
        if proven.root and not is_proven(proven.root, leaf(receipt), proven.proof):
            return f"receipt {receipt.sequence} is not proven by its root"
    return "" if seen else "it holds no receipt"


def _underpaid_fault(dispute: Dispute) -> str:
    says = dispute.chain
    if not all(proven.root for proven in dispute.receipts):
        return "it holds a receipt without a proof"
    score = sum(
        pay.score(one.signed.receipt.samples, one.signed.receipt.quality_bps)
        for one in dispute.receipts
    )
    due = pay.reward(says.pool, score, says.total_score)
    if score <= says.score and due <= says.reward:
        return f"the chain counts a score of {says.score}, the receipts give no more than {score}"
    return ""


def _unrecorded_fault(dispute: Dispute) -> str:
    recorded_ = [one.signed.receipt.sequence for one in dispute.receipts]
    if min(recorded_) < dispute.chain.counted:
        return f"receipt {min(recorded_)} is among the {dispute.chain.counted} that are counted"
    if any(one.signed.receipt.epoch != dispute.epoch for one in dispute.receipts):
        return "it holds a receipt of another epoch"
    return ""


def _equivocation_fault(dispute: Dispute) -> str:
    if len(dispute.receipts) != 2:
        return "two receipts are needed"
    separator = dispute.signers.domain.separator()
    first, second = (one.signed for one in dispute.receipts)
    numbers = {(one.receipt.job, one.receipt.node, one.receipt.sequence) for one in (first, second)}
    if len(numbers) != 1 or struct_hash(first.receipt) == struct_hash(second.receipt):
        return "they are not two different receipts of one number"
    for signed in (first, second):
        if signer(separator, signed.receipt, signed.signature) != dispute.signers.coordinator:
            return f"the coordinator {dispute.signers.coordinator} did not sign both"
    return ""


def _voucher_fault(dispute: Dispute) -> str:
    if dispute.voucher is None:
        return "it holds no voucher"
    voucher = dispute.voucher.voucher
    separator = dispute.signers.domain.separator()
    if (voucher.job, voucher.node) != (dispute.job, dispute.node):
        return "the voucher is of another job or node"
    if signer(separator, voucher, dispute.voucher.signature) != dispute.signers.coordinator:
        return f"the coordinator {dispute.signers.coordinator} did not sign the voucher"
    if voucher.amount <= dispute.chain.paid:
        return f"{dispute.chain.paid} was paid, the voucher is for {voucher.amount}"
    if voucher.amount - dispute.chain.paid <= dispute.chain.free:
        return f"the escrow has {dispute.chain.free} free: the voucher can be redeemed"
    return ""


def chain_says(fact: JobFact, node: NodeId, epoch: int | None) -> ChainSays:
    """What a chain says of a node and an epoch; None: of no epoch."""
    says = ChainSays(block=fact.block, block_hash=fact.block_hash, counted=0, free=fact.free)
    for account in fact.accounts:
        if account.node == node:
            paid = Wei(account.paid + account.pending + account.voided)
            says = replace(says, counted=account.counted, paid=paid)
    for share in fact.shares:
        if (share.node, share.epoch) == (node, epoch):
            says = replace(says, score=share.score, reward=share.reward)
    for held in fact.epochs:
        if held.number == epoch:
            says = replace(says, total_score=held.total_score, pool=held.pool)
    return says


def _trees(
    batches: Iterable[BatchFact], receipts: Mapping[tuple[NodeId, int], SignedReceipt]
) -> Iterator[tuple[bytes, tuple[bytes, MerkleTree]]]:
    """Each leaf with its batch's tree, of the batches whose receipts are all there."""
    for batch in batches:
        numbers = [(node, first + n) for node, first, count in batch.parts() for n in range(count)]
        if numbers and all(number in receipts for number in numbers):
            leaves = [leaf(receipts[number].receipt) for number in numbers]
            tree = MerkleTree(leaves)
            if tree.root == batch.root:
                yield from ((one, (batch.root, tree)) for one in leaves)


def _proven(signed: SignedReceipt, trees: dict[bytes, tuple[bytes, MerkleTree]]) -> ProvenReceipt:
    named = leaf(signed.receipt)
    if named not in trees:
        return ProvenReceipt(signed)
    root, tree = trees[named]
    return ProvenReceipt(signed, root, tree.proof(named))


def _pairs(
    receipts: Iterable[SignedReceipt], node: NodeId
) -> Iterator[tuple[ProvenReceipt, ProvenReceipt]]:
    first: dict[int, SignedReceipt] = {}
    for signed in receipts:
        if signed.receipt.node == node:
            other = first.setdefault(signed.receipt.sequence, signed)
            if other.receipt != signed.receipt:
                yield ProvenReceipt(other), ProvenReceipt(signed)
