"""One account on one ledger, for as long as a command runs: its key and what it sends.

A coordinator's key belongs to its queue (`payments.shell.transactions`): two senders would spend
the same nonce on different transactions.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from eth_account import Account
from eth_utils.address import to_checksum_address
from web3.exceptions import ContractLogicError, TimeExhausted
from web3.middleware import SignAndSendRawMiddlewareBuilder

from hypergpu.crypto import IdentityKey
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger_terms import Domain, address_bytes
from hypergpu.user.client.settings import resolve_settings
from hypergpu.user.terminal.output import amount_text
from payments.cli.show import LedgerAct
from payments.shell.chains import ChainProfile, check_url, profile_of_id
from payments.shell.ethereum import (
    ChainBlock,
    Contract,
    ContractView,
    Ethereum,
    ledger_contract,
    token_contract,
)
from payments.shell.ledger_choice import check_chain, recognise_ledger

_GAS_PERCENT = 130
"""Share of the estimated gas: state may change between the estimate and the block."""
_LOOK_EACH_S = 0.2
_WITHIN_S = 180.0


class ContractCall(NamedTuple):
    """A call that an account wants to make."""

    contract: Contract
    address: Address | None
    """None: the contract is created."""
    data: bytes


class Wallet:
    """One key on one chain."""

    def __init__(self, chain: Ethereum, key: IdentityKey) -> None:
        self.address = key.address
        self._chain = chain
        if key.address not in chain.web3.middleware_onion:
            signer = SignAndSendRawMiddlewareBuilder.build(Account.from_key(key.secret))
            chain.web3.middleware_onion.inject(signer, name=key.address, layer=0)

    async def send(self, call: ContractCall) -> int:
        """Make a call; the height of the block that has it.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, the account has no gas money; REQUEST_INVALID, a
                contract refuses a call, with its reason;
                CHAIN_UNREACHABLE, a transaction is in no block after three minutes.
            ChainUnreachableError: The RPC does not answer.
        """
        if not await self._chain.balance_wei(self.address):
            raise HyperGPUError(
                Reason.ARGUMENT_INVALID,
                f"{self.address} has no gas money on chain {await self._chain.chain_id()}",
                fix="send it some of the chain's coin",
            )
        request: Any = {"from": to_checksum_address(self.address), "data": call.data}
        if call.address is not None:
            request["to"] = to_checksum_address(call.address)
        try:
            with self._chain.guard():
                return await self._send(request)
        except ContractLogicError as error:
            revert = bytes.fromhex(str(error.data or "0x")[2:])
            words = call.contract.describe_error(revert) if revert else str(error)
            detail = f"the contract would refuse this: {words}"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail) from None

    async def _send(self, wanted: Any) -> int:
        eth = self._chain.web3.eth
        wanted["gas"] = await eth.estimate_gas(wanted) * _GAS_PERCENT // 100
        transaction_hash = await eth.send_transaction(wanted)
        try:
            receipt = await eth.wait_for_transaction_receipt(
                transaction_hash, _WITHIN_S, _LOOK_EACH_S
            )
        except TimeExhausted:
            raise HyperGPUError(
                Reason.CHAIN_UNREACHABLE,
                f"0x{transaction_hash.hex()} is in no block after {_WITHIN_S:.0f} s;"
                " it may still be taken",
                fix="look it up on the chain before you try again",
            ) from None
        if not receipt["status"]:
            detail = (
                f"0x{transaction_hash.hex()} failed: the ledger changed before it was in a block"
            )
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        return int(receipt["blockNumber"])


class OpenLedger:
    """A ledger that commands read, at one block unless it is refreshed."""

    def __init__(self, chain: Ethereum, domain: Domain, token: Address, block: ChainBlock) -> None:
        self.chain, self.domain, self.token, self.block = chain, domain, token, block
        self.decimals = 0

    async def refresh(self) -> None:
        """Read from the newest block on."""
        self.block = await self.chain.head()

    async def read(self, function: str, *arguments: object) -> Any:
        """One view of the ledger."""
        answer = await self.read_or_none(function, *arguments)
        if answer is None:
            raise HyperGPUError(Reason.REQUEST_INVALID, f"the ledger refuses {function}")
        return answer

    async def read_or_none(self, function: str, *arguments: object) -> Any:
        """One view of the ledger; None where the ledger refuses it."""
        view = ContractView(ledger_contract(), self.domain.contract, function, arguments)
        (answer,) = await self.chain.read([view], self.block)
        return answer

    async def token_number(self, function: str, *arguments: object) -> int:
        """A number that the token answers; 0 where it has no such view."""
        view = ContractView(token_contract(), self.token, function, arguments)
        (answer,) = await self.chain.read([view], self.block)
        return int(answer or 0)

    def amount(self, units: int) -> str:
        """An amount for people."""
        return amount_text(units, self.decimals)


class LedgerAccount:
    """An account that acts on a ledger, and what it did so far."""

    def __init__(self, ledger: OpenLedger, key: IdentityKey) -> None:
        self.ledger, self.address = ledger, key.address
        self._wallet = Wallet(ledger.chain, key)
        self._blocks: list[int] = []
        self.done: list[str] = []
        self.amounts: dict[str, str] = {}
        self.again_at_s: list[int] = []

    async def act(self, function: str, *arguments: object) -> None:
        """Have the ledger carry out a call; what is read afterwards is after it."""
        calldata = ledger_contract().encode(function, *arguments)
        await self._send(ContractCall(ledger_contract(), self.ledger.domain.contract, calldata))

    async def approve(self, amount: int) -> None:
        """Let the ledger take an amount of the token."""
        balance = await self.ledger.token_number("balanceOf", self.address)
        if balance < amount:
            raise HyperGPUError(
                Reason.ARGUMENT_INVALID,
                f"{self.address} has {self.ledger.amount(balance)} of the token"
                f" {self.ledger.token}, not {self.ledger.amount(amount)}",
                fix="send the token to this account, or name a smaller amount",
            )
        calldata = token_contract().encode("approve", self.ledger.domain.contract, amount)
        await self._send(ContractCall(token_contract(), self.ledger.token, calldata))

    def result(self) -> LedgerAct:
        """Everything that was done."""
        return LedgerAct(
            account=self.address,
            chain_id=self.ledger.domain.chain_id,
            ledger=self.ledger.domain.contract,
            blocks=self._blocks,
            done=self.done,
            amounts=self.amounts,
            again_at_unix_s=min(self.again_at_s, default=0),
        )

    async def _send(self, call: ContractCall) -> None:
        self._blocks.append(await self._wallet.send(call))
        await self.ledger.refresh()


@asynccontextmanager
async def open_ledger(domain: Domain, chain_url: str) -> AsyncIterator[OpenLedger]:
    """Connect to a ledger, and see that it is one.

    Args:
        domain: The ledger.
        chain_url: RPC of its chain; empty: the profile's own, or the setting ``chain_url``.
    """
    profile, _ = profile_of_id(domain.chain_id)
    chain = Ethereum(rpc_url(profile, chain_url), profile)
    try:
        await check_chain(chain, profile)
        target = await recognise_ledger(chain, domain)
        ledger = OpenLedger(chain, domain, target.token, await chain.head())
        ledger.decimals = await ledger.token_number("decimals")
        yield ledger
    finally:
        await chain.close()


@asynccontextmanager
async def open_account(
    domain: Domain, chain_url: str, key: IdentityKey
) -> AsyncIterator[LedgerAccount]:
    """Connect an account to a ledger; raises as `open_ledger`."""
    async with open_ledger(domain, chain_url) as ledger:
        yield LedgerAccount(ledger, key)


def rpc_url(profile: ChainProfile, given: str) -> str:
    """Address of the RPC to ask."""
    url = given or profile.rpc_url or resolve_settings()["chain_url"].value
    if not url:
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"no RPC of chain {profile.chain_id} is known here",
            fix="name one: --chain-url URL; hypergpu ledger show says which the coordinator uses",
        )
    check_url(url)
    return url


def account_address(text: str, option: str) -> Address:
    """An address that a person typed."""
    lower_text = text.strip().lower()
    try:
        address_bytes(Address(lower_text))
    except ValueError as wrong:
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"{option}: {wrong}") from wrong
    return Address(lower_text)
