"""Waits until a block has a transaction that was sent."""

import time
from collections.abc import Sequence

from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Inclusion
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.errors import HyperGPUError, Reason

_WITHIN_S_LEAST = 120.0
_WITHIN_BLOCKS = 20
_LOOK_EACH_S = 0.2


def included(
    chain: EvmChain, profile: ChainProfile, hashes: Sequence[bytes], *, fix: str
) -> Inclusion:
    """Return once a block has a transaction, whether it succeeded there or not.

    Args:
        chain: Where it was sent.
        profile: Of that chain.
        hashes: Of its signings, the newest last.
        fix: What to do when no block takes it.

    Raises:
        HyperGPUError: CHAIN_UNREACHABLE, no block has it within two minutes, or twenty blocks.
        RpcError: the chain cannot be asked.
    """
    within_s = max(_WITHIN_S_LEAST, _WITHIN_BLOCKS * profile.block_ms / 1000)
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        for place in chain.inclusions(hashes):
            if place is not None:
                return place
        time.sleep(_LOOK_EACH_S)
    detail = f"0x{hashes[-1].hex()} is in no block after {within_s:g} s"
    raise HyperGPUError(Reason.CHAIN_UNREACHABLE, detail, fix=fix)
