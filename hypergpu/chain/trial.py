"""What calls of an account would come to, one after the other, in a block that is there.

A program that makes the calls stands in for the account while the chain is asked (``eth_call`` with
another code for one address). So what the first call changes counts for the second, and the
contracts see the account as who calls. Nothing is signed, sent or changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hypergpu.chain.rpc.answers import octets
from hypergpu.chain.rpc.chain import REVERTED, EvmChain, block_asked, is_of_contract
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.rpc.errors import RpcRefusedError

_DONE = (1).to_bytes(32)
_HEAD = bytes.fromhex("600e565b3d600060003e3d6000fd5b")
"""Jumps over what it ends with once a call was refused, with the contract's own words."""
_CALL = bytes.fromhex("5af1")
_LEAVE = bytes.fromhex("15600357")
"""To where `_HEAD` ends it, if the call was refused."""
_PASS_OVER = bytes.fromhex("505b5b5b")
"""Whatever it came to."""
_END = bytes.fromhex("600160005260206000f3")
"""Answers `_DONE`."""
_STEP_BYTES = 50


class OwnCall(NamedTuple):
    """A call that an account makes."""

    to: bytes
    call: bytes


class Trial(NamedTuple):
    """What came of calls that were tried."""

    is_known: bool
    """Whether the RPC tries calls so at all, and could."""
    is_refused: bool = False
    said: bytes = b""
    """By the contract that refused one."""


def tried(
    chain: EvmChain,
    account: bytes,
    calls: Sequence[OwnCall],
    before: Sequence[OwnCall] = (),
    block: bytes | None = None,
) -> Trial:
    """Try calls of an account in turn, up to the first that is refused.

    Args:
        chain: To be asked.
        account: Who calls. It has no code of its own.
        calls: In order.
        before: What it calls before them; whether that is refused does not matter.
        block: Hash of the block that they are tried in; None: the newest.

    Raises:
        RpcError: the chain cannot be asked.
    """
    where = "0x" + account.hex()
    stand_in = {where: {"code": "0x" + _program(calls, before).hex()}}
    try:
        answer = chain.rpc.call(
            Call("eth_call", ({"to": where, "data": "0x"}, block_asked(block), stand_in))
        )
    except RpcRefusedError as refused:
        # Without a word and without the code of one it may be the RPC itself: its cap on gas, say.
        is_told = bool(refused.words) or refused.code == REVERTED
        is_refused = is_told and is_of_contract(refused)
        return Trial(is_known=is_refused, is_refused=is_refused, said=refused.words)
    # An RPC that knows nothing of another code has called an account that has none.
    return Trial(is_known=octets(answer) == _DONE)


def _program(calls: Sequence[OwnCall], before: Sequence[OwnCall]) -> bytes:
    ends = [*(_PASS_OVER for _ in before), *(_LEAVE for _ in calls)]
    every = (*before, *calls)
    offset = len(_HEAD) + len(every) * _STEP_BYTES + len(_END)
    steps = []
    for each, end in zip(every, ends, strict=True):
        steps.append(_call(each, offset) + end)
        offset += len(each.call)
    return b"".join((_HEAD, *steps, _END, *(each.call for each in every)))


def _call(wanted: OwnCall, offset: int) -> bytes:
    """Copy a call out of the program and make it, with all the gas."""
    size = b"\x62" + len(wanted.call).to_bytes(3)
    copied = size + b"\x62" + offset.to_bytes(3) + bytes.fromhex("600039")
    return (
        copied + bytes.fromhex("60006000") + size + bytes.fromhex("6000600073") + wanted.to + _CALL
    )
