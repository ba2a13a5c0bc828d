"""Nodes that stake, so that they are paid inside the challenge window."""

from collections.abc import Sequence

from hypergpu.chain import gas
from hypergpu.chain.ledger import ContractCall, LedgerCalls
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.signer import Draft, Signer
from hypergpu.ids import Address
from hypergpu.signature import IdentityKey

STAKE = 10**13
_GAS_MONEY_WEI = hex(10**20)
_SETTLED_BLOCKS = 16
_REGISTER_GAS = 250_000


def enlist(
    chain: EvmChain, token: bytes, ledger: bytes, keys: Sequence[IdentityKey], stake: int = STAKE
) -> None:
    """Have each node mint, approve and stake, in blocks that no reorganisation here reaches.

    Raises:
        RuntimeError: one of it failed.
    """
    calls, chain_id = LedgerCalls(), chain.chain_id()
    sent = []
    for key in keys:
        signer, owner = Signer(key), Address(key.node_id)
        chain.rpc.call(Call("anvil_setBalance", (owner, _GAS_MONEY_WEI)))
        approval = calls.approve(Address("0x" + ledger.hex()), stake)
        register = ContractCall(calls.abi.call("registerNode", bytes(32), stake), _REGISTER_GAS)
        steps = [(token, calls.mint(owner, stake)), (token, approval), (ledger, register)]
        for nonce, (to, what) in enumerate(steps):
            draft = Draft(
                chain_id=chain_id,
                nonce=nonce,
                to=to,
                call=what.call,
                gas=max(what.gas, gas.APPROVE),
                max_fee_wei=10**12,
                tip_wei=10**10,
            )
            sent.append(signer.sign(draft))
    chain.send(sent)
    chain.rpc.call(Call("anvil_mine", (hex(_SETTLED_BLOCKS),)))
    places = chain.inclusions([one.hash for one in sent])
    if not all(place is not None and place.is_success for place in places):
        raise RuntimeError("a node could not stake")
