"""The training ledger as its callers see it: calls with their gas, and answers by name."""

import struct
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

from hypergpu.chain import gas
from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.ids import Address, JobKey, NodeId
from hypergpu.ledger import packing
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.typed import Receipt, address_bytes, chain_form, word_bytes
from hypergpu.units import Samples

CONTRACT = "TrainingLedger"
TOKEN = "TestToken"
_WORD_BYTES = 32
# Packed by hand: eth_abi takes over twenty times as long, many times what signing takes.
_HEADER = Struct(">32s28xI28xI32s")
_TAIL = Struct(">24xQ24xQ")
"""Where the last argument begins, and how long it is."""
_TAKING = ("openJob", "fund", "postBond")


class ContractCall(NamedTuple):
    """What a transaction to the ledger or its token says, and the most gas that it takes."""

    call: bytes
    gas: int


class NodeTotals(NamedTuple):
    """What a batch adds for one node: receipts from ``first`` on, and their sums."""

    node: NodeId
    first: int
    receipts: int
    samples: int
    score: int


class Batch(NamedTuple):
    """Where a batch of receipts goes."""

    job: JobKey
    epoch: int
    sequence: int
    """The job's own count of batches: the contract refuses any other."""
    root: bytes


class PackedReceipt(NamedTuple):
    """A receipt as it lies in call data."""

    round: int
    samples: int
    quality_bps: int
    contribution: bytes


class JobTerms(NamedTuple):
    """What the owner of a job states when opening it; the contract's own words."""

    coordinator: Address
    model: bytes
    dataset: bytes
    epochs: int
    unit_price: int
    guaranteed_bps: int
    spend_limit: int


class JobOnChain(NamedTuple):
    """A job as it stands. Amounts are of the token's smallest unit."""

    coordinator: Address
    unit_price: int
    free: int
    """Escrow that nothing has reserved."""
    spendable: int
    """Of it, what may be reserved now."""
    next_sequence: int
    opened_at_s: int
    ends_at_s: int
    """When its owner may take back what is free; 0: that was not asked for."""


class Share(NamedTuple):
    """A node's share of an epoch."""

    state: int
    receipts: int
    score: int
    reward: int
    paid: int


class EpochOnChain(NamedTuple):
    """An epoch as it stands."""

    total_score: int
    pool: int
    opened_at_s: int
    closed_at_s: int
    is_swept: bool


class NodeAccount(NamedTuple):
    """A node in a job."""

    counted: int
    """Its recorded receipts, which is also the next sequence."""
    samples: int
    earned: int
    paid: int
    """Into its wallet or its credit."""
    pending: int
    """What a voucher claims and its window still holds."""
    release_at_s: int
    """When that may be paid."""
    voided: int
    is_barred: bool
    """Whether its vouchers are refused."""


