"""How the demo's work is paid: a chain of play money beside it, and the proof at the end."""

import importlib.util
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.cli.demo.job import METERINGS
from hypergpu.cli.demo.metered import Recorded, recorded
from hypergpu.cli.ledger.account import LedgerView, paid_in_all
from hypergpu.cli.ledger.showing import ledger_of, verification_of
from hypergpu.client import Coordinator
from hypergpu.cluster.coordinator import SettlingBy
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.sites import Sites
from hypergpu.terminal.failure import usage_error
from hypergpu.terminal.output import say

ACCOUNTS_NAME = "ledger.json"
"""What `ledger show --json` tells of the demo's job."""
_WITHIN_S = 200.0
"""The challenge window of a local ledger is 30 s, and its transactions take some blocks."""
_LOOK_EACH_S = 0.5
_LOOPBACK = "127."


class Chain(NamedTuple):
    """What settles the demo's job."""

    settling: SettlingBy
    note: str


class Settled(NamedTuple):
    """What came of it."""

    receipts: int
    earned: int
    paid: int | None
    recorded: Recorded


NOT_PAID = Chain(SettlingBy(), "")


def chain_here(sites: Sites | None, metering: str) -> Chain:
    """Anvil, where it is installed and its port can be reached from here.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is no such metering; or it is not the usual one, and
            no chain for it.
    """
    if metering not in METERINGS:
        names = ", ".join(METERINGS)
        raise usage_error(f"--metering {metering}: there is none", f"choose one of {names}")
    missing = _no_chain(sites)
    if missing and metering != METERINGS[0]:
        raise usage_error(f"--metering {metering} needs a chain", f"{missing}; or leave it out")
    if missing:
        return Chain(SettlingBy(), f"{missing}: receipts without a chain")
    from hypergpu.chain.local.anvil import anvil_program

    note = f"a chain of play money settles what the work earns: {anvil_program().name}"
    return Chain(SettlingBy("anvil", metering), note)


def _no_chain(sites: Sites | None) -> str:
    """Why there is none here; empty: there is one."""
    if sites is not None and not sites.coordinator.dials.startswith(_LOOPBACK):
        return "the coordinator is in a network of its own"
    if importlib.util.find_spec("web3") is None:
        return "the extra `chain` is not installed"
    from hypergpu.chain.local.anvil import anvil_program

    try:
        anvil_program()
    except HyperGPUError as missing:
        return missing.detail
    return ""


def settled(coordinator: Coordinator, job_id: str, accounts: Path) -> Settled:
    """Wait until everything is paid that is going to be, and prove it from the receipts.

    Args:
        coordinator: Of the job.
        job_id: Whose pay.
        accounts: Gets all of it: when the demo is over, nobody can be asked any more.

    Raises:
        HyperGPUError: DEMO_MISSED, nodes were not paid to the last unit, or a receipt is unsound.
    """
    view = _waited(coordinator, job_id)
    accounts.write_bytes(msgspec.json.format(msgspec.json.encode(view), indent=2) + b"\n")
    found = verification_of(coordinator, job_id)
    if not found.is_sound:
        raise HyperGPUError(Reason.DEMO_MISSED, f"the pay is not sound: {found.faults[0]}")
    earned = sum(int(node.earned) for node in view.nodes)
    paid = paid_in_all(view)
    if view.chain is not None and paid != earned:
        why = view.chain.halted or view.chain.complaint or "the chain has not got so far"
        raise HyperGPUError(Reason.DEMO_MISSED, f"{paid} of {earned} was paid: {why}")
    return Settled(found.receipts, earned, paid, recorded(view))


def _waited(coordinator: Coordinator, job_id: str) -> LedgerView:
    give_up_at_s = time.monotonic() + _WITHIN_S
    is_told = False
    while True:
        view = ledger_of(coordinator, job_id)
        is_settled = view.is_over and not view.unmeasured_rounds
        if view.chain is not None:
            is_settled &= paid_in_all(view) == sum(int(node.earned) for node in view.nodes)
        is_halted = view.chain is not None and view.chain.halted
        if is_settled or is_halted or time.monotonic() > give_up_at_s:
            return view
        if not is_told:
            is_told = True
            say("pay takes some blocks; without stake, until the challenge window of 30 s is over")
        time.sleep(_LOOK_EACH_S)
