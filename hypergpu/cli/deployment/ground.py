"""The coordinator's key on the chain that is meant: opened, or made where there is none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.chain.keylock import KeyLock, usual_locks
from hypergpu.chain.profiles import NONE, ChainProfile
from hypergpu.chain.profiles.named import (
    ANVIL,
    NAMED_BY,
    NamedChain,
    asked_chain_id,
    named_chain,
)
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.errors import RpcError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.signer import Signer
from hypergpu.cli.ledger.holding import COORDINATOR_KEY_FILE, coordinator_key, opened
from hypergpu.client.settings import chain_meant, resolve_settings
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.keys.keyfile import stored_address
from hypergpu.signature import IdentityKey


class Place(NamedTuple):
    """Where to look. Empty and None: as the settings say."""

    data_dir: Path | None = None
    passphrase_file: Path | None = None
    chain: str = ""
    chain_url: str = ""

    @property
    def folder(self) -> Path:
        """The coordinator's."""
        settings = resolve_settings({"data_dir": str(self.data_dir) if self.data_dir else None})
        return Path(settings["data_dir"].value).expanduser().resolve()

    @property
    def is_on_chain(self) -> bool:
        """Whether a chain is named that is there without a coordinator."""
        chain, chain_url = self._meant
        return bool(chain_url) or chain not in {NONE, ANVIL}

    def named(self) -> NamedChain:
        """The chain that is meant, one that is there.

        Raises:
            HyperGPUError: as `named_chain`; ARGUMENT_INVALID, none is named.
        """
        chain, chain_url = self._meant
        if chain == NONE:
            chain = chain_url or NONE
        fix = f"name one that is there: {NAMED_BY}, or --chain-url URL"
        if chain == NONE:
            raise HyperGPUError(Reason.ARGUMENT_INVALID, "no chain is named", fix=fix)
        found = named_chain(chain, chain_url, asked_chain_id)
        if not found.url:
            detail = f"the chain {chain} is started by the coordinator, which makes its own ledger"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        return found

    @property
    def _meant(self) -> tuple[str, str]:
        return chain_meant(resolve_settings({"chain": self.chain, "chain_url": self.chain_url}))


class Ground(NamedTuple):
    """A chain, and who acts there."""

    chain: EvmChain
    profile: ChainProfile
    signer: Signer


class KeyView(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/key/1"):
    """The coordinator's key, and what it has to pay gas with."""

    coordinator: Address
    key_file: str
    chain_id: int | None
    """None: no chain was named, or asked."""
    balance_wei: str | None
    """Of the chain's own currency, as text."""


def key_view(place: Place) -> KeyView:
    """Whose key this machine's coordinator has; one is made where there is none.

    Raises:
        HyperGPUError: the key, its folder or the chain refuses.
    """
    path = place.folder / COORDINATOR_KEY_FILE
    if not path.exists():
        opened_key(place)
    own = Address(stored_address(path))
    if not place.is_on_chain:
        return KeyView(own, str(path), None, None)
    found = place.named()
    with chain_at(found) as chain:
        balance_wei = chain.balance_wei(bytes.fromhex(own[2:]))
    return KeyView(own, str(path), found.profile.chain_id, str(balance_wei))


@contextmanager
def ground(place: Place, found: NamedChain) -> Iterator[Ground]:
    """Act with the coordinator's key, which nobody else uses on that chain meanwhile.

    Raises:
        HyperGPUError: CHAIN_WRONG, the RPC is of another chain; FOLDER_UNUSABLE, the coordinator
            runs; CHAIN_UNREACHABLE, the chain does not answer; the key refuses.
    """
    signer = Signer(opened_key(place))
    with chain_at(found) as chain:
        try:
            lock = KeyLock(usual_locks(), found.profile.chain_id, Address(signer.node_id))
        except HyperGPUError as used:
            fix = "end the coordinator first, and start it afterwards with: hypergpu up"
            raise HyperGPUError(used.reason, used.detail, fix=fix) from None
        try:
            yield Ground(chain, found.profile, signer)
        finally:
            lock.release()


@contextmanager
def looked_at(place: Place, found: NamedChain) -> Iterator[Ground]:
    """The same, for who sends nothing: the coordinator may run, and no key is made.

    Raises:
        HyperGPUError: CHAIN_WRONG, the RPC is of another chain; CHAIN_UNREACHABLE, the chain does
            not answer; the key refuses, or there is none.
    """
    signer = Signer(coordinator_key(place.folder, place.passphrase_file))
    with chain_at(found) as chain:
        yield Ground(chain, found.profile, signer)


@contextmanager
def chain_at(found: NamedChain) -> Iterator[EvmChain]:
    """The chain itself, seen to be the one that its profile is for.

    Raises:
        HyperGPUError: CHAIN_WRONG, it is another one; CHAIN_UNREACHABLE, it does not answer.
    """
    rpc = HttpRpc(HttpTransport(found.url), found.profile.pace)
    try:
        chain = EvmChain(rpc)
        chain_id = chain.chain_id()
        if chain_id != found.profile.chain_id:
            detail = (
                f"the RPC at {rpc.where} is of chain {chain_id}, not of {found.profile.chain_id}"
            )
            raise HyperGPUError(Reason.CHAIN_WRONG, detail)
        yield chain
    except RpcError as broken:
        # Most name the RPC themselves; a key in its address is said by none.
        where = "" if rpc.where in str(broken) else f"{rpc.where}: "
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, f"{where}{broken}") from None
    finally:
        rpc.close()


def opened_key(place: Place) -> IdentityKey:
    """The coordinator's key, made where there is none.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be made, or does not open.
    """
    folder, path = place.folder, place.folder / COORDINATOR_KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as broken:
        detail = f"nothing can be kept in {folder}: {broken.strerror}"
        fix = "choose a folder that you may write: --data-dir FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from broken
    return opened(folder, path, place.passphrase_file)
