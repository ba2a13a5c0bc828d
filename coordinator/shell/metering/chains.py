"""Which chain settles: by name, with an RPC of its own or a given one, or by its RPC's address."""

from pathlib import Path

import msgspec

from coordinator.config import Settings
from hypergpu.chain.profiles.named import NamedChain, asked_chain_id, named_chain
from hypergpu.files.durable import write_durably
from hypergpu.refusal import Reason, RefusalError

_KNOWN_FILE = "known.json"


class _Known(msgspec.Struct, frozen=True):
    """What an address was found to be the RPC of."""

    url: str
    chain_id: int


def chain_of(settings: Settings, folder: Path) -> NamedChain:
    """What the settings name. Blocks: an address is asked which chain it is of.

    Args:
        settings: Of the coordinator.
        folder: Remembers that, so that a coordinator starts again while its chain is away.

    Raises:
        RefusalError: as `named_chain`; an address that was asked before need not answer.
    """
    known_file = folder / _KNOWN_FILE
    return named_chain(settings.chain, settings.chain_url, lambda url: _chain_id(url, known_file))


def _chain_id(url: str, known_file: Path) -> int:
    try:
        chain_id = asked_chain_id(url)
    except RefusalError as refused:
        known = _known(known_file)
        if refused.reason is not Reason.CHAIN_UNREACHABLE or known is None or known.url != url:
            raise
        return known.chain_id
    known_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(known_file, msgspec.json.encode(_Known(url, chain_id)))
    return chain_id


def _known(file: Path) -> _Known | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Known)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
