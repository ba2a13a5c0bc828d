"""Which chain settles: by name, with an RPC of its own or a given one, or by its RPC's address."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from coordinator.config import Settings
from hypergpu.chain.profiles import ChainProfile, chain_profile, profile_names
from hypergpu.chain.profiles.named import NAMED_BY, asked_chain_id, named_chain
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably

_KNOWN_FILE = "known.json"
_KNOWN_MOST = 20
HasSigned = Callable[[int], bool]
"""Whether this coordinator has ever signed a transaction for a chain."""


class FoundChain(NamedTuple):
    """What settles."""

    profile: ChainProfile
    url: str
    """Empty: one is to be started here."""
    warning: str
    """What was assumed of it; empty: nothing."""
    is_assumed: bool = False
    """Whether nobody knows yet that its address is of this chain."""


class _Known(msgspec.Struct, frozen=True):
    """What an address was found to be the RPC of."""

    url: str
    chain_id: int


def chain_of(settings: Settings, folder: Path, has_signed: HasSigned) -> FoundChain:
    """What the settings name. Blocks: an address is asked which chain it is of.

    One that does not answer is taken for what it was before, or else for the one chain that this
    coordinator has settled on: training waits for no chain.

    Args:
        settings: Of the coordinator.
        folder: Remembers of which chain addresses were.
        has_signed: By the journal.

    Raises:
        HyperGPUError: as `named_chain`.
    """
    taken_for: list[int] = []

    def asked(url: str) -> int:
        try:
            chain_id = asked_chain_id(url)
        except HyperGPUError as away:
            if away.reason is not Reason.CHAIN_UNREACHABLE:
                raise
            if before := {each.url: each.chain_id for each in _known(folder)}.get(url):
                return before
            taken_for.append(_settled_before(folder, has_signed, away))
            return taken_for[0]
        remember(folder, url, chain_id)
        return chain_id

    profile, url, warning = named_chain(settings.chain, settings.chain_url, asked)
    for chain_id in taken_for:
        said = (
            f"the RPC at {HttpTransport(url).where} does not answer and was never asked of which"
            f" chain it is; it is taken for one of chain {chain_id}, on which this coordinator has"
            " settled before"
        )
        warning = f"{said}; {warning}" if warning else said
    return FoundChain(profile, url, warning, bool(taken_for))


def remember(folder: Path, url: str, chain_id: int) -> None:
    """Keep of which chain an address is, so that a coordinator starts while that is away."""
    before, now = _known(folder), _Known(url, chain_id)
    if now in before:
        return
    others = [each for each in before if each.url != url]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / _KNOWN_FILE, msgspec.json.encode([*others, now][-_KNOWN_MOST:]))


def ledger_unknown(chain_id: int, why: str, *, is_assumed: bool) -> HyperGPUError:
    """Why a job that pays is not taken while the ledger that it is to be signed for is not known.

    Args:
        chain_id: Of the chain.
        why: It has not been reached.
        is_assumed: As of `FoundChain`.
    """
    if is_assumed:
        known = f"nobody has said yet that the chain is {chain_id}"
        fix = "start the chain or correct its address, and submit again"
    else:
        known = f"none is known yet on chain {chain_id}"
        fix = (
            "start the chain or correct HYPERGPU_COORDINATOR_CHAIN_URL, and submit again; or start"
            " the coordinator with a ledger that is there:"
            " HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS"
        )
    detail = f"a job that pays is signed for its ledger, and {known}: {why}"
    return HyperGPUError(Reason.CHAIN_UNREACHABLE, detail, fix=fix)


def _settled_before(folder: Path, has_signed: HasSigned, away: HyperGPUError) -> int:
    """The one chain that an address that does not answer can be of.

    Raises:
        HyperGPUError: there is none, or there are several.
    """
    described = {chain_profile(name).chain_id for name in profile_names()}
    kept = {each.chain_id for each in _known(folder)}
    found = sorted(chain_id for chain_id in described | kept if has_signed(chain_id))
    if len(found) == 1:
        return found[0]
    if found:
        named = ", ".join(map(str, found))
        detail = f"{away.detail}; this coordinator has settled on the chains {named}"
        fix = f"start the chain, or say which one it is: {NAMED_BY}"
        raise HyperGPUError(away.reason, detail, fix=fix)
    detail = (
        f"{away.detail}; this coordinator has settled on no chain yet, and what nodes earn is"
        " signed for one"
    )
    raise HyperGPUError(away.reason, detail, fix=away.fix)


def _known(folder: Path) -> list[_Known]:
    """Oldest first. What cannot be read is not known."""
    try:
        found = msgspec.json.decode((folder / _KNOWN_FILE).read_bytes(), type=list[_Known] | _Known)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return []
    # It was one alone once.
    return [found] if isinstance(found, _Known) else found
