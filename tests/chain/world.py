"""A coordinator's payments over a real Anvil whose blocks a test makes by hand."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.ours.metering.host import JOB, JobPlan, JournalHost
from hypergpu.crypto import IdentityKey
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger_terms import Terms, address_bytes, word_bytes
from payments.cli.account import ContractCall, Wallet
from payments.core.transactions import JobOnLedger
from payments.shell.anvil import Anvil
from payments.shell.chains import PaymentSettings, profile_of_id
from payments.shell.connection import ChainConnection
from payments.shell.ethereum import ContractView, Ethereum, ledger_contract, token_contract
from payments.shell.plugin import CoordinatorPayments
from payments.shell.projection import Projection
from payments.shell.settlement import Settler

STEPS_MOST = 60
STAKE = 10**12
WINDOW_S = 30


class OnChainPayments:
    """One coordinator, its chain and its jobs."""

    def __init__(self, folder: Path, anvil: Anvil, plan: JobPlan, **settings: str) -> None:
        self.folder = folder
        self.anvil = anvil
        self.plan = plan
        self.settings = {"chain_url": anvil.url, **settings}
        self.chain = Ethereum(anvil.url, profile_of_id(31_337)[0])
        self.host = JournalHost(folder)
        self.payments = self._new_payments()
        self.round = 0

    def _new_payments(self) -> CoordinatorPayments:
        return CoordinatorPayments(
            self.host, PaymentSettings.model_validate({"chain": "anvil", **self.settings})
        )

    @property
    def connection(self) -> ChainConnection:
        assert self.payments._connection is not None
        return self.payments._connection

    @property
    def settler(self) -> Settler:
        assert self.connection.settler is not None
        return self.connection.settler

    @property
    def projection(self) -> Projection:
        return self.payments._projection

    @property
    def view(self) -> JobOnLedger:
        return self.settler.views[self.plan.job_id]

    @property
    def terms(self) -> Terms:
        return self.payments.terms(self.plan.job_id, self.plan.spec.pay, self.plan.unit)

    async def begin(self) -> "OnChainPayments":
        """Start and have an open job on the ledger."""
        await self.payments.start()
        self.host.append(self.plan.job_id, self.plan.first_rows(self.terms))
        await self.until(lambda: self.view.is_open)
        return self

    async def restart(self, **settings: str) -> None:
        """Lose everything that is not stored, and start again."""
        await self.payments.stop()
        self.settings.update(settings)
        self.host = JournalHost(self.folder)
        self.payments = self._new_payments()
        await self.payments.start()

    def work(self, rounds: int = 1, keys: Sequence[IdentityKey] | None = None) -> None:
        """Journal rounds in which every node's update is accepted."""
        terms = self.projection.states[self.plan.job_id].terms
        rows = [self.plan.round_row(self.round + number, terms, keys) for number in range(rounds)]
        self.round += rounds
        self.host.append(self.plan.job_id, rows)

    async def step(self) -> None:
        """Fold what is new, and look at the chain once."""
        await self.projection.advance()
        await self.connection.tick(has_receipts=True)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Step and make a block until something is so."""
        for _ in range(STEPS_MOST):
            await self.step()
            if self.plan.job_id in self.settler.views and is_reached():
                return
            await self.mine()
        halts = self.settler.halts
        raise AssertionError(f"not reached: {halts}, {self.connection.complaint}, {self.view}")

    async def settle_rows(self) -> None:
        """Step until everything that is planned is in a block."""
        await self.step()
        await self.until(lambda: not self.waiting_rows())

    async def settle(self) -> None:
        """Step until all is paid, and every window has passed."""
        await self.until(lambda: not self.waiting_rows())
        for _ in range(STEPS_MOST):
            if self.plan.job_id in self.settler._settled:
                return
            await self.pass_time(WINDOW_S + 1)
            await self.until(lambda: not self.waiting_rows())
        raise AssertionError(f"not settled: {self.view}")

    def waiting_rows(self) -> list[str]:
        """Purposes that are in no block."""
        return [row.purpose for row in self.connection.queue.rows if row.inclusion is None]

    async def mine(self, blocks: int = 1) -> None:
        """Make blocks."""
        for _ in range(blocks):
            await self.chain.ask("evm_mine")

    async def pass_time(self, seconds: int) -> None:
        """Make a block that is so much later."""
        await self.chain.ask("evm_increaseTime", seconds)
        await self.mine()

    async def reorganise(self, depth: int) -> None:
        """Replace the newest blocks by empty ones."""
        await self.chain.ask("anvil_reorg", depth, [])

    async def stake(self, keys: Sequence[IdentityKey], amount: int = STAKE) -> None:
        """Register nodes with stake."""
        await self.chain.ask("evm_setAutomine", True)
        for key in keys:
            wallet = await self.wallet(key)
            ledger, token = self.connection.addresses
            meta = (bytes(32), bytes(32), 8_192)
            calls = [
                ContractCall(
                    token_contract(), token, token_contract().encode("mint", key.address, amount)
                ),
                ContractCall(
                    token_contract(), token, token_contract().encode("approve", ledger, amount)
                ),
                ContractCall(
                    ledger_contract(),
                    ledger,
                    ledger_contract().encode("registerNode", meta, amount),
                ),
            ]
            for call in calls:
                await wallet.send(call)
        await self.chain.ask("evm_setAutomine", False)

    async def wallet(self, key: IdentityKey) -> Wallet:
        """A wallet with gas money."""
        await self.chain.ask("anvil_setBalance", key.address, hex(10**21))
        return Wallet(self.chain, key)

    async def balances(self) -> dict[NodeId, int]:
        """Tokens in the wallet of each node."""
        token = self.connection.addresses.token
        keys = self.plan.keys
        views = [ContractView(token_contract(), token, "balanceOf", (key.address,)) for key in keys]
        return {
            key.node_id: balance
            for key, balance in zip(keys, await self.chain.read(views), strict=True)
        }

    async def account(self, node: NodeId, job_id: JobId = JOB) -> dict[str, Any]:
        """A node's account in the job, read afresh."""
        job = word_bytes(self.projection.states[job_id].terms.job)
        view = ContractView(
            ledger_contract(),
            self.connection.addresses.ledger,
            "getAccount",
            (job, address_bytes(node)),
        )
        (answer,) = await self.chain.read([view])
        account: dict[str, Any] = answer
        return account

    async def close(self) -> None:
        """Stop the payments."""
        await self.payments.stop()
        await self.chain.close()


@asynccontextmanager
async def open_payments_on_chain(
    folder: Path, anvil: Anvil, plan: JobPlan, **settings: str
) -> AsyncIterator[OnChainPayments]:
    """A world whose job is open."""
    world = OnChainPayments(folder, anvil, plan, **settings)
    try:
        yield await world.begin()
    finally:
        await world.close()
