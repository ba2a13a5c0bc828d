"""A job's state on the ledger, read at the block of a tick in one request where the RPC allows.

Jobs are read at every new block, their nodes' accounts and the shares of epochs only where
something can have changed: after own transactions and reorganisations, when a challenge window has
passed, and every so many blocks, since nodes may force receipts in.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from hypergpu.ids import Address, JobId, NodeId
from hypergpu.statements.domain import address_bytes, word_bytes
from hypergpu.units import Wei
from payments.core.calls import AccountView, EpochView, JobOnLedger, ShareState, ShareView
from payments.core.ledger import LedgerState
from payments.shell.contracts import ledger_contract, token_contract
from payments.shell.ethereum import Block, Ethereum, View
from payments.shell.transactions import Target

_RESCAN_BLOCKS = 20


class _JobCache:
    """Last read of a job's accounts and epochs."""

    def __init__(self) -> None:
        self.accounts: dict[NodeId, AccountView] = {}
        self.epochs: dict[int, EpochView] = {}
        self.settled_below = 0
        """All epochs below this are closed without a share that is due."""
        self.dirty: set[int] = set()
        self.is_dirty = True
        self.free = -1
        self.scanned_at = -_RESCAN_BLOCKS


class LedgerReader:
    """Views of all jobs of one coordinator on one ledger."""

    def __init__(self, chain: Ethereum, target: Target, account: Address) -> None:
        self._chain = chain
        self._target = target
        self._account = account
        self._window_s = 0
        self._jobs: dict[JobId, _JobCache] = {}

    def invalidate(self, job_id: JobId, epochs: Iterable[int] = ()) -> None:
        """Read a job's accounts anew, and the shares of epochs that were touched."""
        cache = self._jobs.setdefault(job_id, _JobCache())
        cache.is_dirty = True
        cache.dirty.update(epochs)

    def invalidate_all(self) -> None:
        """Read everything anew, as after a reorganisation."""
        self._jobs.clear()

    async def read(self, states: Sequence[LedgerState], block: Block) -> dict[JobId, JobOnLedger]:
        """The view of each job at a block; none while the ledger is not in a block.

        Raises:
            ChainUnreachableError: The RPC does not answer, or not at this block.
        """
        if not self._window_s:
            if not await self._chain.code(self._target.ledger):
                return {}
            (self._window_s,) = await self._chain.read([self._ledger("CHALLENGE_WINDOW")], block)
        token = View(token_contract(), self._target.token, "balanceOf", (self._account,))
        jobs = [self._ledger("getJob", word_bytes(state.terms.job)) for state in states]
        balance, *found = await self._chain.read([token, *jobs], block)
        views: dict[JobId, JobOnLedger] = {}
        for state, job in zip(states, found, strict=True):
            cache = self._jobs.setdefault(state.job_id, _JobCache())
            if job is not None:
                # What left the escrow stands in an account: both are of one block, or a job would
                # seem to have lost money.
                cache.is_dirty |= job["free"] != cache.free
                cache.free = job["free"]
                await self._refresh(state, cache, block)
            views[state.job_id] = self._view(job, cache, block, balance)
        return views

    def _view(self, job: Any, cache: _JobCache, block: Block, balance: int) -> JobOnLedger:
        if job is None:
            return JobOnLedger(time_s=block.time_s, window_s=self._window_s, balance=Wei(balance))
        return JobOnLedger(
            time_s=block.time_s,
            window_s=self._window_s,
            balance=Wei(balance),
            is_open=True,
            unit_price=Wei(job["terms"]["unitPrice"]),
            free=Wei(job["free"]),
            next_sequence=job["nextSeq"],
            ends_at_s=job["endsAt"],
            accounts=dict(cache.accounts),
            epochs=dict(cache.epochs),
        )

    async def _refresh(self, state: LedgerState, cache: _JobCache, block: Block) -> None:
        is_scan = block.number >= cache.scanned_at + _RESCAN_BLOCKS
        if is_scan:
            cache.scanned_at = block.number
            # A node that forces receipts in may open the epoch after the last closed one.
            cache.dirty.update(range(cache.settled_below, state.ended_epochs + 2))
        if is_scan or cache.is_dirty:
            await self._read_accounts(state, cache, block)
        wanted = {
            epoch
            for epoch in cache.dirty | cache.epochs.keys()
            if epoch in cache.dirty or self._is_payable(cache.epochs[epoch], block)
        }
        if wanted:
            await self._read_epochs(state, cache, sorted(wanted), block)
        cache.is_dirty = False
        cache.dirty.clear()

    def _is_payable(self, epoch: EpochView, block: Block) -> bool:
        is_over = block.time_s >= epoch.closed_at_s + self._window_s
        return bool(epoch.closed_at_s) and is_over and bool(epoch.nodes_due())

    async def _read_accounts(self, state: LedgerState, cache: _JobCache, block: Block) -> None:
        job, nodes = word_bytes(state.terms.job), sorted(state.nodes)
        views = [self._ledger("getAccount", job, address_bytes(node)) for node in nodes]
        for node, found in zip(nodes, await self._chain.read(views, block), strict=True):
            cache.accounts[node] = AccountView(
                found["counted"], found["score"], Wei(found["earned"])
            )

    async def _read_epochs(
        self, state: LedgerState, cache: _JobCache, epochs: Sequence[int], block: Block
    ) -> None:
        job, nodes = word_bytes(state.terms.job), sorted(state.nodes)
        views = [self._ledger("getEpoch", job, epoch) for epoch in epochs]
        heads = await self._chain.read(views, block)
        recorded = [
            (epoch, head) for epoch, head in zip(epochs, heads, strict=True) if head["openedAt"]
        ]
        wanted = [
            self._ledger("getContribution", job, epoch, address_bytes(node))
            for epoch, _ in recorded
            for node in nodes
        ]
        shares = iter(await self._chain.read(wanted, block))
        for epoch, head in recorded:
            found = {node: _share(next(shares)) for node in nodes}
            recorded_shares = {
                node: share for node, share in found.items() if share.state is not ShareState.NONE
            }
            cache.epochs[epoch] = EpochView(head["openedAt"], head["closedAt"], recorded_shares)
        self._forget_settled(state, cache)

    def _forget_settled(self, state: LedgerState, cache: _JobCache) -> None:
        """Drop epochs that are closed and paid from the scans, from the lowest on."""
        while cache.settled_below < state.ended_epochs:
            epoch = cache.epochs.get(cache.settled_below)
            if epoch is None or not epoch.closed_at_s or epoch.nodes_due():
                return
            del cache.epochs[cache.settled_below]
            cache.settled_below += 1

    def _ledger(self, function: str, *arguments: object) -> View:
        return View(ledger_contract(), self._target.ledger, function, arguments)


def _share(found: Any) -> ShareView:
    return ShareView(ShareState(found["state"]), Wei(found["amount"]))
