"""`hypergpu up`: the coordinator as a child in the foreground, and what to do with it."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hypergpu.cli.join_line import JoinLine, living_owner, standing_join_line
from hypergpu.client.settings import ResolvedSetting, chain_meant, known_settings, write_profile
from hypergpu.cluster.coordinator import (
    Listen,
    ReadyLine,
    StartRefusedError,
    coordinator_command,
    operator,
    wait_until_ready,
)
from hypergpu.cluster.processes import (
    exit_status,
    kill_group,
    repeat,
    signal_passed_on,
    start,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentSummary
from hypergpu.terminal.output import note, say
from hypergpu.units import several
from hypergpu.wire.token import parse_token

LOG_NAME = "coordinator.log"
LOG_BYTES_MAX = 10_000_000
TAIL_LINES = 15
AGAIN = "hypergpu up"
_CHAINS = 8
"""What the numbers of refusals for a chain's sake begin with."""


def settled_by(found: Mapping[str, ResolvedSetting]) -> dict[str, str]:
    """What the coordinator's environment says of its chain. An RPC's address may hold a secret:
    every user of the machine sees what options say.

    Args:
        found: The command line's settings.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, no chain is named, and something of one is.
    """
    chain, chain_url = chain_meant(found)
    of_chain = [f"HYPERGPU_COORDINATOR_{name}" for name in ("CHAIN", "LEDGER_CONTRACT")]
    named = [name for name in of_chain if os.environ.get(name)]
    if chain_url:
        named.append(f"{known_settings()['chain_url'].environment} (chain_url)")
    if named and found["chain"].origin == "default":
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"no chain is named, and nothing would be settled by {' and '.join(named)} alone",
            fix="name the chain: HYPERGPU_CHAIN=NAME, or HYPERGPU_CHAIN=URL of its RPC; to settle"
            " on none: HYPERGPU_CHAIN=none",
        )
    return {"HYPERGPU_COORDINATOR_CHAIN": chain, "HYPERGPU_COORDINATOR_CHAIN_URL": chain_url}


def up(at: Listen, environment: Mapping[str, str]) -> int:
    """Run a coordinator until it is told to end; returns its exit status.

    Args:
        at: Where, with what.
        environment: Added to ours for it.
    """
    is_first = not at.data_dir.exists()
    log = _made_log(at.data_dir)
    begin = log.stat().st_size if log.exists() else 0
    child = start(coordinator_command(at), log=log, is_read=True, environment=environment)
    signal_passed_on(child)
    try:
        ready = wait_until_ready(child)
        _greet(ready, at.data_dir, log)
    except StartRefusedError as refused:
        kill_group(child)
        # A key whose address somebody may have sent money to by now is kept, with all beside it.
        if is_first and refused.reason.number // 1000 != _CHAINS:
            shutil.rmtree(at.data_dir, ignore_errors=True)
        raise
    except BaseException as failure:
        # First: whoever read us may be gone, and then nothing can be said.
        kill_group(child)
        if not isinstance(failure, HyperGPUError) or failure.reason is Reason.CHILD_ENDED:
            _say_tail(log, begin)
        raise
    repeat(child, note)
    status = exit_status(child)
    if status:
        _say_tail(log, begin)
    note(f"the coordinator has ended; it goes on where it was with the next: {AGAIN}")
    return status


def _made_log(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = fresh_log(folder / LOG_NAME)
        log.touch()
    except OSError as broken:
        detail = f"nothing can be kept in {folder}: {broken.strerror}"
        fix = "choose a folder that you may write: --data-dir FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from broken
    return log


def fresh_log(path: Path) -> Path:
    """A log to append to; an old long one is set aside."""
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_suffix(".1"))
    return path


def _say_tail(log: Path, begin: int) -> None:
    """The end of what was logged from ``begin`` on."""
    try:
        text = log.read_bytes()[begin:].decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines()[-TAIL_LINES:]:
        note(f"  {line}")


def _join_line(ready: ReadyLine, folder: Path) -> JoinLine:
    named = parse_token(Path(ready.operator_token_file).read_text("utf-8"))
    with operator(ready) as coordinator:
        return standing_join_line(coordinator, folder, named)


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
    except OSError as broken:
        return (
            f"commands on this machine do not know it, since {broken.filename} cannot be written:"
            f" {broken.strerror}. Fix: add {option}"
        )
    return f"commands on this machine know it from {path}"


def _greet(ready: ReadyLine, folder: Path, log: Path) -> None:
    join_by = _join_line(ready, folder)
    addresses = ", ".join(parse_token(join_by.token).addresses)
    hours = max(1, join_by.good_for_s // 3600)
    for line in (
        f"the coordinator is up at {addresses}",
        *(_chain_lines(ready.chain) if ready.chain else ()),
        "",
        f"on each machine that is to train, paste this line (good for {several(hours, 'hour')}):",
        "",
        f"    hypergpu join {join_by.token}",
        "",
        "then, here:",
        "",
        "    hypergpu node ls                        who has joined",
        "    hypergpu job submit FILE.toml --watch   train",
        "",
        _reached_by(ready),
        f"its log is {log}",
        "Ctrl-C ends it and keeps everything",
    ):
        say(line)


def _chain_lines(chain: PaymentSummary) -> list[str]:
    ledger = f"by the ledger {chain.ledger}" if chain.ledger else "its ledger is not known yet"
    settled = f"jobs that pay are settled on chain {chain.chain_id} at {chain.rpc_url}, {ledger}"
    return [settled, *(f"note: {each}" for each in chain.notes)]
