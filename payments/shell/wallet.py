"""Sends transactions of one key and waits for them: for commands and tests, not for a coordinator.

A coordinator's key belongs to its queue (`payments.shell.outbox`): two senders would spend the same
nonce on different transactions.
"""

from typing import Any, NamedTuple

from eth_account import Account
from eth_utils.address import to_checksum_address
from web3.exceptions import ContractLogicError, TimeExhausted
from web3.middleware import SignAndSendRawMiddlewareBuilder

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.keys.signature import IdentityKey
from payments.shell.contracts import Contract
from payments.shell.ethereum import Ethereum

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
            signing = SignAndSendRawMiddlewareBuilder.build(Account.from_key(key.secret))
            chain.web3.middleware_onion.inject(signing, name=key.address, layer=0)

    async def send(self, call: ContractCall) -> int:
        """Make a call; the height of the block that has it.

        Raises:
            HyperGPUError: REQUEST_INVALID, a contract refuses a call, with its reason;
                CHAIN_UNREACHABLE, a transaction is in no block after three minutes.
            ChainUnreachableError: The RPC does not answer.
        """
        wanted: Any = {"from": to_checksum_address(self.address), "data": call.data}
        if call.address is not None:
            wanted["to"] = to_checksum_address(call.address)
        try:
            with self._chain.guard():
                return await self._send(wanted)
        except ContractLogicError as refused:
            revert = bytes.fromhex(str(refused.data or "0x")[2:])
            words = call.contract.describe_error(revert) if revert else str(refused)
            detail = f"the contract would refuse this: {words}"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail) from None

    async def _send(self, wanted: Any) -> int:
        eth = self._chain.web3.eth
        wanted["gas"] = await eth.estimate_gas(wanted) * _GAS_PERCENT // 100
        sent = await eth.send_transaction(wanted)
        try:
            mined = await eth.wait_for_transaction_receipt(sent, _WITHIN_S, _LOOK_EACH_S)
        except TimeExhausted:
            raise HyperGPUError(
                Reason.CHAIN_UNREACHABLE,
                f"0x{sent.hex()} is in no block after {_WITHIN_S:.0f} s; it may still be taken",
                fix="look it up on the chain before you try again",
            ) from None
        if not mined["status"]:
            detail = f"0x{sent.hex()} failed: the ledger changed before it was in a block"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        return int(mined["blockNumber"])
