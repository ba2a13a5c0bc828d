"""`hypergpu up`: this machine becomes a coordinator."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.extension import PaymentSummary
from hypergpu.privacy import require_private_folder, rotate_log
from hypergpu.units import several
from hypergpu.user.cli.join_line import ANSWER_WITHIN_S, JoinLine, standing_join_line
from hypergpu.user.cli.reach import RentedHost, open_via
from hypergpu.user.client import ConnectionTarget, Coordinator
from hypergpu.user.client.settings import (
    ResolvedSetting,
    chain_meant,
    known_settings,
    profile,
    write_profile,
)
from hypergpu.user.cluster.cluster import (
    Listen,
    ReadyLine,
    StartRefusedError,
    coordinator_command,
    coordinators_secrets,
    operator,
    wait_until_ready,
)
from hypergpu.user.cluster.dashboard import DashboardProcess
from hypergpu.user.cluster.processes import exit_status, kill_group, repeat, signal_passed_on, start
from hypergpu.user.terminal.output import note, say
from hypergpu.wire.credentials import parse_token


def living_owner(token_file: str) -> str:
    """The address of another coordinator that the profile names and that answers, else empty.

    Args:
        token_file: The operator's token of the coordinator that asks.
    """
    stored_profile = profile()
    address, owners = stored_profile.get("address", ""), stored_profile.get("token_file", "")
    if not address or not owners or Path(owners) == Path(token_file):
        return ""
    return address if _is_alive(address, Path(owners)) else ""


def _is_alive(address: str, token_file: Path) -> bool:
    try:
        token = parse_token(token_file.read_text("utf-8"))
        with Coordinator(ConnectionTarget(address, token, ANSWER_WITHIN_S)) as owner:
            owner.jobs()
    except HyperGPUError as error:
        return error.reason is Reason.NOT_READY
    except (OSError, UnicodeDecodeError, RemoteFailureError):
        return False
    return True


LOG_NAME = "coordinator.log"
TAIL_LINES = 15
AGAIN = "hypergpu up"
PAGE_WITHIN_S = 60.0
"""Longest wait for the page's link, which takes a second or two where the machine is not busy: the
coordinator is what matters. A page that ends is told at once.
"""
_CHAINS = 8
"""What the numbers of refusals for a chain's sake begin with."""


