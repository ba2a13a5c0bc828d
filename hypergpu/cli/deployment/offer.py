"""What making a ledger costs on a chain now, and what is lacking for it: asked, nothing sent."""

from typing import NamedTuple

from hypergpu.chain import gas
from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT, TOKEN
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import quantity
from hypergpu.chain.rpc.chain import EvmChain, is_of_contract
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError
from hypergpu.cli.deployment.options import LedgerOptions, faults
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger.typed import address_bytes

_BASE_FEE_TIMES = 2
_SPARE_PERCENT = 115
"""Of what the chain says it takes: state may change until a block has it."""
_RAISED_PERCENT = 125
"""Pools want 10 to 12.5 % more for a replacement."""
_CURRENCY_DIGITS = 18
_SHOWN_DIGITS = 9


class Offer(NamedTuple):
    """What is offered for it."""

    gas: int
    """Limit: a transaction that takes more fails."""
    max_fee_wei: int
    """For one unit of gas, the tip included."""
    tip_wei: int

    @property
    def most_wei(self) -> int:
        """What it may cost, and what the account must hold."""
        return self.gas * self.max_fee_wei

    def above(self, max_fee_wei: int, tip_wei: int) -> "Offer":
        """One that a pool takes in place of an earlier one of such fees."""
        return self._replace(
            max_fee_wei=max(self.max_fee_wei, _raised(max_fee_wei)),
            tip_wei=max(self.tip_wei, _raised(tip_wei)),
        )


class Lack(NamedTuple):
    """Something that has to be mended first."""

    reason: Reason
    what: str
    fix: str


def creation(options: LedgerOptions) -> bytes:
    """The bytes of the transaction that makes a ledger."""
    ledger = artifact(CONTRACT)
    return ledger.code + Abi(ledger.abi).constructor(options.values)


def offer_on(
    chain: EvmChain, profile: ChainProfile, own: Address, options: LedgerOptions
) -> tuple[Offer, list[Lack]]:
    """What is offered by the chain's prices of this moment, and everything that is lacking.

    Raises:
        RpcError: the chain cannot be asked.
    """
    lacks = [Lack(Reason.ARGUMENT_INVALID, *each) for each in faults(options)]
    lacks += token_lacks(chain, profile.chain_id, options.token)
    limit, refused = gas.DEPLOY_LEDGER, ""
    if not lacks:
        limit, refused = _estimated(chain, own, options, limit * profile.gas_percent // 100)
    if refused:
        lacks.append(Lack(Reason.ARGUMENT_INVALID, refused, "see the options: --help"))
    limit = min(limit, profile.transaction_gas_max)
    tip_wei = min(max(chain.tip_wei(), profile.tip_wei), profile.max_fee_cap_wei)
    max_fee_wei = _BASE_FEE_TIMES * chain.head().base_fee_wei + tip_wei
    offer = Offer(limit, min(max_fee_wei, profile.max_fee_cap_wei), tip_wei)
    return offer, [*lacks, *_money_lacks(chain, profile, own, offer)]


def refuse_lacking(lacks: list[Lack]) -> None:
    """Say all that is lacking at once.

    Raises:
        HyperGPUError: something is.
    """
    if not lacks:
        return
    fixes = list(dict.fromkeys(lack.fix for lack in lacks))
    detail = "; ".join(lack.what for lack in lacks)
    raise HyperGPUError(lacks[0].reason, detail, fix="; ".join(fixes))


def token_lacks(chain: EvmChain, chain_id: int, token: Address) -> list[Lack]:
    """Whether something is there that behaves like an ERC-20 token."""
    fix = "name an ERC-20 token of this chain: --token ADDRESS"
    contract = address_bytes(token)
    if not chain.code(contract):
        what = f"the token {token} is no contract on chain {chain_id}"
        return [Lack(Reason.ARGUMENT_INVALID, what, fix)]
    abi = Abi(artifact(TOKEN).abi)
    try:
        for name, values in (("totalSupply", ()), ("balanceOf", (contract,))):
            abi.answer(name, chain.read(contract, abi.call(name, *values)))
    except (RpcRefusedError, RpcGarbledError):
        what = f"the contract {token} on chain {chain_id} is no ERC-20 token"
        return [Lack(Reason.ARGUMENT_INVALID, what, fix)]
    return []


def currency(wei: int) -> str:
    """An amount of a chain's own currency, rounded up to nine decimals."""
    step = 10 ** (_CURRENCY_DIGITS - _SHOWN_DIGITS)
    whole, rest = divmod(-(-wei // step), 10**_SHOWN_DIGITS)
    return f"{whole}.{rest:0{_SHOWN_DIGITS}d}"


def _estimated(
    chain: EvmChain, own: Address, options: LedgerOptions, formula: int
) -> tuple[int, str]:
    """The gas limit, and why the chain would refuse the creation; empty: it would not."""
    asked = {"from": own, "data": "0x" + creation(options).hex()}
    try:
        found = quantity(chain.rpc.call(Call("eth_estimateGas", (asked,))))
    except RpcRefusedError as refused:
        is_its_fault = is_of_contract(refused)
        return formula, f"the chain would refuse it: {refused.message}" if is_its_fault else ""
    return found * _SPARE_PERCENT // 100, ""


def _money_lacks(chain: EvmChain, profile: ChainProfile, own: Address, offer: Offer) -> list[Lack]:
    has_wei = chain.balance_wei(address_bytes(own))
    if has_wei >= offer.most_wei:
        return []
    what = (
        f"{own} has {currency(has_wei)} of the currency of chain {profile.chain_id}, and the ledger"
        f" may cost {currency(offer.most_wei)} ({offer.gas} gas at {offer.max_fee_wei} wei)"
    )
    fix = f"send it at least {currency(offer.most_wei - has_wei)} of the chain's currency"
    return [Lack(Reason.CHAIN_WRONG, what, fix)]


def _raised(amount_wei: int) -> int:
    return amount_wei * _RAISED_PERCENT // 100 + 1
