"""The chain that a coordinator settles on: found, checked, made ready, and asked at every tick."""

import asyncio

import msgspec
import structlog

from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import CoordinatorHost
from hypergpu.ids import Address
from hypergpu.statements.domain import ZERO_ADDRESS, Domain
from payments.shell.anvil import KeptAnvil
from payments.shell.chain_errors import ChainUnreachableError
from payments.shell.chains import NamedChain, named_chain, profile_of_id
from payments.shell.config import PaymentSettings
from payments.shell.contracts import created_address, token_contract
from payments.shell.deployment import (
    LEDGER_PURPOSE,
    check_chain,
    plan_local_deployment,
    provide_gas_money,
    recognise_ledger,
)
from payments.shell.ethereum import Ethereum, View
from payments.shell.outbox import Planned, Queue
from payments.shell.projection import Projection
from payments.shell.settler import Settler
from payments.shell.store import Change, Store
from payments.shell.transactions import Target

log = structlog.get_logger()

_POLL_LEAST_S, _POLL_MOST_S = 0.1, 2.0
_FOLDER = "chain"


class Connection:
    """One chain with its ledger. Used on the event loop."""

    def __init__(
        self, host: CoordinatorHost, store: Store, settings: PaymentSettings, named: NamedChain
    ) -> None:
        """Take up what is stored about the chain. Blocks."""
        self._host = host
        self._store = store
        self._settings = settings
        self.profile = named.profile
        self.url = named.url
        self.notes = [named.note] if named.note else []
        self.complaint = ""
        """Why the chain is not settled on now; empty: it is."""
        self.chain = Ethereum.of(self.url, self.profile)
        self.queue = Queue(self.chain, host.key, self.profile, store)
        self.target = self._known_target()
        self.settler: Settler | None = None
        self.decimals = 6
        """Decimals of the ledger's token."""
        self._is_ready = False

    @property
    def domain(self) -> Domain:
        """The ledger that statements are for; chain 0 while none is known."""
        known = self.target.ledger != ZERO_ADDRESS
        return Domain(self.profile.chain_id, self.target.ledger) if known else Domain()

    @property
    def poll_s(self) -> float:
        """Time between two looks for a new block."""
        return min(_POLL_MOST_S, max(_POLL_LEAST_S, self.profile.block_ms / 5_000))

    async def make_ready(self, projection: Projection) -> None:
        """Check the chain and see that there is a ledger; once only.

        Raises:
            HyperGPUError: The chain or the contract is another one, or the ledger is unknown.
            ChainUnreachableError: The RPC does not answer.
        """
        if self._is_ready:
            return
        await check_chain(self.chain, self.profile)
        account = self._host.key.address
        self.complaint = await provide_gas_money(self.chain, account, self.profile)
        if self.target.ledger == ZERO_ADDRESS:
            await self._deploy()
        elif self.target.token == ZERO_ADDRESS or not self.profile.is_local:
            self.target = await recognise_ledger(self.chain, self.domain)
            view = View(token_contract(), self.target.token, "decimals")
            (self.decimals,) = await self.chain.read([view])
        self._keep_target()
        self.settler = Settler(
            self._host,
            projection,
            self.queue,
            (self.chain, self.target),
            is_each=self._settings.metering == "each",
        )
        projection.note_receipts = self.settler.note_receipts
        self._is_ready = True

    async def tick(self, projection: Projection, *, has_receipts: bool) -> None:
        """Look and act once, whatever the chain does meanwhile."""
        await self.make_ready(projection)
        if self.settler is None:
            return
        account = self._host.key.address
        await self.settler.tick(has_receipts=has_receipts)
        halt = self.settler.halts.get(None)
        self.complaint = f"{halt.kind.value}: {halt.reason}. Fix: {halt.fix}" if halt else ""
        if halt and self.profile.is_local:
            # A local chain that lost its newest state has lost its play money with it.
            await provide_gas_money(self.chain, account, self.profile)

    async def retry_all(self) -> None:
        """Clear every halt."""
        if self.settler is not None:
            for job_id in [each for each in self.settler.halts if each is not None]:
                given_up = await self.settler.retry(job_id)
                log.warning("a halt is cleared", job=job_id, given_up=given_up)

    async def start_over(self) -> None:
        """Forget what is in memory after an error of the database."""
        self._is_ready = False
        self.queue = await asyncio.to_thread(
            Queue, self.chain, self._host.key, self.profile, self._store
        )

    async def close(self) -> None:
        """Close the connections to the RPC."""
        await self.chain.close()

    async def _deploy(self) -> None:
        account = self._host.key.address
        if not self.profile.is_local:
            raise HyperGPUError(
                Reason.LEDGER_WRONG,
                f"no ledger is named on chain {self.profile.chain_id}",
                fix="HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS; or deploy one: hypergpu ledger"
                " deploy",
            )
        head = await self.chain.head()
        nonce = await self.queue.prepare(head)
        deployment = plan_local_deployment(account, nonce, self.profile)
        # Known before it is sent: a kill in between sends the same bytes to the same addresses.
        self.target = deployment.target
        wanted = [Planned(purpose, None, None, made) for purpose, made in deployment.payloads]
        await self.queue.send(await self.queue.add(wanted, head), head)

    def _known_target(self) -> Target:
        named = Address(self._settings.ledger_contract)
        stored = self._store.value(self._target_name)
        known = msgspec.json.decode(stored, type=Target) if stored else None
        if known is None and (row := self._store.row(self.queue.account, LEDGER_PURPOSE)):
            # A kill came between the transactions and the note of what they create.
            account = self._host.key.address
            ledger, token = (created_address(account, row.nonce - each) for each in (0, 1))
            known = Target(ledger, token)
        if known and named in {"", known.ledger}:
            return known
        return Target(named or ZERO_ADDRESS, ZERO_ADDRESS)

    def _keep_target(self) -> None:
        value = msgspec.json.encode(self.target)
        self._store.write(Change(values={self._target_name: value}))

    @property
    def _target_name(self) -> str:
        return f"ledger/{self.profile.chain_id}"


async def open_local_chain(host: CoordinatorHost, settings: PaymentSettings) -> KeptAnvil:
    """Start the Anvil of a coordinator.

    Raises:
        HyperGPUError: MACHINE_UNFIT, Anvil is not installed or does not start.
    """
    folder = host.data_dir / _FOLDER
    anvil = await asyncio.to_thread(KeptAnvil, folder, settings.chain_port)
    await anvil.start()
    return anvil


async def find_chain(settings: PaymentSettings, store: Store) -> NamedChain:
    """The chain that the settings name. An RPC's address is asked for its chain.

    One that does not answer is taken for the chain that it was before.

    Raises:
        HyperGPUError: ARGUMENT_INVALID or FILE_UNUSABLE, the settings name no chain;
            CHAIN_UNREACHABLE, an RPC that was never asked before does not answer.
    """
    named = named_chain(settings.chain, settings.chain_url)
    if named is not None:
        return named
    url = settings.chain_url or settings.chain
    name = f"chain/{digest_of(url.encode())}"
    chain = Ethereum(url)
    try:
        chain_id = await chain.chain_id()
        store.write(Change(values={name: str(chain_id).encode()}))
    except ChainUnreachableError as away:
        known = store.value(name)
        if not known:
            raise HyperGPUError(Reason.CHAIN_UNREACHABLE, str(away)) from None
        chain_id = int(known)
    finally:
        await chain.close()
    profile, note = profile_of_id(chain_id)
    return NamedChain(profile, url, note)
