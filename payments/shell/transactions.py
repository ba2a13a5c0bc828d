"""The queue of one key's transactions: encoded, signed, stored, sent, and followed until final.

`payments.core.transactions` decides; this file looks at the chain, signs, stores and sends. Bytes
are stored before anybody sees them, so a kill at any instant loses nothing: the next tick sends the
same bytes again. Gas limits are formulas, nothing is estimated on the way: an estimate would have
to wait until the transaction before is in a block. Each is an upper bound measured on the contract
with cold storage (``tests/chain``) with a margin; what a transaction does not use is not paid, but
on few chains.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import rlp
import structlog
from msgspec.structs import replace

from hypergpu.crypto import IdentityKey, chain_form, keccak
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.statements import Receipt, SignedReceipt, address_bytes, job_salt, word_bytes
from payments.core.transactions import (
    Approve,
    Call,
    Distribute,
    FundJob,
    Halt,
    JobOnLedger,
    OpenJob,
    OutboxRow,
    OutboxRules,
    OutboxView,
    Reclaim,
    RecordBatch,
    RecordReceipt,
    RequestReclaim,
    Variant,
    decide,
    is_in_effect,
    next_nonce,
    nonces_to_retry,
)
from payments.shell.chains import CallRefusedError, ChainProfile
from payments.shell.ethereum import ChainBlock, Contract, Ethereum, ledger_contract, token_contract
from payments.shell.store import AccountName, PaymentStore

DEPLOY_GAS = 6_000_000
_APPROVE_GAS = 80_000
_OPEN_GAS = 420_000
_FUND_GAS = 140_000
_RECORD_GAS = 240_000
_RECLAIM_GAS = 140_000
_BATCH_GAS, _ENTRY_GAS = 130_000, 100_000
_PAYMENT_GAS, _PAYEE_GAS = 150_000, 110_000

LedgerCall = OpenJob | FundJob | RecordBatch | RecordReceipt | Distribute | RequestReclaim | Reclaim
FindReceipt = Callable[[NodeId, int], SignedReceipt]
"""A node's receipt by its sequence, in the call's job."""


_EIP1559 = b"\x02"


class LedgerAddresses(NamedTuple):
    """Addresses that calls go to."""

    ledger: Address
    token: Address


class Payload(NamedTuple):
    """What a transaction does, before it has a nonce and a fee."""

    to: bytes
    """20 bytes; empty: it creates a contract."""
    data: bytes
    gas: int


class TransactionFee(NamedTuple):
    """Price of a unit of gas."""

    most_wei: int
    tip_wei: int


def sign_transaction(
    key: IdentityKey, chain_id: int, nonce: int, payload: Payload, fee: TransactionFee
) -> bytes:
    """An EIP-1559 transaction, the same bytes each time. 0.08 ms, a fifth of eth-account's time."""
    numbers = chain_id, nonce, fee.tip_wei, fee.most_wei, payload.gas
    fields: list[Any] = [*map(_shortest_bytes, numbers), payload.to, b"", payload.data, []]
    signature = key.sign_digest(keccak(_EIP1559 + rlp.encode(fields, infer_serializer=False)))
    signed = [signature[64:], signature[:32], signature[32:64]]
    fields += [part.lstrip(b"\0") for part in signed]
    return _EIP1559 + bytes(rlp.encode(fields, infer_serializer=False))


def read_transaction(raw: bytes) -> tuple[Payload, TransactionFee]:
    """What a signed transaction does and pays."""
    _, _, tip, fee, gas, to, _, calldata, *_ = rlp.decode(raw[1:])
    tip_wei, most_wei, limit = (int.from_bytes(each, "big") for each in (tip, fee, gas))
    return Payload(bytes(to), bytes(calldata), limit), TransactionFee(most_wei, tip_wei)