def settled_by(
    found: Mapping[str, ResolvedSetting], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What the coordinator's environment says of its chain. An RPC's address may hold a secret:
    every user of the machine sees what options say.

    Args:
        found: The command line's settings.
        environment: Of this process, which the coordinator gets.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, no chain is named, and something of one is.
    """
    chain, chain_url = chain_meant(found)
    of_chain = [f"HYPERGPU_COORDINATOR_{name}" for name in ("CHAIN", "LEDGER_CONTRACT")]
    variables = [name for name in of_chain if environment.get(name)]
    if chain_url:
        variables.append(f"{known_settings()['chain_url'].environment} (chain_url)")
    if variables and found["chain"].origin == "default":
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"no chain is named, and nothing would be settled by {' and '.join(variables)} alone",
            fix="name the chain: HYPERGPU_CHAIN=NAME, or HYPERGPU_CHAIN=URL of its RPC; to settle"
            " on none: HYPERGPU_CHAIN=none",
        )
    return {"HYPERGPU_COORDINATOR_CHAIN": chain, "HYPERGPU_COORDINATOR_CHAIN_URL": chain_url}


class PageWish(NamedTuple):
    """Whether and where `up` serves the page."""

    is_wanted: bool = True
    port: int | None = None
    """None: the usual one, or a free one where that is taken."""


def run_coordinator(
    at: Listen,
    environment: Mapping[str, str],
    page: PageWish,
    nodes: int | None = None,
    rented: RentedHost | None = None,
) -> int:
    """Run a coordinator until it is told to end; returns its exit status.

    Args:
        at: Where, with what.
        environment: Added to ours for it.
        page: Where the page is to be.
        nodes: As in `standing_join_line`.
        rented: The machine through which nodes come, for which ``at`` is; None: they dial this one.
    """
    is_first = not at.data_dir.exists()
    log = _made_log(at.data_dir)
    begin = log.stat().st_size if log.exists() else 0
    secrets = coordinators_secrets()
    child = start(
        coordinator_command(at), log=log, is_read=True, environment={**secrets, **environment}
    )
    signal_passed_on(child)
    with contextlib.ExitStack() as beside:
        try:
            ready = wait_until_ready(child)
            way = open_via(rented, ready, at, beside)
            dashboard = _open_page(page, ready, at.data_dir, beside)
            _greet(Greeting(ready, _join_line(ready, at.data_dir, nodes), log, dashboard, way))
        except StartRefusedError as error:
            kill_group(child)
            # A key whose address somebody may have sent money to is kept, with all beside it.
            if is_first and error.reason.number // 1000 != _CHAINS:
                shutil.rmtree(at.data_dir, ignore_errors=True)
            raise
        except BaseException as failure:
            # First: whoever read us may be gone, and then nothing can be said.
            kill_group(child)
            if not isinstance(failure, HyperGPUError) or failure.reason is Reason.CHILD_ENDED:
                _say_tail(log, begin)
            raise
        logs = (log,) if dashboard is None else (log, dashboard.log)
        repeat(child, note, logs)
        status = exit_status(child)
    if status:
        _say_tail(log, begin)
    note(f"the coordinator has ended; it goes on where it was with the next: {AGAIN}")
    return status


def _open_page(
    page: PageWish, ready: ReadyLine, data_dir: Path, beside: contextlib.ExitStack
) -> DashboardProcess | None:
    """Start the page's server, which ends with the coordinator; None: it is not wanted."""
    if not page.is_wanted:
        return None
    dashboard = DashboardProcess(ready, data_dir, page.port)
    beside.callback(dashboard.end)
    return dashboard


def _made_log(folder: Path) -> Path:
    try:
        require_private_folder(folder)
        log = folder / LOG_NAME
        rotate_log(log)
        log.touch(mode=0o600)
    except OSError as error:
        detail = f"nothing can be kept in {folder}: {error.strerror}"
        fix = "choose a folder that you may write: --data-dir FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error
    return log


def _say_tail(log: Path, begin: int) -> None:
    """The end of what was logged from ``begin`` on."""
    try:
        content = log.read_bytes()
        # It was begun anew meanwhile when it is shorter.
        text = content[begin if begin <= len(content) else 0 :].decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines()[-TAIL_LINES:]:
        note(f"  {line}")


def _join_line(ready: ReadyLine, folder: Path, nodes: int | None) -> JoinLine:
    operator_token = parse_token(Path(ready.operator_token_file).read_text("utf-8"))
    with operator(ready) as coordinator:
        return standing_join_line(coordinator, folder, operator_token, nodes)


def _reached_by(ready: ReadyLine) -> str:
    """Leave the profile, unless another coordinator that runs owns it; says how to call this."""
    option = f"--token-file {ready.operator_token_file}"
    if owner := living_owner(ready.operator_token_file):
        return (
            f"commands on this machine go to the coordinator at {owner}; for this one add {option}"
        )
    values = {"address": ready.address, "token_file": ready.operator_token_file}
    try:
        path = write_profile(values)
    except OSError as error:
        return (
            f"commands on this machine do not know it, since {error.filename} cannot be written:"
            f" {error.strerror}. Fix: add {option}"
        )
    return f"commands on this machine know it from {path}"


def _page_lines(dashboard: DashboardProcess | None) -> list[str]:
    """Where to watch and steer in a browser, or why not."""
    if dashboard is None:
        return []
    page_line = dashboard.wait_for_line(PAGE_WITHIN_S)
    if page_line.link:
        return [
            "watch and steer it in a browser (this link works once, for ten minutes):",
            "",
            f"    {page_line.link}",
            "",
        ]
    why = page_line.detail or "it has said nothing"
    return [f"the page does not run: {why}. Fix: {page_line.fix or 'hypergpu dashboard'}", ""]


class Greeting(NamedTuple):
    """What people are told once all runs."""

    ready: ReadyLine
    join_by: JoinLine
    log: Path
    dashboard: DashboardProcess | None
    way: list[str]
    """Lines on how nodes reach it, where not by itself."""


def _greet(greeting: Greeting) -> None:
    ready, join_by, log, dashboard, way = greeting
    addresses = ", ".join(parse_token(join_by.token).addresses)
    hours = several(max(1, join_by.good_for_s // 3600), "hour")
    good_for = f"{several(join_by.nodes_left, 'node')} and {hours}"
    for line in (
        f"the coordinator is up at {addresses}",
        *way,
        *(_chain_lines(ready.chain) if ready.chain else ()),
        "",
        f"on each machine that is to train, paste this line (good for {good_for}):",
        "",
        f"    hypergpu join {join_by.token}",
        "",
        "a machine trains only, until its owner adds kinds of farm jobs: --kinds training,embed",
        "",
        "then, here:",
        "",
        "    hypergpu node ls                        who has joined",
        "    hypergpu job submit FILE.toml --watch   train",
        "",
        *_page_lines(dashboard),
        _reached_by(ready),
        f"its log is {log}",
        "Ctrl-C ends it and keeps everything",
    ):
        say(line)


def _chain_lines(chain: PaymentSummary) -> list[str]:
    ledger = f"by the ledger {chain.ledger}" if chain.ledger else "its ledger is not known yet"
    settlement_line = (
        f"jobs that pay are settled on chain {chain.chain_id} at {chain.rpc_url}, {ledger}"
    )
    return [settlement_line, *(f"note: {each}" for each in chain.notes)]