class LedgerCalls:
    """Makes calls and reads answers; sends nothing."""

    def __init__(self) -> None:
        self.abi = Abi(artifact(CONTRACT).abi)
        self.token = Abi(artifact(TOKEN).abi)

    def record(self, batch: Batch, totals: Sequence[NodeTotals]) -> ContractCall:
        """Record a batch by its sums.

        Raises:
            ValueError: a number does not fit its field.
        """
        words = packing.totals_words(
            packing.NodeTotals(one.node, one.first, one.receipts, Samples(one.samples), one.score)
            for one in totals
        )
        call = self._batch_call("submitAggregate", batch, len(totals), words)
        fresh = sum(one.first == 0 for one in totals)
        return ContractCall(call, gas.aggregate(len(totals), fresh))

    def record_packed(
        self, batch: Batch, parts: Sequence[tuple[NodeId, int, Sequence[PackedReceipt]]]
    ) -> ContractCall:
        """Record a batch with every receipt in the call data.

        Args:
            batch: Where it goes.
            parts: Each node with its first sequence and its receipts from there on.

        Raises:
            ValueError: a number does not fit its field.
        """
        pieces = []
        for node, first, receipts in parts:
            pieces.append(
                address_bytes(node) + first.to_bytes(6, "big") + len(receipts).to_bytes(2, "big")
            )
            pieces += [
                one.round.to_bytes(4, "big")
                + one.samples.to_bytes(4, "big")
                + one.quality_bps.to_bytes(2, "big")
                + one.contribution[:6]
                for one in receipts
            ]
        content = b"".join(pieces)
        padded = content + bytes(-len(content) % _WORD_BYTES)
        call = self._batch_call("submitContributions", batch, len(content), padded)
        fresh = sum(first == 0 for _, first, _ in parts)
        count = sum(len(receipts) for _, _, receipts in parts)
        return ContractCall(call, gas.packed(len(parts), fresh, count))

    def record_one(self, signed: SignedReceipt, epoch: int) -> ContractCall:
        """Record one receipt with both signatures, as anyone may."""
        signatures = chain_form(signed.contribution_signature), chain_form(signed.signature)
        words = _words(signed.receipt)
        return ContractCall(
            self.abi.call("submitContribution", words, *signatures, epoch), gas.RECORD_ONE
        )

    def prove_equivocation(self, receipts: Sequence[SignedReceipt]) -> bytes:
        """Show the two receipts that a coordinator signed under one number."""
        values = [
            value
            for signed in receipts
            for value in (_words(signed.receipt), chain_form(signed.signature))
        ]
        return self.abi.call("proveEquivocation", *values)

    def close(self, job: JobKey, epoch: int) -> ContractCall:
        """Reserve an epoch's pool."""
        return ContractCall(self.abi.call("closeEpoch", word_bytes(job), epoch), gas.CLOSE)

    def pay(self, job: JobKey, epoch: int, nodes: Sequence[NodeId]) -> ContractCall:
        """Pay the shares of at most `gas.NODES_MAX` nodes."""
        addresses = [address_bytes(node) for node in nodes]
        call = self.abi.call("distributePayments", word_bytes(job), epoch, addresses)
        return ContractCall(call, gas.payment(len(nodes)))

    def sweep(self, job: JobKey, epoch: int, nodes: Sequence[NodeId]) -> ContractCall:
        """Return an epoch's dust; ``nodes`` are all that have a score in it."""
        addresses = sorted(address_bytes(node) for node in nodes)
        call = self.abi.call("sweepDust", word_bytes(job), epoch, addresses)
        return ContractCall(call, gas.sweep(len(nodes)))

    def open_job(self, salt: bytes, terms: JobTerms, escrow: int) -> ContractCall:
        """Open a job of the caller's with an escrow that it approved before."""
        words = (address_bytes(terms.coordinator), *terms[1:])
        return ContractCall(self.abi.call("openJob", salt, words, escrow), gas.OPEN_JOB)

    def fund(self, job: JobKey, amount: int) -> ContractCall:
        """Add to a job's escrow."""
        return ContractCall(self.abi.call("fund", word_bytes(job), amount), gas.FUND_JOB)

    def post_bond(self, amount: int) -> ContractCall:
        """Add to the caller's bond."""
        return ContractCall(self.abi.call("postBond", amount), gas.POST_BOND)

    def approve(self, ledger: Address, amount: int) -> ContractCall:
        """Let the ledger take so much of the caller's tokens; goes to the token."""
        call = self.token.call("approve", address_bytes(ledger), amount)
        return ContractCall(call, gas.APPROVE)

    def taken(self, call: bytes) -> int:
        """How much of the caller's tokens a call has the ledger take, out of what it may."""
        # The amount is the last argument of each, and no argument is of varying length.
        is_taking = any(call.startswith(self.abi.selector(name)) for name in _TAKING)
        return int.from_bytes(call[-_WORD_BYTES:]) if is_taking else 0

    def mint(self, to: Address, amount: int) -> ContractCall:
        """Make play money; goes to the test token."""
        return ContractCall(self.token.call("mint", address_bytes(to), amount), gas.MINT)

    def job(self, answer: bytes) -> JobOnChain:
        """Read what ``getJob`` gave."""
        _, terms, *rest = self._struct("getJob", answer)
        return JobOnChain(Address(terms[0]), terms[4], *rest)

    def is_opened_by(self, call: bytes, answer: bytes) -> bool:
        """Whether what ``getJob`` gave has all the terms that a call opens a job with."""
        _, terms, *_ = self._struct("getJob", answer)
        salt = call[len(self.abi.selector("openJob")) :][:_WORD_BYTES]
        found = JobTerms(Address(terms[0]), *terms[1:])
        return self.open_job(salt, found, self.taken(call)).call == call

    def share(self, answer: bytes) -> Share:
        """Read what ``getContribution`` gave."""
        return Share(*self._struct("getContribution", answer))

    def epoch(self, answer: bytes) -> EpochOnChain:
        """Read what ``getEpoch`` gave."""
        return EpochOnChain(*self._struct("getEpoch", answer))

    def account(self, answer: bytes) -> NodeAccount:
        """Read what ``getAccount`` gave."""
        return NodeAccount(*self._struct("getAccount", answer))

    def _batch_call(self, name: str, batch: Batch, length: int, words: bytes) -> bytes:
        """A call whose last argument is the only one without a size of its own."""
        try:
            header = _HEADER.pack(word_bytes(batch.job), batch.epoch, batch.sequence, batch.root)
        except struct.error as broken:
            raise ValueError(f"a number does not fit its field: {broken}") from broken
        tail = _TAIL.pack(_HEADER.size + _WORD_BYTES, length)
        return b"".join((self.abi.selector(name), header, tail, words))

    def _struct(self, name: str, answer: bytes) -> tuple[Any, ...]:
        (fields,) = self.abi.answer(name, answer)
        return tuple(fields)


def _words(receipt: Receipt) -> tuple[object, ...]:
    """A receipt's fields in the order of the contract's struct."""
    return (
        word_bytes(receipt.job),
        receipt.epoch,
        receipt.round,
        address_bytes(receipt.node),
        receipt.sequence,
        word_bytes(receipt.contribution),
        receipt.samples,
        receipt.quality_bps,
        word_bytes(receipt.evaluator),
    )
