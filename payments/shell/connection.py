"""The chain that a coordinator settles on: found, made ready, and asked at every tick.

On a local chain the account is filled from nothing, and test token and ledger are the first
transactions of the coordinator's queue, so that their addresses are known before they are mined.
"""

import msgspec
import structlog

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import CoordinatorHost
from hypergpu.ids import Address
from hypergpu.ledger_terms import ZERO_ADDRESS, Domain
from payments.shell.chains import (
    ChainUnreachableError,
    NamedChain,
    PaymentSettings,
    named_chain,
    profile_of_id,
)
from payments.shell.ethereum import ContractView, Ethereum, created_address, token_contract
from payments.shell.ledger_choice import (
    LEDGER_PURPOSE,
    LOCAL_WEI,
    check_chain,
    plan_local_deployment,
    recognise_ledger,
)
from payments.shell.projection import Projection
from payments.shell.settlement import Settler
from payments.shell.signing import LedgerAddresses
from payments.shell.store import PaymentStore
from payments.shell.transactions import TransactionQueue

log = structlog.get_logger()

_POLL_LEAST_S, _POLL_MOST_S = 0.1, 2.0


class ChainConnection:
    """One chain with its ledger. Used on the event loop."""

    def __init__(
        self,
        host: CoordinatorHost,
        projection: Projection,
        store: PaymentStore,
        settings: PaymentSettings,
        named: NamedChain,
    ) -> None:
        """Take up what is stored about the chain. Blocks."""
        self._host = host
        self._projection = projection
        self._store = store
        self._settings = settings
        self.profile = named.profile
        self.notes = [named.note] if named.note else []
        self.complaint = ""
        """Why the chain is not settled on now; empty: it is."""
        self.chain = Ethereum(named.url, self.profile)
        self.queue = self._opened_queue()
        self.addresses = self._known_addresses()
        self.settler: Settler | None = None
        self._is_retrying = settings.retry_payments
        """Whether every halt is still to be cleared, as the operator asked."""
        self.decimals = 6
        """Decimals of the ledger's token."""

    @property
    def domain(self) -> Domain:
        """The ledger that statements are for; chain 0 while none is known."""
        is_ledger_known = self.addresses.ledger != ZERO_ADDRESS
        return Domain(self.profile.chain_id, self.addresses.ledger) if is_ledger_known else Domain()

    @property
    def poll_s(self) -> float:
        """Time between two looks for a new block."""
        return min(_POLL_MOST_S, max(_POLL_LEAST_S, self.profile.block_ms / 5_000))

    async def make_ready(self) -> Settler:
        """Check the chain and see that there is a ledger; once only.

        Raises:
            HyperGPUError: The chain or the contract is another one, or the ledger is unknown.
            ChainUnreachableError: The RPC does not answer.
        """
        if self.settler is not None:
            return self.settler
        await check_chain(self.chain, self.profile)
        self.complaint = await self._provide_gas_money()
        if self.addresses.ledger == ZERO_ADDRESS:
            await self._deploy()
        elif self.addresses.token == ZERO_ADDRESS or not self.profile.is_local:
            self.addresses = await recognise_ledger(self.chain, self.domain)
            view = ContractView(token_contract(), self.addresses.token, "decimals")
            (self.decimals,) = await self.chain.read([view])
        self._store.keep_value(self._addresses_name, msgspec.json.encode(self.addresses))
        self.settler = Settler(
            self._host,
            self._projection,
            self.queue,
            (self.chain, self.addresses),
            is_each=self._settings.metering == "each",
        )
        self._projection.note_receipts = self.settler.note_receipts
        return self.settler

    async def tick(self, *, has_receipts: bool) -> None:
        """Look and act once, whatever the chain does meanwhile."""
        settler = await self.make_ready()
        await settler.tick(has_receipts=has_receipts)
        halt = settler.halts.get(None)
        self.complaint = str(halt) if halt else ""
        if halt and self.profile.is_local:
            # A local chain that lost its newest state has lost its play money with it.
            await self._provide_gas_money()
        if self._is_retrying and settler.head is not None:
            self._is_retrying = False
            for job_id in [each for each in settler.halts if each is not None]:
                abandoned_count = await settler.retry(job_id)
                log.warning("a halt is cleared", job=job_id, abandoned=abandoned_count)

    def start_over(self) -> None:
        """Forget what is in memory after an error of the database."""
        self.settler = None
        self.queue = self._opened_queue()

    async def close(self) -> None:
        """Close the connections to the RPC."""
        await self.chain.close()

    def _opened_queue(self) -> TransactionQueue:
        return TransactionQueue(self.chain, self._host.key, self.profile, self._store)

    async def _provide_gas_money(self) -> str:
        """Fill the account on a local chain; elsewhere return a complaint if it is empty."""
        account = self._host.key.address
        if await self.chain.balance_wei(account) > 0:
            return ""
        if self.profile.is_local:
            await self.chain.ask("anvil_setBalance", account, hex(LOCAL_WEI))
            return ""
        return (
            f"KEY_FUNDS: {account} has nothing to pay gas with on chain {self.profile.chain_id}."
            " Fix: send it some of the chain's currency"
        )

    async def _deploy(self) -> None:
        if not self.profile.is_local:
            raise HyperGPUError(
                Reason.LEDGER_WRONG,
                f"no ledger is named on chain {self.profile.chain_id}",
                fix="HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS; or deploy one: hypergpu ledger"
                " deploy",
            )
        head = await self.chain.head()
        await self.queue.look(head)
        nonce = self.queue.next_nonce
        if nonce is None:
            raise ChainUnreachableError("the account's newest transactions are not final yet")
        # Known before it is sent: a kill in between sends the same bytes to the same addresses.
        self.addresses, transactions = plan_local_deployment(
            self._host.key.address, nonce, self.profile
        )
        await self.queue.send(await self.queue.add(transactions, head))

    def _known_addresses(self) -> LedgerAddresses:
        stated_address = Address(self._settings.ledger_contract)
        stored_value = self._store.value(self._addresses_name)
        known_addresses = (
            msgspec.json.decode(stored_value, type=LedgerAddresses) if stored_value else None
        )
        if known_addresses is None and (row := self._store.row(self.queue.account, LEDGER_PURPOSE)):
            # A kill came between the transactions and the note of what they create.
            account = self._host.key.address
            known_addresses = LedgerAddresses(
                created_address(account, row.nonce), created_address(account, row.nonce - 1)
            )
        if known_addresses and stated_address in {"", known_addresses.ledger}:
            return known_addresses
        return LedgerAddresses(stated_address or ZERO_ADDRESS, ZERO_ADDRESS)

    @property
    def _addresses_name(self) -> str:
        return f"ledger/{self.profile.chain_id}"


async def find_chain(settings: PaymentSettings, store: PaymentStore) -> NamedChain:
    """The chain that the settings name. An RPC's address is asked for its chain.

    One that does not answer is taken for the chain that it was before.

    Raises:
        HyperGPUError: ARGUMENT_INVALID or FILE_UNUSABLE, the settings name no chain;
            CHAIN_UNREACHABLE, an RPC that was never asked before does not answer.
    """
    stated_chain = named_chain(settings.chain, settings.chain_url)
    if stated_chain is not None:
        return stated_chain
    url = settings.chain_url or settings.chain
    name = f"chain/{digest_of(url.encode())}"
    chain = Ethereum(url)
    try:
        chain_id = await chain.chain_id()
        store.keep_value(name, str(chain_id).encode())
    except ChainUnreachableError as away:
        known_id = store.value(name)
        if not known_id:
            raise HyperGPUError(Reason.CHAIN_UNREACHABLE, str(away)) from None
        chain_id = int(known_id)
    finally:
        await chain.close()
    profile, note = profile_of_id(chain_id)
    return NamedChain(profile, url, note)
