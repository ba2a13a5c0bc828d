"""Which chain somebody means: by name, by a profile of their own, or by the address of its RPC."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hypergpu.chain.profiles import ChainProfile, chain_profile, profile_names
from hypergpu.chain.profiles.cautious import assumptions, cautious_profile
from hypergpu.chain.profiles.described import SUFFIX, described_profile
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.errors import RpcError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.errors import HyperGPUError, Reason

ANVIL = "anvil"
"""The one that is started beside a coordinator, unless its RPC is named."""
ADDRESSES = ("http://", "https://")
_OF_ADDRESSES = "://"
NAMED_BY = "HYPERGPU_CHAIN=NAME HYPERGPU_COORDINATOR_CHAIN_URL=URL"
_URL_BY = "name one: HYPERGPU_COORDINATOR_CHAIN_URL=URL, or --chain-url URL"


class NamedChain(NamedTuple):
    """A chain, and where it is asked."""

    profile: ChainProfile
    url: str
    """Empty: one is to be started here."""
    warning: str = ""
    """What was assumed of a chain that nobody has described."""


def named_chain(chain: str, chain_url: str, asked: Callable[[str], int]) -> NamedChain:
    """The chain that is meant.

    Args:
        chain: A name, a file that ends in ``.toml``, or an RPC's address.
        chain_url: Its RPC, where that is neither its profile's own nor the address.
        asked: Finds out of which chain an address is, as `asked_chain_id` does.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it is none of these, or without an RPC; FILE_UNUSABLE, the
            profile is; CHAIN_UNREACHABLE, an address does not answer.
    """
    if chain.startswith(ADDRESSES):
        url = chain_url or chain
        profile, warning = profile_of(asked(url))
        return NamedChain(profile, url, warning)
    profile = _profile(chain)
    url = chain_url or profile.rpc_url
    if not url and chain != ANVIL:
        detail = f"the chain {chain} has no RPC of its own"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=_URL_BY)
    if url:
        transport_to(url)
    return NamedChain(profile, url)


def profile_of(chain_id: int) -> tuple[ChainProfile, str]:
    """The profile of a chain; where it has none a cautious one, and what that assumes."""
    for profile in map(chain_profile, profile_names()):
        if profile.chain_id == chain_id:
            return profile, ""
    profile = cautious_profile(chain_id)
    return profile, (
        f"chain {chain_id} has no profile; assumed: {assumptions(profile)}. Describe it in a file"
        " (docs/chains.md) where these are wrong: HYPERGPU_CHAIN=./FILE.toml"
    )


def asked_chain_id(url: str) -> int:
    """Which chain an RPC says that it is of. Blocks.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it is no address; CHAIN_UNREACHABLE, it does not answer, or
            is no RPC of a chain.
    """
    rpc = HttpRpc(transport_to(url))
    try:
        return EvmChain(rpc).chain_id()
    except RpcError as away:
        fix = f"start the chain or correct the address; or name both: {NAMED_BY}"
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, str(away), fix=fix) from None
    finally:
        rpc.close()


def transport_to(url: str) -> HttpTransport:
    """To an address that can be dialled.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it cannot.
    """
    try:
        return HttpTransport(url)
    except ValueError as wrong:
        fix = "name it like this: http://127.0.0.1:8545"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, str(wrong), fix=fix) from None


def _profile(chain: str) -> ChainProfile:
    if chain in profile_names():
        return chain_profile(chain)
    if _OF_ADDRESSES in chain:
        # Of another protocol; there may be a secret in it.
        transport_to(chain)
    if chain.endswith(SUFFIX):
        return described_profile(Path(chain).expanduser())
    detail = f"there is no chain {chain!r}; known by name are {', '.join(profile_names())}"
    fix = f"name one ({NAMED_BY}), the address of its RPC, or the file of a profile: ./FILE.toml"
    raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
