"""Which chain settles: by name, with an RPC of its own or a given one, or by its RPC's address."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from coordinator.config import Settings
from hypergpu.chain.profiles import NONE, ChainProfile, chain_profile, profile_names, profile_of
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.errors import RpcError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.files.durable import write_durably
from hypergpu.refusal import Reason, RefusalError

ANVIL = "anvil"
"""Started here, unless an RPC of it is named."""
_ADDRESSES = ("http://", "https://")
_KNOWN_FILE = "known.json"


class Chain(NamedTuple):
    """A chain, and where it is asked."""

    profile: ChainProfile
    url: str
    """Empty: one is to be started here."""


class _Known(msgspec.Struct, frozen=True):
    """What an address was found to be the RPC of."""

    url: str
    chain_id: int


def chain_of(settings: Settings, folder: Path) -> Chain:
    """What the settings name. Blocks: an address is asked which chain it is of.

    Args:
        settings: Of the coordinator.
        folder: Remembers that, so that a coordinator starts again while its chain is away.

    Raises:
        RefusalError: ARGUMENT_INVALID, it is no chain and no address; CHAIN_WRONG, there is no
            profile for the chain; CHAIN_UNREACHABLE, an address that was never asked before does
            not answer.
    """
    if settings.chain.startswith(_ADDRESSES):
        url = settings.chain
        dialled = _transport(url)
        chain_id = _chain_id(dialled, url, folder / _KNOWN_FILE)
        return Chain(profile_of(chain_id, where=dialled.where), url)
    if settings.chain not in profile_names():
        known = ", ".join((NONE, *profile_names()))
        detail = f"there is no chain {settings.chain!r}; there are {known}"
        fix = "name one, its RPC with --chain-url; or give the address of an RPC"
        raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    profile = chain_profile(settings.chain)
    url = settings.chain_url or profile.rpc_url
    if not url and settings.chain != ANVIL:
        detail = f"the chain {settings.chain} has no RPC of its own"
        raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix="name one: --chain-url URL")
    if url:
        _transport(url)
    return Chain(profile, url)


def _chain_id(dialled: HttpTransport, url: str, known_file: Path) -> int:
    rpc = HttpRpc(dialled)
    try:
        chain_id = EvmChain(rpc).chain_id()
    except RpcError as away:
        known = _known(known_file)
        if known is None or known.url != url:
            fix = "start the chain, or name it too: --chain NAME --chain-url URL"
            raise RefusalError(Reason.CHAIN_UNREACHABLE, str(away), fix=fix) from None
        return known.chain_id
    finally:
        rpc.close()
    known_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(known_file, msgspec.json.encode(_Known(url, chain_id)))
    return chain_id


def _known(file: Path) -> _Known | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Known)
    except (OSError, msgspec.MsgspecError):
        return None


def _transport(url: str) -> HttpTransport:
    """To an address that can be dialled.

    Raises:
        RefusalError: ARGUMENT_INVALID, it cannot.
    """
    try:
        return HttpTransport(url)
    except ValueError as wrong:
        fix = "name it like this: http://127.0.0.1:8545"
        raise RefusalError(Reason.ARGUMENT_INVALID, f"{url!r}: {wrong}", fix=fix) from None
