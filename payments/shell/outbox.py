"""The queue of one key's transactions: signed, stored, sent, and followed until they are final.

`payments.core.outbox` decides; this file looks at the chain, signs, stores and sends. Bytes are
stored before anybody sees them, so a kill at any instant loses nothing: the next tick sends the
same bytes again.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from hypergpu.ids import JobId
from hypergpu.keys.signature import IdentityKey
from payments.core import outbox
from payments.core.calls import Call, JobOnLedger, is_in_effect
from payments.core.outbox import (
    Action,
    Failure,
    FindFailure,
    Halt,
    MarkFinal,
    MarkMined,
    MarkUnmined,
    OutboxRow,
    OutboxRules,
    OutboxView,
    RaiseFee,
    SendAgain,
    Variant,
    decide,
    halted_jobs,
)
from payments.shell.chain_errors import CallRefusedError, ChainUnreachableError
from payments.shell.chains import ChainProfile
from payments.shell.contracts import ledger_contract
from payments.shell.ethereum import (
    Block,
    Draft,
    Ethereum,
    MinedPlace,
    read_transaction,
    sign_transaction,
)
from payments.shell.store import AccountName, Store
from payments.shell.transactions import Payload

log = structlog.get_logger()

_RAISE_PERCENT = 125
"""Chains take a replacement for a tenth more; a quarter overtakes a rising base fee."""


class Planned(NamedTuple):
    """A transaction that is wanted, before it has a nonce."""

    purpose: str
    job_id: JobId | None
    call: Call | None
    payload: Payload


class Changes(NamedTuple):
    """What a tick found."""

    halts: Mapping[JobId | None, Halt]
    moved: Sequence[OutboxRow]
    """Rows that came into a block, left one, or are final now."""


class _Seen(NamedTuple):
    """The account's nonce at a block that was looked at."""

    block: Block
    nonce: int


FindView = Callable[[OutboxRow], Awaitable[JobOnLedger | None]]


