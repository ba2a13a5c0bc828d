"""Sends transactions of one key and waits for them: for commands and tests, not for a coordinator.

A coordinator's key belongs to its queue (`payments.shell.queue`): two senders would spend the same
nonce on different transactions.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.keys.signature import IdentityKey
from hypergpu.statements.domain import address_bytes
from payments.shell.chain_errors import CallRefusedError
from payments.shell.chains import ChainProfile
from payments.shell.contracts import Contract
from payments.shell.ethereum import Draft, Ethereum, MinedPlace, SignedTransaction, sign_transaction

_GAS_PERCENT = 130
"""Of the estimate: state may change between the estimate and the block."""
_LOOK_EACH_S = 0.2
_WITHIN_S = 180.0


class Call(NamedTuple):
    """A call that an account wants to make."""

    contract: Contract
    address: Address | None
    """None: the contract is created."""
    data: bytes


class Wallet:
    """One key on one chain."""

    def __init__(self, chain: Ethereum, key: IdentityKey, profile: ChainProfile) -> None:
        self.address = key.address
        self._chain = chain
        self._key = key
        self._profile = profile

    async def send(self, calls: Sequence[Call]) -> list[MinedPlace]:
        """Make calls one after the other; each is in a block before the next is sent.

        Raises:
            HyperGPUError: REQUEST_INVALID, a contract refuses a call, with its reason;
                CHAIN_UNREACHABLE, a transaction is in no block after three minutes.
            ChainUnreachableError: The RPC does not answer.
        """
        return [await self._send_one(call) for call in calls]

    async def _send_one(self, call: Call) -> MinedPlace:
        gas = await self._estimate(call)
        head = await self._chain.head()
        draft = Draft(
            chain_id=self._profile.chain_id,
            nonce=await self._chain.next_nonce(self.address),
            to=b"" if call.address is None else address_bytes(call.address),
            data=call.data,
            gas=min(gas * _GAS_PERCENT // 100, self._profile.transaction_gas_max),
            max_fee_wei=2 * head.base_fee_wei + self._profile.tip_wei,
            tip_wei=self._profile.tip_wei,
        )
        signed = sign_transaction(self._key, draft)
        (complaint,) = await self._chain.send([signed.raw])
        if complaint:
            raise HyperGPUError(Reason.CHAIN_UNREACHABLE, f"the chain's RPC refused: {complaint}")
        place = await self._wait(signed)
        if not place.is_success:
            why = await self._chain.revert_reason(call.contract, signed.hash, place.block_number)
            raise HyperGPUError(Reason.REQUEST_INVALID, f"0x{signed.hash.hex()} failed: {why}")
        return place

    async def _estimate(self, call: Call) -> int:
        wanted = {"from": self.address, "data": "0x" + call.data.hex()}
        if call.address is not None:
            wanted["to"] = call.address
        try:
            return int(str(await self._chain.ask("eth_estimateGas", wanted)), 16)
        except CallRefusedError as refused:
            words = call.contract.describe_error(refused.revert) if refused.revert else str(refused)
            raise HyperGPUError(
                Reason.REQUEST_INVALID, f"the contract would refuse this: {words}"
            ) from None

    async def _wait(self, signed: SignedTransaction) -> MinedPlace:
        deadline_s = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline_s:
            (place,) = await self._chain.inclusions([signed.hash])
            if place is not None:
                return place
            await asyncio.sleep(_LOOK_EACH_S)
        raise HyperGPUError(
            Reason.CHAIN_UNREACHABLE,
            f"0x{signed.hash.hex()} is in no block after {_WITHIN_S:.0f} s; it may still be taken",
            fix="look it up on the chain before you try again",
        )
