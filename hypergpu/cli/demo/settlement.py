"""How the demo's work is paid: a chain of play money beside it, and the proof at the end."""

import importlib.util
import time
from typing import NamedTuple

from hypergpu.cli.demo.stakes import said_of_stakes
from hypergpu.cli.ledger.account import LedgerView
from hypergpu.cli.ledger.showing import ledger_of, say_ledger, verification_of
from hypergpu.cli.ledger.verifying import verdict_lines
from hypergpu.cli.output import say
from hypergpu.cli.remote.calls import Coordinator
from hypergpu.refusal import Reason, RefusalError
from hypergpu.sites import Sites

_DECIMALS = 6
_WITHIN_S = 75.0
"""The challenge window of a local ledger is 30 s, and its transactions take some blocks."""
_LOOK_EACH_S = 0.5
_LOOPBACK = "127."


class Chain(NamedTuple):
    """What settles the demo's job."""

    name: str
    """Empty: nothing does."""
    note: str


class Settled(NamedTuple):
    """What came of it."""

    receipts: int
    earned: int
    paid: int | None


def chain_here(sites: Sites | None) -> Chain:
    """Anvil, where it is installed and its port can be reached from here."""
    if sites is not None and not sites.coordinator.dials.startswith(_LOOPBACK):
        return Chain("", "the coordinator is in a network of its own: receipts without a chain")
    if importlib.util.find_spec("web3") is None:
        return Chain("", "the extra `chain` is not installed: receipts without a chain")
    from hypergpu.chain.local.anvil import anvil_program

    try:
        program = anvil_program()
    except RefusalError as missing:
        return Chain("", f"{missing.detail}: receipts without a chain")
    return Chain("anvil", f"a chain of play money settles what the work earns: {program.name}")


def settled(coordinator: Coordinator, job_id: str) -> Settled:
    """Wait until everything is paid that is going to be, show it, and prove it from the receipts.

    Raises:
        RefusalError: DEMO_MISSED, nodes were not paid to the last unit, or a receipt is unsound.
    """
    view = _waited(coordinator, job_id)
    say()
    say_ledger(view, _DECIMALS)
    found = verification_of(coordinator, job_id)
    say()
    say("$ hypergpu ledger verify")
    for line in verdict_lines(found):
        say(line)
    if not found.is_sound:
        raise RefusalError(Reason.DEMO_MISSED, f"the pay is not sound: {found.faults[0]}")
    earned = sum(int(node.earned) for node in view.nodes)
    paid = _paid(view)
    if view.chain is not None and paid != earned:
        why = view.chain.halted or view.chain.complaint or "the chain has not got so far"
        raise RefusalError(Reason.DEMO_MISSED, f"{paid} of {earned} was paid: {why}")
    if said := said_of_stakes(view):
        say(said)
    return Settled(found.receipts, earned, paid)


def _waited(coordinator: Coordinator, job_id: str) -> LedgerView:
    give_up_at_s = time.monotonic() + _WITHIN_S
    is_told = False
    while True:
        view = ledger_of(coordinator, job_id)
        is_settled = view.is_over and not view.unmeasured_rounds
        if view.chain is not None:
            is_settled &= _paid(view) == sum(int(node.earned) for node in view.nodes)
        is_halted = view.chain is not None and view.chain.halted
        if is_settled or is_halted or time.monotonic() > give_up_at_s:
            return view
        if not is_told:
            is_told = True
            say("pay takes some blocks; without stake, until the challenge window of 30 s is over")
        time.sleep(_LOOK_EACH_S)


def _paid(view: LedgerView) -> int | None:
    if any(node.paid is None for node in view.nodes):
        return None
    return sum(int(node.paid or 0) for node in view.nodes)
