"""Pay of the demo: a local chain of play money beside it, and the proof at the end."""

import importlib.util
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.command_line import program
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.sites import Sites
from hypergpu.units import several
from hypergpu.user.cli.demo.job import METERINGS
from hypergpu.user.client import Coordinator, JobLedger
from hypergpu.user.cluster.cluster import LocalCluster, ReadyLine, SettlingBy, StartRefusedError
from hypergpu.user.terminal.commands import usage_error
from hypergpu.user.terminal.output import say

_WITHIN_S = 200.0
"""The window of a local ledger is 30 s, and its transactions take some blocks."""
_LOOK_EACH_S = 0.5
_LOOPBACK = "127."
_PAID = frozenset({"paid", "locked"})


class DemoPay(NamedTuple):
    """Pay of the demo's job."""

    receipts: int
    earned: int
    paid: int | None
    """None without a chain."""
    transactions: int
    """Transactions that recorded contributions."""
    epochs: int
    """Epochs with a payment."""
    decimals: int
    """Decimals of the token; 0 without a chain."""


def start_with_chain(cluster: LocalCluster, sites: Sites | None, metering: str) -> str:
    """Start the coordinator with a local chain, or without one where this machine has none.

    Returns:
        Why there is no chain; empty with one.

    Raises:
        HyperGPUError: The coordinator does not start, or a metering was asked for that needs a
            chain.
    """
    lack = missing_package(sites)
    if not lack:
        try:
            cluster.start_coordinator(SettlingBy("anvil", metering))
        except StartRefusedError as error:
            if error.reason is not Reason.MACHINE_UNFIT:
                raise
            lack = error.detail
        else:
            return ""
    if metering != METERINGS[0]:
        raise usage_error(f"--metering {metering} needs a chain", f"{lack}; or leave it out")
    cluster.start_coordinator()
    return lack


def missing_package(sites: Sites | None) -> str:
    """Why no chain can be started here; empty if one may."""
    if sites is not None and not sites.coordinator.dials.startswith(_LOOPBACK):
        return "the coordinator is in a network of its own"
    if importlib.util.find_spec("web3") is None or importlib.util.find_spec("payments") is None:
        return "the extra `chain` is not installed"
    return ""


def settle_demo(ready: ReadyLine, coordinator: Coordinator, job_id: str, accounts: Path) -> DemoPay:
    """Wait until everything due is paid, show it, and verify it from the receipts.

    Args:
        ready: The demo's coordinator.
        coordinator: Connection to it.
        job_id: The demo's job.
        accounts: Gets the whole ledger of the job.

    Raises:
        HyperGPUError: DEMO_MISSED, a node was not paid in full, or the pay does not verify.
    """
    ledger = _wait_for_pay(coordinator, job_id)
    accounts.write_bytes(msgspec.json.format(msgspec.json.encode(ledger)) + b"\n")
    _run_ledger(ready, "show", job_id)
    _run_ledger(ready, "verify", job_id)
    earned_total = sum(int(node.worth) for node in ledger.nodes)
    has_chain = ledger.on_chain is not None
    paid_total = sum(int(node.paid or 0) for node in ledger.nodes) if has_chain else None
    if paid_total is not None and paid_total != earned_total:
        why = ledger.halted or ledger.unfunded or "the chain has not got so far"
        raise HyperGPUError(Reason.DEMO_MISSED, f"{paid_total} of {earned_total} was paid: {why}")
    kinds = Counter(each.purpose.split("/")[0] for each in ledger.transactions)
    record_count = kinds["batch"] + kinds["record"]
    epochs = {share.epoch for node in ledger.nodes for share in node.shares if share.state in _PAID}
    if record_count:
        say(f"contributions were recorded by {several(record_count, 'transaction')}")
    receipts = sum(node.receipts for node in ledger.nodes)
    decimals = ledger.on_chain.decimals if ledger.on_chain else 0
    return DemoPay(receipts, earned_total, paid_total, record_count, len(epochs), decimals)


def _run_ledger(ready: ReadyLine, command: str, job_id: str) -> None:
    """Run a command of `hypergpu ledger` as a user would; it prints for itself.

    Raises:
        HyperGPUError: DEMO_MISSED, it failed.
    """
    say()
    say(f"$ hypergpu ledger {command}")
    environment = {
        **os.environ,
        "HYPERGPU_ADDRESS": ready.address,
        "HYPERGPU_TOKEN_FILE": ready.operator_token_file,
    }
    arguments = program("hypergpu.user.cli", "ledger", command, job_id)
    process = subprocess.run(arguments, env=environment, check=False)
    if process.returncode:
        status = process.returncode
        raise HyperGPUError(Reason.DEMO_MISSED, f"hypergpu ledger {command} ended with {status}")


def _wait_for_pay(coordinator: Coordinator, job_id: str) -> JobLedger:
    give_up_at_s = time.monotonic() + _WITHIN_S
    is_told = False
    while True:
        ledger = coordinator.ledger(job_id)
        is_settled = ledger.is_over and (ledger.on_chain is None or _is_paid(ledger))
        if is_settled or ledger.halted or time.monotonic() > give_up_at_s:
            return ledger
        if not is_told:
            is_told = True
            say("pay takes some blocks; without stake it waits for the window of 30 s")
        time.sleep(_LOOK_EACH_S)


def _is_paid(ledger: JobLedger) -> bool:
    return all(node.paid == node.worth for node in ledger.nodes)
