"""The ledger's state at one block, which is the view of a tick: one request where the RPC allows.

Jobs are read at every new block, their nodes' accounts and the shares of epochs only where
something can have changed: after own transactions and reorganisations, when a challenge window has
passed, and every so many blocks, since nodes may force receipts in.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from hypergpu.ids import Address, JobId, JobKey, NodeId
from hypergpu.ledger_terms import word_bytes
from hypergpu.units import Wei
from payments.core.ledger import LedgerState
from payments.core.transactions import AccountView, EpochView, JobOnLedger, ShareState, ShareView
from payments.shell.ethereum import (
    ChainBlock,
    ContractView,
    Ethereum,
    ledger_contract,
    token_contract,
)
from payments.shell.signing import LedgerAddresses

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

    def __init__(self, chain: Ethereum, target: LedgerAddresses, account: Address) -> None:
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

    async def read(
        self, states: Sequence[LedgerState], block: ChainBlock
    ) -> dict[JobId, JobOnLedger]:
        """The view of each job at a block; none while the ledger is not in a block.

        Raises:
            ChainUnreachableError: The RPC does not answer, or not at this block.
        """
        if not self._window_s:
            if not await self._chain.code(self._target.ledger):
                return {}
            (self._window_s,) = await self._chain.read([self._ledger("CHALLENGE_WINDOW")], block)
        token = ContractView(token_contract(), self._target.token, "balanceOf", (self._account,))
        jobs = [self._ledger("getJob", word_bytes(state.terms.job)) for state in states]
        balance, *job_answers = await self._chain.read([token, *jobs], block)
        views: dict[JobId, JobOnLedger] = {}
        for state, job in zip(states, job_answers, strict=True):
            cache = self._jobs.setdefault(state.job_id, _JobCache())
            if job is not None:
                # What left the escrow stands in an account: both are of one block, or a job would
                # seem to have lost money.
                cache.is_dirty |= job["free"] != cache.free
                cache.free = job["free"]
                await self._refresh(state, cache, block)
            views[state.job_id] = job_on_ledger(job, block, self._window_s, balance)._replace(
                accounts=dict(cache.accounts),
                epochs=dict(cache.epochs),
                paid_below=cache.settled_below,
            )
        return views

    async def _refresh(self, state: LedgerState, cache: _JobCache, block: ChainBlock) -> None:
        is_scan = block.number >= cache.scanned_at + _RESCAN_BLOCKS
        if is_scan:
            cache.scanned_at = block.number
            # A node that forces receipts in may open the epoch after the last closed one.
            cache.dirty.update(range(cache.settled_below, state.ended_epochs + 2))
        reader = JobReader(self._chain, self._target.ledger, state.terms.job, block)
        nodes = sorted(state.nodes)
        if is_scan or cache.is_dirty:
            cache.accounts.update(await reader.accounts(nodes))
        stale_epochs = {
            epoch
            for epoch in cache.dirty | cache.epochs.keys()
            if epoch in cache.dirty or self._is_payable(cache.epochs[epoch], block)
        }
        if stale_epochs:
            cache.epochs.update(await reader.epochs(sorted(stale_epochs), nodes))
            self._forget_settled(state, cache)
        cache.is_dirty = False
        cache.dirty.clear()

    def _is_payable(self, epoch: EpochView, block: ChainBlock) -> bool:
        is_over = block.time_s >= epoch.closed_at_s + self._window_s
        return bool(epoch.closed_at_s) and is_over and bool(epoch.nodes_due())

    def _forget_settled(self, state: LedgerState, cache: _JobCache) -> None:
        """Drop epochs that are closed and paid from the scans, from the lowest on."""
        while cache.settled_below < state.ended_epochs:
            epoch = cache.epochs.get(cache.settled_below)
            if epoch is None or not epoch.closed_at_s or epoch.nodes_due():
                return
            del cache.epochs[cache.settled_below]
            cache.settled_below += 1

    def _ledger(self, function: str, *arguments: object) -> ContractView:
        return ContractView(ledger_contract(), self._target.ledger, function, arguments)


class JobReader:
    """Views of one job at one block."""

    def __init__(self, chain: Ethereum, ledger: Address, job: JobKey, block: ChainBlock) -> None:
        self._chain, self._ledger, self._block = chain, ledger, block
        self._job = word_bytes(job)

    async def accounts(self, nodes: Sequence[NodeId]) -> dict[NodeId, AccountView]:
        """The account of each node."""
        accounts = await self._read_all("getAccount", [(node,) for node in nodes])
        return {
            node: AccountView(each["counted"], each["score"], Wei(each["earned"]))
            for node, each in zip(nodes, accounts, strict=True)
        }

    async def epochs(self, epochs: Sequence[int], nodes: Sequence[NodeId]) -> dict[int, EpochView]:
        """Each epoch that has a record, with the shares of nodes in it."""
        heads = await self._read_all("getEpoch", [(epoch,) for epoch in epochs])
        heads_by_epoch = {
            epoch: head for epoch, head in zip(epochs, heads, strict=True) if head["openedAt"]
        }
        pairs = [(epoch, node) for epoch in heads_by_epoch for node in nodes]
        shares: dict[int, dict[NodeId, ShareView]] = {epoch: {} for epoch in heads_by_epoch}
        for (epoch, node), share in zip(
            pairs, await self._read_all("getContribution", pairs), strict=True
        ):
            if share["state"] != ShareState.NONE.value:
                shares[epoch][node] = ShareView(ShareState(share["state"]), Wei(share["amount"]))
        return {
            epoch: EpochView(head["openedAt"], head["closedAt"], shares[epoch])
            for epoch, head in heads_by_epoch.items()
        }

    async def _read_all(self, function: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        contract = ledger_contract()
        views = [
            ContractView(contract, self._ledger, function, (self._job, *each)) for each in arguments
        ]
        return await self._chain.read(views, self._block)


def job_on_ledger(job: Any, block: ChainBlock, window_s: int, balance: int = 0) -> JobOnLedger:
    """A job without its accounts and epochs, as ``getJob`` answers; None: it is not open."""
    view = JobOnLedger(time_s=block.time_s, window_s=window_s, balance=Wei(balance))
    if job is None:
        return view
    return view._replace(
        is_open=True,
        unit_price=Wei(job["terms"]["unitPrice"]),
        free=Wei(job["free"]),
        next_sequence=job["nextSeq"],
        ends_at_s=job["endsAt"],
    )