def payload(call: Call, target: LedgerAddresses, find_receipt: FindReceipt) -> Payload:
    """The transaction that makes a call."""
    if isinstance(call, Approve):
        calldata = token_contract().encode("approve", target.ledger, call.amount)
        return Payload(address_bytes(target.token), calldata, _APPROVE_GAS)
    calldata, gas = _ledger_call(call, ledger_contract(), find_receipt)
    return Payload(address_bytes(target.ledger), calldata, gas)


def _ledger_call(
    call: LedgerCall, ledger: Contract, find_receipt: FindReceipt
) -> tuple[bytes, int]:
    if isinstance(call, OpenJob):
        digests = word_bytes(call.model), word_bytes(call.dataset)
        terms = (call.coordinator, *digests, call.unit_price, call.epochs)
        return ledger.encode("openJob", job_salt(call.job_id), terms, call.escrow), _OPEN_GAS
    if isinstance(call, RecordReceipt):
        signed = find_receipt(call.entry.node, call.entry.count - 1)
        return record_data(signed, call.epoch), _RECORD_GAS
    job = word_bytes(call.job)
    match call:
        case RecordBatch():
            words = [entry.word() for entry in call.entries]
            arguments = (job, call.epoch, call.sequence, call.root, words)
            return ledger.encode("submitAggregate", *arguments), _BATCH_GAS + _ENTRY_GAS * len(
                words
            )
        case Distribute():
            gas = _PAYMENT_GAS + _PAYEE_GAS * len(call.nodes)
            return ledger.encode("distributePayments", job, call.epoch, call.nodes), gas
        case FundJob():
            return ledger.encode("fund", job, call.amount), _FUND_GAS
        case RequestReclaim() | Reclaim():
            name = "reclaim" if isinstance(call, Reclaim) else "requestReclaim"
            return ledger.encode(name, job), _RECLAIM_GAS


def record_data(signed: SignedReceipt, epoch: int) -> bytes:
    """Call data of `submitContribution`, which anybody may send."""
    return ledger_contract().encode(
        "submitContribution",
        receipt_tuple(signed.receipt),
        chain_form(signed.contribution_signature),
        chain_form(signed.signature),
        epoch,
    )


def receipt_tuple(receipt: Receipt) -> tuple[object, ...]:
    """A receipt as the contract's struct."""
    return (
        *(word_bytes(receipt.job), receipt.epoch, receipt.round, receipt.node, receipt.sequence),
        *(word_bytes(receipt.contribution), receipt.samples, receipt.quality_bps),
        *(word_bytes(receipt.evaluator), receipt.total_score),
    )


def _shortest_bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


log = structlog.get_logger()

_RAISE_PERCENT = 125
"""Chains take a replacement for a tenth more; a quarter overtakes a rising base fee."""


class UnsignedTransaction(NamedTuple):
    """A transaction that is wanted, before it has a nonce."""

    purpose: str
    job_id: JobId | None
    call: Call | None
    payload: Payload