class Queue:
    """Used by one task. Its rows in memory are those of the store that are not final."""

    def __init__(self, chain: Ethereum, key: IdentityKey, profile: ChainProfile, store: Store):
        """Take up the stored rows. Blocks."""
        self.account = AccountName(profile.chain_id, key.address)
        self._chain = chain
        self._key = key
        self._profile = profile
        self.store = store
        self._rules = OutboxRules(profile.depth, profile.bump_blocks)
        self._rows = {row.nonce: row for row in store.open_rows(self.account)}
        self._stored_nonce = store.next_nonce(self.account)
        self._view: OutboxView | None = None
        self._seen: list[_Seen] = []
        self._progress_block = 0
        """Last block in which transactions of the account were seen to be mined."""

    @property
    def rows(self) -> Sequence[OutboxRow]:
        """Rows that are not final, by nonce."""
        return [self._rows[nonce] for nonce in sorted(self._rows)]

    async def prepare(self, head: Block) -> int:
        """Read the account at a block. Returns the nonce of the next transaction.

        Raises:
            ChainUnreachableError: Transactions of another program are not final yet.
        """
        self._view = await self._read(head)
        nonce = self._next_nonce(self._view)
        if nonce is None:
            raise ChainUnreachableError("the account's newest transactions are not final yet")
        return nonce

    async def look(self, head: Block, find_view: FindView) -> Changes:
        """Follow every transaction at a block, and send again what is to be.

        Args:
            head: The block of the tick.
            find_view: Reads a job on the ledger at that block, after the call that it is given.

        Raises:
            ChainUnreachableError: The RPC does not answer; what was stored is true.
        """
        await self._reopen(await self._chain.next_nonce(self.account.address, head))
        before, view = self._view, await self._read(head)
        if before is None or view.nonce != before.nonce:
            self._progress_block = head.number
        self._view = view
        actions = decide(self.rows, view, self._rules)
        moved = [await self._marked(action, find_view) for action in actions]
        changed = [row for row in moved if row is not None]
        final = {action.nonce for action in actions if isinstance(action, MarkFinal)}
        await asyncio.to_thread(self._keep, changed, final)
        await self._send_due(actions, head)
        return Changes(halted_jobs(decide(self.rows, view, self._rules)), changed)

    async def add(self, wanted: Sequence[Planned], head: Block) -> list[OutboxRow]:
        """Sign transactions for the next nonces and store them; `send` is to follow."""
        nonce = None if self._view is None else self._next_nonce(self._view)
        if not wanted or nonce is None:
            return []
        tip_wei = self._profile.tip_wei
        max_fee_wei = min(2 * head.base_fee_wei + tip_wei, self._profile.max_fee_cap_wei)
        rows = [
            OutboxRow(
                nonce=nonce + place,
                purpose=each.purpose,
                job_id=each.job_id,
                call=each.call,
                variants=(self._sign(nonce + place, each.payload, (max_fee_wei, tip_wei), head),),
            )
            for place, each in enumerate(wanted)
        ]
        await asyncio.to_thread(self.store.add_rows, self.account, rows)
        self._rows.update((row.nonce, row) for row in rows)
        self._stored_nonce = nonce + len(rows)
        return rows

    async def abandon(self, job_id: JobId) -> list[str]:
        """Clear a job's halt: what failed and what builds on it are given up, to be planned anew.

        Returns:
            Purposes of the rows that were given up.
        """
        if self._view is None:
            return []
        halting = outbox.halting_rows(self.rows, self._view)
        own = [nonce for nonce in halting if self._rows[nonce].job_id == job_id]
        nonces = outbox.abandoned_by_retry(self.rows, job_id, own)
        rows = [replace(self._rows[nonce], is_abandoned=True) for nonce in nonces]
        await asyncio.to_thread(self._keep, rows, set())
        return [row.purpose for row in rows]

    def _next_nonce(self, view: OutboxView) -> int | None:
        """Nonce for a new row; None while a stranger's transaction on top is not final."""
        own = max([self._stored_nonce, *(nonce + 1 for nonce in self._rows)])
        return own if view.nonce <= own else outbox.next_nonce(self.rows, view)

    async def _reopen(self, nonce: int) -> None:
        """Take up final rows again that the chain no longer has.

        A reorganisation deeper than the profile's depth does that, and a local chain whose newest
        state was lost: the same bytes are sent again.
        """
        first_open = min(self._rows, default=self._stored_nonce)
        if nonce >= first_open:
            return
        log.warning("the chain lost final transactions: they are sent again", first=nonce)
        lost = await asyncio.to_thread(self.store.rows_from, self.account, nonce)
        rows = [
            replace(row, inclusion=None, failure=None, sent_at_block=-1)
            for row in lost
            if row.nonce < first_open
        ]
        await asyncio.to_thread(self._keep, rows, set())

    async def _read(self, head: Block) -> OutboxView:
        address = self.account.address
        if not self._seen:
            self._seen = await self._look_back(head)
        heights = {row.inclusion.block for row in self._rows.values() if row.inclusion}
        heights |= {seen.block.number for seen in self._seen}
        heights = {height for height in heights if height <= head.number}
        nonce = await self._chain.next_nonce(address, head)
        blocks = await self._chain.blocks(sorted(heights))
        if any(block is None for block in blocks):
            raise ChainUnreachableError(
                f"the chain's RPC at {self._chain.where} lacks a block below its newest"
            )
        sought = [
            variant.hash
            for row in self._rows.values()
            if row.inclusion is None and row.nonce < nonce
            for variant in row.variants
        ]
        hashes = {block.number: block.hash for block in blocks if block}
        places = zip(sought, await self._chain.inclusions(sought), strict=True)
        return OutboxView(
            block=head.number,
            nonce=nonce,
            final_nonce=self._final_nonce(_Seen(head, nonce), hashes),
            block_hashes=hashes,
            inclusions={
                name: _included(name, place)
                for name, place in places
                if place is not None and place.block_number <= head.number
            },
            balance_wei=await self._chain.balance_wei(address),
        )

    async def _look_back(self, head: Block) -> list[_Seen]:
        """The account at the newest final block, where the RPC still has that block's state."""
        (deep,) = await self._chain.blocks([max(0, head.number - self._rules.depth)])
        with suppress(CallRefusedError):
            if deep is not None:
                return [_Seen(deep, await self._chain.next_nonce(self.account.address, deep))]
        return []

    def _final_nonce(self, now: _Seen, hashes: Mapping[int, bytes]) -> int:
        """Nonce at the newest deep block that was looked at.

        Asking for it at an old block needs an RPC that keeps old states.
        """
        still = [seen for seen in self._seen if hashes.get(seen.block.number) == seen.block.hash]
        deep = [seen for seen in still if now.block.number - seen.block.number >= self._rules.depth]
        self._seen = [*deep[-1:], *still[len(deep) :], now]
        return deep[-1].nonce if deep else 0

    async def _marked(self, action: Action, find_view: FindView) -> OutboxRow | None:
        """The row after an action that only changes what is stored of it."""
        match action:
            case MarkMined(nonce, inclusion):
                return replace(self._rows[nonce], inclusion=inclusion, failure=None)
            case MarkUnmined(nonce):
                return replace(self._rows[nonce], inclusion=None, failure=None, sent_at_block=-1)
            case MarkFinal(nonce):
                return self._rows[nonce]
            case FindFailure(nonce):
                return await self._failed(self._rows[nonce], find_view)
            case _:
                return None

    async def _failed(self, row: OutboxRow, find_view: FindView) -> OutboxRow:
        view = await find_view(row) if row.call and row.job_id else None
        is_present = bool(row.call and view and is_in_effect(row.call, view))
        reason = row.failure.reason if row.failure else ""
        if row.inclusion and not reason:
            contract, block = ledger_contract(), row.inclusion.block
            reason = await self._chain.revert_reason(contract, row.inclusion.hash, block)
        return replace(row, failure=Failure(is_present, reason))

    def _keep(self, rows: Sequence[OutboxRow], final: Collection[int]) -> None:
        self.store.update_rows(self.account, rows, final)
        for row in rows:
            self._rows[row.nonce] = row
        for nonce in final:
            del self._rows[nonce]

    async def _send_due(self, actions: Iterable[Action], head: Block) -> None:
        """Repeat what the pool may have lost, and raise fees where nothing goes forward.

        While transactions of the account are mined, the pool has those behind them.
        """
        idle_blocks = head.number - self._progress_block
        rows = []
        for action in actions:
            if isinstance(action, RaiseFee) and idle_blocks >= self._rules.bump_blocks:
                rows.append(self._raised(self._rows[action.nonce], head))
            elif isinstance(action, RaiseFee | SendAgain):
                row = self._rows[action.nonce]
                if idle_blocks or row.sent_at_block < 0:
                    rows.append(row)
        await asyncio.to_thread(self._keep, rows, set())
        await self.send(rows, head)

    def _raised(self, row: OutboxRow, head: Block) -> OutboxRow:
        """The row with a variant that costs more; as it is where the fee cap is reached."""
        newest = row.variants[-1]
        tip_wei = newest.tip_wei * _RAISE_PERCENT // 100
        dearer = newest.max_fee_wei * _RAISE_PERCENT // 100
        max_fee_wei = max(dearer, 2 * head.base_fee_wei + tip_wei)
        if max_fee_wei > self._profile.max_fee_cap_wei:
            log.warning("a transaction is stuck at the fee cap", purpose=row.purpose)
            return row
        draft = read_transaction(newest.raw)
        payload = Payload(draft.to, draft.data, draft.gas)
        fresh = self._sign(row.nonce, payload, (max_fee_wei, tip_wei), head)
        return replace(row, variants=(*row.variants, fresh))

    async def send(self, rows: Sequence[OutboxRow], head: Block) -> None:
        """Hand the newest bytes of rows to the RPC, as many as the chain's pool holds."""
        room = 0 if self._view is None else self._view.nonce + self._profile.in_flight_max
        fitting = [row for row in rows if row.nonce < room]
        if not fitting:
            return
        complaints = await self._chain.send([row.variants[-1].raw for row in fitting])
        for row in fitting:
            self._rows[row.nonce] = replace(self._rows[row.nonce], sent_at_block=head.number)
        if refused := Counter(complaint for complaint in complaints if complaint):
            log.warning("the RPC refused transactions", said=dict(refused))

    def _sign(self, nonce: int, payload: Payload, fee: tuple[int, int], head: Block) -> Variant:
        max_fee_wei, tip_wei = fee
        draft = Draft(
            chain_id=self.account.chain_id,
            nonce=nonce,
            to=payload.to,
            data=payload.data,
            gas=min(payload.gas, self._profile.transaction_gas_max),
            max_fee_wei=max_fee_wei,
            tip_wei=min(tip_wei, max_fee_wei),
        )
        signed = sign_transaction(self._key, draft)
        return Variant(signed.hash, signed.raw, max_fee_wei, tip_wei, draft.gas, head.number)


def _included(name: bytes, place: MinedPlace) -> outbox.Inclusion:
    return outbox.Inclusion(name, place.block_number, place.block_hash, place.is_success)
