"""Signs transactions of one account and stores them; what is stored is sent by the pump."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.settlement.acts import taken_in
from coordinator.core.settlement.epoch import Epoch, Part
from coordinator.core.settlement.fees import Fee, FeeRule, higher_fee, opening_fee
from coordinator.core.settlement.sending import Attempt
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import (
    AccountName,
    BatchRecord,
    OutboxChange,
    OutboxRow,
    Rewind,
    SealedTransaction,
    SignedAttempt,
)
from hypergpu.chain.gas import TRANSFER
from hypergpu.chain.ledger import ContractCall
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.sent.acts import Act
from hypergpu.chain.signer import Draft, Signer
from hypergpu.ids import Address, JobId
from hypergpu.units import Milliseconds

_ACT = "act/"


class Intent(NamedTuple):
    """A transaction that is wanted, before it has a nonce."""

    purpose: str
    to: bytes
    what: ContractCall
    job_id: JobId | None = None
    epoch: int = 0
    part: Part | None = None


class Sealing(NamedTuple):
    """What is stored with transactions in one go."""

    batches: tuple[tuple[int, BatchRecord], ...] = ()
    """By the place of their transaction among the intents; their nonces are filled in."""
    epochs: tuple[Epoch, ...] = ()
    rewinds: tuple[Rewind, ...] = ()


NOTHING_ELSE = Sealing()


class Account:
    """One key on one chain."""

    def __init__(self, signer: Signer, outbox: Outbox, profile: ChainProfile) -> None:
        self.name = AccountName(profile.chain_id, Address(signer.node_id))
        self.address = signer.address
        self._signer = signer
        self._outbox = outbox
        self._profile = profile
        self._fee_rule = FeeRule(tip_wei=profile.tip_wei, max_fee_cap_wei=profile.max_fee_cap_wei)
        self._gas_percent = profile.gas_percent
        self._first_nonce = 0
        self._least_nonce = 0
        self._suggested_tip_wei = 0
        self._acts: tuple[Act, ...] = ()

    def take_in(self, acts: Sequence[Act], used: int, final: int) -> None:
        """Take what an operator's commands have signed into the outbox, as far as it follows on.

        Args:
            acts: All of the account.
            used: How many nonces are used on the chain.
            final: How many were as deep as makes them final.
        """
        self._acts = tuple(acts)
        stored = self._outbox.next_nonce(self.name)
        nonces = taken_in(stored, used, final, {act.draft.nonce for act in acts})
        if rows := [_act_row(self.name, self.acts_at(nonce)) for nonce in nonces]:
            self._outbox.write(OutboxChange(account=self.name, sealed=tuple(rows)))

    @property
    def acts(self) -> tuple[Act, ...]:
        """All that an operator's commands had signed when they were taken in."""
        return self._acts

    def acts_at(self, nonce: int) -> list[Act]:
        """What an operator's commands have signed with a nonce."""
        return [act for act in self._acts if act.draft.nonce == nonce]

    def begin_at(self, nonce: int, suggested_tip_wei: int) -> None:
        """What the chain says before the account's first transaction from here.

        Args:
            nonce: How many transactions the account has had; counts only until one is stored.
            suggested_tip_wei: The chain's opinion.
        """
        self._first_nonce = nonce
        self._suggested_tip_wei = suggested_tip_wei

    def pass_over(self, nonce: int, head: Block) -> None:
        """Use no nonce before this one: somebody else has spent them.

        It is spent on nothing at once, so that what is stored says so at the next start.
        """
        self._least_nonce = nonce
        nothing = ContractCall(b"", TRANSFER)
        self.seal([Intent(f"pass/{nonce}", self.address, nothing)], head)

    def next_nonce(self) -> int:
        """Of the next transaction to be stored."""
        stored = self._outbox.next_nonce(self.name)
        return self._first_nonce if stored is None else max(stored, self._least_nonce)

    def seal(self, intents: Sequence[Intent], head: Block, sealing: Sealing = NOTHING_ELSE) -> None:
        """Sign transactions, in order, and store them with what belongs to them in one go.

        Raises:
            JournalConflictError: a purpose was sealed before, or another writer was here.
        """
        fee = opening_fee(head.base_fee_wei, self._suggested_tip_wei, self._fee_rule)
        first = self.next_nonce()
        rows = [self._row(first + place, intent, fee) for place, intent in enumerate(intents)]
        batches = [
            replace(batch, account=self.name, nonce=first + place)
            for place, batch in sealing.batches
        ]
        change = OutboxChange(
            account=self.name,
            sealed=tuple(rows),
            batches=tuple(batches),
            epochs=sealing.epochs,
            rewinds=sealing.rewinds,
            least_nonce=self._least_nonce,
        )
        self._outbox.write(change)

    def use_more_gas(self) -> None:
        """Half as much again for whatever is signed from now on."""
        self._gas_percent = self._profile.gas_percent * 3 // 2

    def seal_again(
        self,
        failed: Sequence[OutboxRow],
        again: Sequence[Intent | OutboxRow],
        head: Block,
        left: Sealing,
    ) -> int:
        """Give up transactions that failed, and sign what goes in their place.

        Args:
            failed: All of them.
            again: Those of them that are signed once more, and what is new among them, in order.
            head: The newest block.
            left: Epochs and counts without what is given up. The sealer goes on from them, and
                signs what belongs to epochs afresh.

        Returns:
            How many were signed.
        """
        fee = opening_fee(head.base_fee_wei, self._suggested_tip_wei, self._fee_rule)
        first = self.next_nonce()
        rows = [
            self._row(first + place, each, fee)
            if isinstance(each, Intent)
            else self._row_again(first + place, each, fee)
            for place, each in enumerate(again)
        ]
        change = OutboxChange(
            account=self.name,
            given_up=tuple(row.transaction.nonce for row in failed),
            sealed=tuple(rows),
            epochs=left.epochs,
            rewinds=left.rewinds,
            least_nonce=self._least_nonce,
        )
        self._outbox.write(change)
        return len(rows)

    def dearer(self, row: OutboxRow, base_fee_wei: int) -> SignedAttempt | None:
        """The same transaction with a higher fee; None where the profile's cap forbids one."""
        newest = row.attempts[-1].attempt
        fee = higher_fee(newest, base_fee_wei, self._fee_rule)
        if fee is None:
            return None
        if newest.is_void:
            return self._voided(row.transaction.nonce, fee)
        return self._signed(row.transaction, fee)

    def void(self, row: OutboxRow, base_fee_wei: int) -> SignedAttempt:
        """What spends a transaction's nonce on nothing, for a higher fee as far as that may be."""
        return self.nothing(row.transaction.nonce, base_fee_wei, row.attempts[-1].attempt)

    def nothing(self, nonce: int, base_fee_wei: int, before: Attempt | None) -> SignedAttempt:
        """What spends a nonce on nothing: in place of ``before``, as `void`, or for a first fee."""
        if before is None:
            fee = opening_fee(base_fee_wei, self._suggested_tip_wei, self._fee_rule)
            return self._voided(nonce, fee)
        fee = higher_fee(before, base_fee_wei, self._fee_rule) or Fee(
            before.max_fee_wei, before.tip_wei
        )
        return self._voided(nonce, fee)

    def _voided(self, nonce: int, fee: Fee) -> SignedAttempt:
        nothing = ContractCall(b"", TRANSFER)
        row = self._row(nonce, Intent(f"void/{nonce}", self.address, nothing), fee)
        return replace(row.attempts[0], attempt=replace(row.attempts[0].attempt, is_void=True))

    def _row(self, nonce: int, intent: Intent, fee: Fee) -> OutboxRow:
        gas = intent.what.gas * self._gas_percent // 100
        transaction = SealedTransaction(
            account=self.name,
            nonce=nonce,
            purpose=intent.purpose,
            job_id=intent.job_id,
            epoch=intent.epoch,
            part="" if intent.part is None else intent.part.value,
            to=intent.to,
            call=intent.what.call,
            gas=min(gas, self._profile.transaction_gas_max),
            sealed_ms=unix_ms(),
        )
        return OutboxRow(transaction=transaction, attempts=(self._signed(transaction, fee),))

    def _row_again(self, nonce: int, row: OutboxRow, fee: Fee) -> OutboxRow:
        gas = row.transaction.gas * self._gas_percent // self._profile.gas_percent
        gas = min(gas, self._profile.transaction_gas_max)
        again = replace(row.transaction, nonce=nonce, gas=gas, sealed_ms=unix_ms())
        return OutboxRow(transaction=again, attempts=(self._signed(again, fee),))

    def _signed(self, transaction: SealedTransaction, fee: Fee) -> SignedAttempt:
        draft = Draft(
            chain_id=self.name.chain_id,
            nonce=transaction.nonce,
            to=transaction.to,
            call=transaction.call,
            gas=transaction.gas,
            max_fee_wei=fee.max_fee_wei,
            tip_wei=fee.tip_wei,
        )
        signed = self._signer.sign(draft)
        return SignedAttempt(Attempt(signed.hash, fee.max_fee_wei, fee.tip_wei), signed.raw)


def is_act(transaction: SealedTransaction) -> bool:
    """Whether an operator's command has signed it: nothing that is settled builds on it."""
    return transaction.purpose.startswith(_ACT)


def _act_row(account: AccountName, acts: Sequence[Act]) -> OutboxRow:
    """What was signed with one nonce, the newest last."""
    newest = acts[-1]
    transaction = SealedTransaction(
        account=account,
        nonce=newest.draft.nonce,
        purpose=f"{_ACT}{newest.what}/{newest.draft.nonce}",
        to=newest.draft.to,
        call=newest.draft.call,
        gas=newest.draft.gas,
        sealed_ms=unix_ms(),
    )
    attempts = tuple(
        SignedAttempt(Attempt(act.hash, act.draft.max_fee_wei, act.draft.tip_wei), act.raw)
        for act in acts
    )
    return OutboxRow(transaction=transaction, attempts=attempts)


def unix_ms() -> Milliseconds:
    """Wall-clock time: for figures only, never for decisions."""
    return Milliseconds(time.time_ns() // 1_000_000)