class TransactionQueue:
    """Used by one task. Its rows in memory are those that are pending or not closed."""

    def __init__(
        self, chain: Ethereum, key: IdentityKey, profile: ChainProfile, store: PaymentStore
    ) -> None:
        self.account = AccountName(profile.chain_id, key.address)
        self.store = store
        self._chain = chain
        self._key = key
        self._profile = profile
        self._rules = OutboxRules(profile.depth, profile.bump_blocks)
        self._rows: dict[int, OutboxRow] = {}
        self._highest_nonce = 0
        self._view: OutboxView | None = None
        self._head: ChainBlock | None = None
        self._progress_block = 0
        """Last block in which transactions of the account were seen to be mined."""
        self._sent: set[bytes] = set()
        """Variants that the RPC was handed since the start."""
        self._reasons: dict[bytes, str] = {}

    @property
    def rows(self) -> Sequence[OutboxRow]:
        """Rows that are pending or not closed, by nonce."""
        return [self._rows[nonce] for nonce in sorted(self._rows)]

    @property
    def next_nonce(self) -> int | None:
        """Nonce of the next transaction; None while another program's are not final yet."""
        return None if self._view is None else next_nonce(self._highest_nonce, self._view)

    async def look(self, head: ChainBlock, *, is_reorganised: bool = False) -> list[OutboxRow]:
        """Read the account at a block.

        Args:
            head: The block of the tick.
            is_reorganised: Whether the block of the last tick left the chain.

        Returns:
            Rows that were found to be mined.

        Raises:
            ChainUnreachableError: The RPC does not answer; what was stored is true.
        """
        address, before = self.account.address, self._view
        nonce = await self._chain.next_nonce(address, head.number)
        if before is None or is_reorganised or nonce < before.nonce:
            stored = await asyncio.to_thread(self.store.open_rows, self.account, nonce)
            # Closed ones among them were final, and the chain has lost them.
            self._rows = {
                row.nonce: replace(row, inclusion=None, is_closed=row.is_abandoned)
                for row in stored
            }
            self._highest_nonce = await asyncio.to_thread(self.store.next_nonce, self.account)
            self._sent.clear()
        if before is None or nonce != before.nonce:
            self._progress_block = head.number
        self._head = head
        self._view = OutboxView(
            block=head.number,
            nonce=nonce,
            final_nonce=await self._final_nonce(head),
            balance_wei=await self._chain.balance_wei(address),
            idle_blocks=head.number - self._progress_block,
        )
        return await self._look_up(nonce)

    async def follow(self, views: Mapping[JobId, JobOnLedger]) -> Mapping[JobId | None, Halt]:
        """Close what is final, and send again what is to be.

        Args:
            views: Jobs on the ledger at the block that was looked at.

        Returns:
            The halt of each job that has one.
        """
        if self._view is None or self._head is None:
            return {}
        self._view = self._view._replace(reverted=await self._revert_reasons(views))
        actions = decide(self._rows.values(), self._view, self._rules)
        closed = [replace(self._rows[nonce], is_closed=True) for nonce in actions.close]
        raised = [
            self._row_with_higher_fee(self._rows[nonce], self._head) for nonce in actions.raise_fee
        ]
        await asyncio.to_thread(self.store.update_rows, self.account, [*closed, *raised])
        self._rows.update((row.nonce, row) for row in raised)
        for row in closed:
            del self._rows[row.nonce]
        await self.send([*(self._rows[nonce] for nonce in actions.send), *raised])
        return actions.halts

    async def add(self, wanted: Sequence[UnsignedTransaction], head: ChainBlock) -> list[OutboxRow]:
        """Sign transactions for the next nonces and store them; `send` is to follow."""
        nonce = self.next_nonce
        if not wanted or nonce is None:
            return []
        tip_wei = self._profile.tip_wei
        most_wei = min(2 * head.base_fee_wei + tip_wei, self._profile.max_fee_cap_wei)
        fee = TransactionFee(most_wei, min(tip_wei, most_wei))
        rows = [
            OutboxRow(
                nonce=at,
                purpose=each.purpose,
                job_id=each.job_id,
                call=each.call,
                variants=(self._sign(at, self._with_gas_limit(each.payload), fee, head),),
            )
            for at, each in enumerate(wanted, start=nonce)
        ]
        await asyncio.to_thread(self.store.add_rows, self.account, rows)
        self._rows.update((row.nonce, row) for row in rows)
        self._highest_nonce = nonce + len(rows)
        return rows

    def _with_gas_limit(self, payload: Payload) -> Payload:
        gas = payload.gas * self._profile.gas_percent // 100
        return payload._replace(gas=min(gas, self._profile.transaction_gas_max))

    async def send(self, rows: Sequence[OutboxRow]) -> None:
        """Hand the newest bytes of rows to the RPC, as many as the chain's pool holds.

        While transactions of the account are mined, the pool has those behind them.
        """
        if self._view is None:
            return
        end = self._view.nonce + self._profile.in_flight_max
        newest = {
            row.variants[-1].hash: row.variants[-1].raw
            for row in rows
            if row.nonce < end
            and (self._view.idle_blocks or row.variants[-1].hash not in self._sent)
        }
        complaints = await self._chain.send(list(newest.values()))
        self._sent.update(newest)
        if refused := Counter(complaint for complaint in complaints if complaint):
            log.warning("the RPC refused transactions", reasons=dict(refused))

    async def abandon(self, job_id: JobId) -> list[str]:
        """Clear a job's halt: what failed and what builds on it are abandoned, to be planned anew.

        Returns:
            Purposes of the rows that were abandoned.
        """
        if self._view is None:
            return []
        rows = [
            replace(self._rows[nonce], is_abandoned=True, is_closed=True)
            for nonce in nonces_to_retry(self.rows, job_id, self._view)
        ]
        await asyncio.to_thread(self.store.update_rows, self.account, rows)
        self._rows.update((row.nonce, row) for row in rows)
        return [row.purpose for row in rows]

    def is_sent(self, row: OutboxRow) -> bool:
        """Whether the RPC was handed a row's newest variant since the start."""
        return row.variants[-1].hash in self._sent

    async def _final_nonce(self, head: ChainBlock) -> int:
        """The account's nonce at the newest final block; 0 where the RPC lacks that block's state.

        A local chain that was started again does, and after some blocks has it.
        """
        height = max(0, head.number - self._rules.depth)
        try:
            return await self._chain.next_nonce(self.account.address, height)
        except CallRefusedError:
            return 0

    async def _look_up(self, nonce: int) -> list[OutboxRow]:
        self._rows = {at: row for at, row in self._rows.items() if at >= nonce or not row.is_closed}
        sought = [row for row in self.rows if row.nonce < nonce and row.inclusion is None]
        hashes = [variant.hash for row in sought for variant in row.variants]
        found = await self._chain.inclusions(hashes)
        mined = [
            replace(row, inclusion=found[variant.hash])
            for row in sought
            for variant in row.variants
            if variant.hash in found
        ]
        self._rows.update((row.nonce, row) for row in mined)
        self._sent.difference_update(variant.hash for row in mined for variant in row.variants)
        return mined

    async def _revert_reasons(self, views: Mapping[JobId, JobOnLedger]) -> dict[int, str]:
        """Reasons of reverted calls whose effect the ledger does not show, by nonce."""
        reasons = {}
        for row in self.rows:
            if row.inclusion is None or row.inclusion.is_success or row.is_closed:
                continue
            view = views.get(row.job_id) if row.job_id else None
            if row.call and view and is_in_effect(row.call, view):
                continue
            name = row.inclusion.hash
            if name not in self._reasons:
                self._reasons[name] = await self._chain.revert_reason(
                    ledger_contract(), name, row.inclusion.block
                )
            reasons[row.nonce] = self._reasons[name]
        return reasons

    def _row_with_higher_fee(self, row: OutboxRow, head: ChainBlock) -> OutboxRow:
        """The row with a variant that costs more; as it is where the fee cap is reached."""
        payload, fee = read_transaction(row.variants[-1].raw)
        tip_wei = fee.tip_wei * _RAISE_PERCENT // 100
        dearer = fee.most_wei * _RAISE_PERCENT // 100
        raised = TransactionFee(max(dearer, 2 * head.base_fee_wei + tip_wei), tip_wei)
        if raised.most_wei > self._profile.max_fee_cap_wei:
            log.warning("a transaction is stuck at the fee cap", purpose=row.purpose)
            return row
        return replace(row, variants=(*row.variants, self._sign(row.nonce, payload, raised, head)))

    def _sign(self, nonce: int, payload: Payload, fee: TransactionFee, head: ChainBlock) -> Variant:
        raw = sign_transaction(self._key, self.account.chain_id, nonce, payload, fee)
        return Variant(keccak(raw), raw, payload.gas * fee.most_wei, head.number)
