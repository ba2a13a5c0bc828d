"""The queue of one key's transactions: signed, stored, sent, and followed until final.

`payments.core.transactions` decides; this file looks at the chain, signs, stores and sends. Bytes
are stored before anybody sees them, so a kill at any instant loses nothing: the next tick sends the
same bytes again.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from hypergpu.crypto import IdentityKey, keccak
from hypergpu.ids import JobId
from payments.core.transactions import (
    ChainCall,
    Halt,
    JobOnLedger,
    OutboxRow,
    OutboxRules,
    OutboxView,
    Variant,
    decide,
    is_in_effect,
    next_nonce,
    nonces_to_retry,
)
from payments.shell.chains import CallRefusedError, ChainProfile
from payments.shell.ethereum import ChainBlock, Ethereum, ledger_contract
from payments.shell.signing import Payload, TransactionFee, read_transaction, sign_transaction
from payments.shell.store import AccountName, PaymentStore

log = structlog.get_logger()

_RAISE_PERCENT = 125
"""Chains take a replacement for a tenth more; a quarter overtakes a rising base fee."""


class UnsignedTransaction(NamedTuple):
    """A transaction that is wanted, before it has a nonce."""

    purpose: str
    job_id: JobId | None
    call: ChainCall | None
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
            stored_rows = await asyncio.to_thread(self.store.open_rows, self.account, nonce)
            # Closed ones among them were final, and the chain has lost them.
            self._rows = {
                row.nonce: replace(row, inclusion=None, is_closed=row.is_abandoned)
                for row in stored_rows
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
        closed_rows = [replace(self._rows[nonce], is_closed=True) for nonce in actions.close]
        raised_rows = [
            self._row_with_higher_fee(self._rows[nonce], self._head) for nonce in actions.raise_fee
        ]
        await asyncio.to_thread(self.store.update_rows, self.account, [*closed_rows, *raised_rows])
        self._rows.update((row.nonce, row) for row in raised_rows)
        for row in closed_rows:
            del self._rows[row.nonce]
        await self.send([*(self._rows[nonce] for nonce in actions.send), *raised_rows])
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
        if refusals := Counter(complaint for complaint in complaints if complaint):
            log.warning("the RPC refused transactions", reasons=dict(refusals))

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
        open_rows = [row for row in self.rows if row.nonce < nonce and row.inclusion is None]
        hashes = [variant.hash for row in open_rows for variant in row.variants]
        inclusions = await self._chain.inclusions(hashes)
        mined_rows = [
            replace(row, inclusion=inclusions[variant.hash])
            for row in open_rows
            for variant in row.variants
            if variant.hash in inclusions
        ]
        self._rows.update((row.nonce, row) for row in mined_rows)
        self._sent.difference_update(variant.hash for row in mined_rows for variant in row.variants)
        return mined_rows

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
        raised_fee = TransactionFee(max(dearer, 2 * head.base_fee_wei + tip_wei), tip_wei)
        if raised_fee.most_wei > self._profile.max_fee_cap_wei:
            log.warning("a transaction is stuck at the fee cap", purpose=row.purpose)
            return row
        return replace(
            row, variants=(*row.variants, self._sign(row.nonce, payload, raised_fee, head))
        )

    def _sign(self, nonce: int, payload: Payload, fee: TransactionFee, head: ChainBlock) -> Variant:
        raw = sign_transaction(self._key, self.account.chain_id, nonce, payload, fee)
        return Variant(keccak(raw), raw, payload.gas * fee.most_wei, head.number)
