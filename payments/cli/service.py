"""Commands that need a coordinator and no key: verify and reclaim."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hypergpu.engine.opening import open_engine
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.ledger_terms import Terms
from hypergpu.process import configure_logs
from hypergpu.units import Wei
from hypergpu.user.client.asynchronous import AsyncCoordinator
from hypergpu.user.client.connection import find_target
from hypergpu.user.client.ledger import LedgerOnChain
from hypergpu.user.terminal.output import (
    Column,
    amount_text,
    confirm,
    numbers,
    say,
    say_json,
    say_table,
)
from payments.cli.options import JobAt, NamedJobAt
from payments.cli.show import time_text
from payments.core.verify import (
    FILE_BYTES_MAX,
    LedgerRecords,
    NodeFinding,
    ReceiptFile,
    Verification,
    decode_file,
    verify,
)
from payments.shell.chains import CallRefusedError, ChainUnreachableError
from payments.shell.receipt_tasks import check_receipts

_Result = TypeVar("_Result")


async def read_receipts(at: JobAt, file: Path | None = None) -> ReceiptFile:
    """All receipts of a job, from a file that `ledger export` wrote or from the coordinator."""
    if file is not None:
        return read_receipt_file(file)
    async with open_job(at) as (coordinator, job_id):
        ledger = await coordinator.ledger(job_id)
        receipts = [each async for each in coordinator.receipts(job_id)]
    return ReceiptFile(JobId(job_id), ledger.terms, Wei(int(ledger.unit_price)), tuple(receipts))


def read_receipt_file(path: Path) -> ReceiptFile:
    """Read a file that `ledger export` wrote."""
    try:
        with path.open("rb") as stream:
            return decode_file(stream.read(FILE_BYTES_MAX + 1), source=str(path))
    except OSError as error:
        detail = f"{path} cannot be read: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error


def run(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run a command's coroutine, with a chain's failures as numbered errors."""
    try:
        return asyncio.run(work())
    except ChainUnreachableError as away:
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, str(away)) from away
    except CallRefusedError as error:
        raise HyperGPUError(Reason.REQUEST_INVALID, f"the chain refused: {error}") from error


@asynccontextmanager
async def open_job(at: JobAt | NamedJobAt) -> AsyncIterator[tuple[AsyncCoordinator, str]]:
    """Connect to a job's coordinator; the job's id."""
    flags = {"address": at.address, "token_file": at.token_file}
    async with await AsyncCoordinator.open(
        await asyncio.to_thread(find_target, flags)
    ) as coordinator:
        yield coordinator, await coordinator.find_job(at.job)


class Verified(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/verified/2"
):
    """Result of a check."""

    job: str
    chain_id: int
    ledger: str
    block: int | None
    """None: no chain was asked."""
    is_sound: bool
    faults: tuple[str, ...]
    open: tuple[str, ...]
    nodes: tuple[NodeFinding, ...]
    decimals: int


def check_job(
    at: JobAt, file: Path | None, chain_url: str, *, is_offline: bool, engine: str
) -> Verified:
    """Check a job.

    Args:
        at: The job.
        file: Written by `ledger export`; None: the coordinator has the receipts.
        chain_url: RPC of the chain; empty: the coordinator's, or a public one.
        is_offline: Whether no chain is asked.
        engine: Name of the engine that checks signatures; empty: this process does.
    """
    receipts = run(lambda: read_receipts(at, file))
    faults = _faults_by(engine, receipts) if engine else None
    if is_offline or not receipts.terms.domain.chain_id:
        return _result(receipts, verify(receipts, known_faults=faults), decimals=0)
    records, decimals = run(lambda: _read_ledger(at, file, chain_url, receipts.terms))
    return _result(receipts, verify(receipts, records, faults), decimals=decimals)


def _faults_by(name: str, receipts: ReceiptFile) -> list[str]:
    configure_logs(logging.WARNING)
    engine = open_engine(name)
    try:
        return check_receipts(engine, receipts)
    finally:
        engine.close()


async def _read_ledger(
    at: JobAt, file: Path | None, chain_url: str, terms: Terms
) -> tuple[LedgerRecords, int]:
    """The ledger's records of a job, and the decimals of its token."""
    # Receipts alone are checked without the extra [chain].
    from payments.cli.account import open_ledger
    from payments.cli.records import read_records

    if file is None and not chain_url:
        async with open_job(at) as (coordinator, job_id):
            on_chain = (await coordinator.ledger(job_id)).on_chain
            chain_url = on_chain.url if on_chain else ""
    async with open_ledger(terms.domain, chain_url) as ledger:
        return await read_records(ledger, terms), ledger.decimals


