"""The demo's nodes stake before they work, so that their pay waits for no challenge window."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from hypergpu.cli.ledger.account import LedgerView
from hypergpu.cli.ledger.wallet import KEY_FILE
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys.keyfile import passphrase_beside, stored_secret
from hypergpu.ledger.typed import Domain, address_bytes
from hypergpu.signature import IdentityKey
from hypergpu.terminal.output import say

if TYPE_CHECKING:
    from hypergpu.chain.rpc.chain import EvmChain

_THERE_WITHIN_S = 120.0
_LOOK_EACH_S = 0.1


def stake_before_work(view: LedgerView, folders: Sequence[Path]) -> None:
    """Let each node stake what the whole job may cost; its key is made where there is none yet.

    Nobody can earn more than that within one challenge window. Nothing happens where no chain
    settles the job.

    Args:
        view: Of the job.
        folders: The nodes' state folders; their daemons are not running.

    Raises:
        HyperGPUError: CHAIN_UNREACHABLE, the ledger does not get into a block, or a stake does not.
    """
    if view.chain is None or not view.chain_id:
        return
    url, amount = view.chain.url, int(view.escrow)
    domain = Domain(view.chain_id, view.contract)
    # What talks to a chain is an extra, and slow to import.
    from hypergpu.cli.ledger.acts.node import NodeOnChain
    from hypergpu.cli.ledger.reading import ledger_at

    def stake(key: IdentityKey) -> None:
        with ledger_at(url) as chain:
            NodeOnChain(chain, key, domain).register(amount)

    with ledger_at(url) as chain:
        _wait_for_ledger(chain, domain)
    with ThreadPoolExecutor(len(folders)) as threads:
        # Every stake is in a block, or the first failure is raised.
        list(threads.map(stake, map(_made_key, folders)))
    say(f"each node stakes {amount}: what it earns is paid against its stake, within some blocks")


def _made_key(folder: Path) -> IdentityKey:
    path = folder / KEY_FILE
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return IdentityKey(stored_secret(path, passphrase_beside(folder, path)))


def _wait_for_ledger(chain: "EvmChain", domain: Domain) -> None:
    """The coordinator knows where the ledger will lie a block before it lies there."""
    deadline_s = time.monotonic() + _THERE_WITHIN_S
    while not chain.code(address_bytes(domain.contract)):
        if time.monotonic() > deadline_s:
            detail = f"the ledger {domain.contract} is in no block after {_THERE_WITHIN_S:g} s"
            raise HyperGPUError(Reason.CHAIN_UNREACHABLE, detail)
        time.sleep(_LOOK_EACH_S)