def say_verified(found: Verified, *, as_json: bool) -> None:
    """Print what was found.

    Raises:
        HyperGPUError: SIGNATURE_INVALID, there is a fault.
    """
    if as_json:
        say_json(found)
    else:
        _say(found)
    if not found.is_sound:
        detail = f"{found.job}: {len(found.faults)} faults in its receipts or its pay"
        fix = "show them to its nodes; arbiters void what was paid wrongly: hypergpu ledger void"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)


def _result(file: ReceiptFile, found: Verification, *, decimals: int) -> Verified:
    domain = file.terms.domain
    return Verified(
        job=file.job_id,
        chain_id=domain.chain_id,
        ledger=domain.contract,
        is_sound=not found.faults,
        decimals=decimals,
        **found._asdict(),
    )


def _say(found: Verified) -> None:
    figures = numbers("receipts", "score", "worth", "recorded", "allotted", "paid", "void")
    show_amount = partial(amount_text, decimals=found.decimals)
    rows = [
        [
            *(node.node, str(node.receipts), str(node.total_score), show_amount(node.worth)),
            *(str(node.recorded_score), *map(show_amount, (node.allotted, node.paid, node.void))),
        ]
        for node in found.nodes
    ]
    say_table((Column("node"), *figures), rows, empty=f"{found.job} has no receipts")
    for title, texts in (("fault", found.faults), ("open", found.open)):
        for text in texts:
            say(f"{title}: {text}")
    against = "no chain was asked"
    if found.block is not None:
        against = f"compared with {found.ledger} on chain {found.chain_id} at block {found.block}"
    receipts = sum(node.receipts for node in found.nodes)
    verdict = "sound" if found.is_sound else f"{len(found.faults)} faults"
    say(f"{found.job}: {receipts} receipts, {verdict}; {against}")


_LOOK_EACH_S = 0.5
_LOOKS = 60


class Reclaimed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/reclaimed/2"
):
    """State of a job's end on its ledger."""

    job: str
    purpose: str
    """Purpose of the queued transaction; empty: none was queued."""
    ends_at_unix_s: int
    """0: the announcement is not in a block yet."""
    free_escrow: str


def reclaim_job(at: NamedJobAt, *, yes: bool, as_json: bool) -> None:
    """Announce a job's end; once its time has come, take what is free."""
    state, sentence = run(lambda: _announce_or_take(at, yes=yes))
    if as_json:
        say_json(state)
    else:
        say(sentence)


async def _announce_or_take(at: NamedJobAt, *, yes: bool) -> tuple[Reclaimed, str]:
    async with open_job(at) as (coordinator, job_id):
        chain = await _chain(coordinator, job_id)
        free = amount_text(int(chain.free_escrow), chain.decimals)
        if not chain.ends_at_unix_s:
            question = (
                f"end {job_id} on its ledger for good? Receipts that are not recorded"
                " when the wait is over are not paid"
            )
            confirm(question, yes=yes)
            purpose = await coordinator.request_reclaim(job_id)
            chain = await _wait(coordinator, job_id, lambda found: found.ends_at_unix_s > 0)
            when = time_text(chain.ends_at_unix_s) if chain.ends_at_unix_s else "a time to come"
            state_text = f"{job_id} ends at {when}; run this again then to take what is free"
        elif chain.block_time_unix_s < chain.ends_at_unix_s:
            purpose, when = "", time_text(chain.ends_at_unix_s)
            state_text = f"{job_id} ends at {when}; {free} is free now: run this again then"
        elif not int(chain.free_escrow):
            purpose, state_text = "", f"nothing of {job_id} is free"
        else:
            purpose = await coordinator.reclaim(job_id)
            chain = await _wait(coordinator, job_id, lambda found: not int(found.free_escrow))
            is_back = not int(chain.free_escrow)
            state_text = f"{free} of {job_id} " + ("is paid back" if is_back else "is queued")
    state = Reclaimed(
        job=job_id,
        purpose=purpose,
        ends_at_unix_s=chain.ends_at_unix_s,
        free_escrow=chain.free_escrow,
    )
    return state, state_text


async def _chain(coordinator: AsyncCoordinator, job_id: str) -> LedgerOnChain:
    chain = (await coordinator.ledger(job_id)).on_chain
    if chain is not None and chain.is_open:
        return chain
    detail = f"{job_id} is not open on a ledger: no escrow of it lies there"
    fix = "see its state: hypergpu ledger show JOB"
    raise HyperGPUError(Reason.JOB_PHASE, detail, fix=fix)


async def _wait(
    coordinator: AsyncCoordinator, job_id: str, is_reached: Callable[[LedgerOnChain], bool]
) -> LedgerOnChain:
    """The job on the ledger once a change is in a block, or as it is after half a minute."""
    chain = await _chain(coordinator, job_id)
    for _ in range(_LOOKS):
        if is_reached(chain):
            break
        await asyncio.sleep(_LOOK_EACH_S)
        chain = await _chain(coordinator, job_id)
    return chain
