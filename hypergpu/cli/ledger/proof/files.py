"""Receipts published as a file: whoever has it audits the job without its coordinator."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from hypergpu.cli.ledger.account import ledger_view
from hypergpu.cli.ledger.showing import openings
from hypergpu.cli.ledger.verifying import (
    Verification,
    audited,
    not_audited,
    receipt_faults,
    received,
)
from hypergpu.client import Coordinator
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import SHARED, write_durably
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.receipt import (
    FILE_BYTES_MAX,
    FORMAT,
    AsOf,
    ReceiptFile,
    Signers,
    decoded,
    encoded,
)
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import Domain
from hypergpu.terminal.output import note
from hypergpu.wire.ledger import terms_value

if TYPE_CHECKING:
    from hypergpu.chain.rpc.chain import EvmChain

_NO_CHAIN = (
    "no chain was asked: roots, sums, scores, pools and payments are not checked, nor whether the"
    " file holds every receipt; name an RPC of chain {chain_id}: --chain-url URL"
)
_NO_LEDGER = (
    "the receipts are signed for no chain, and the file names no ledger that pays for them: what"
    " was recorded and paid is not checked, nor whether the file holds every receipt"
)
_NO_BLOCK = (
    "the file names no block that this chain has, so that whatever it does not hold counts as"
    " missing: if it is only older than the chain, export the receipts again"
)


class ReceiptsExported(
    msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/receipts-exported/1"
):
    """What was written."""

    job: str
    file: str
    receipts: int
    chain_id: int
    """0: the file names no ledger."""
    contract: str
    block: int | None = None
    """Whose records the file is sure to hold; None: no chain was asked."""


def exported(
    coordinator: Coordinator, job_id: str, path: Path, chain_url: str = ""
) -> ReceiptsExported:
    """Write all receipts of a job into a file.

    Args:
        coordinator: Has them.
        job_id: Of the job.
        path: The file; another export's is replaced.
        chain_url: RPC of the chain, for the block that the file is of, and for a job that was
            signed for no chain; empty: the one that the coordinator names.

    Raises:
        HyperGPUError: FILE_PRESENT, something else is there; FILE_UNUSABLE, it cannot be written;
            ARGUMENT_INVALID, there is no receipt, or there are too many for a file;
            CHAIN_UNREACHABLE, the chain does not answer, and nothing else names the job's ledger.
    """
    _refuse_others(path)
    answer = coordinator.ledger(job_id)
    view, terms = ledger_view(job_id, answer), terms_value(answer.terms)
    url = chain_url or (view.chain.url if view.chain is not None else "")
    # Before the receipts: what is on the chain by then, they hold.
    settled_on, as_of = _chain_of(terms, openings(view), url) if url else (None, None)
    receipts = tuple(received(coordinator.receipts(job_id)))
    if not receipts:
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"{job_id} has no receipts yet")
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    content = encoded(ReceiptFile(signers, receipts, settled_on, as_of))
    if len(content) > FILE_BYTES_MAX:
        detail = f"{len(content)} bytes of receipts are more than the {FILE_BYTES_MAX} of a file"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
    try:
        write_durably(path, content, mode=SHARED)
    except OSError as broken:
        detail = f"{path} cannot be written: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    ledger = settled_on or terms.domain
    return ReceiptsExported(
        job=job_id,
        file=str(path),
        receipts=len(receipts),
        chain_id=ledger.chain_id,
        contract=ledger.contract,
        block=as_of.block if as_of is not None else None,
    )


def verified_file(path: Path, chain_url: str = "") -> Verification:
    """What a file of receipts proves, by itself and beside a chain. No coordinator is asked.

    Args:
        path: Of the file.
        chain_url: RPC of the chain; empty: none is asked, and what so stays open is said.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read, is too large, or no file of one job's
            receipts; or the chain refuses.
    """
    file = decoded(file_content(path, FILE_BYTES_MAX), source=str(path))
    jobs = {signed.receipt.job for signed in file.receipts}
    if len(jobs) != 1:
        detail = f"{path} holds receipts of {len(jobs)} jobs, not of one"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)
    (job,) = jobs
    ordered = sorted(file.receipts, key=lambda one: (one.receipt.node, one.receipt.sequence))
    faults = list(
        receipt_faults(Terms(job, file.signers.coordinator, file.signers.domain), ordered)
    )
    found = Verification(
        job=job,
        receipts=len(ordered),
        nodes=len({signed.receipt.node for signed in ordered}),
        is_sound=not faults,
        faults=faults,
        file=str(path),
    )
    ledger = file.settled_on or file.signers.domain
    if not ledger.chain_id:
        return not_audited(found, _NO_LEDGER)
    if not chain_url:
        return not_audited(found, _NO_CHAIN.format(chain_id=ledger.chain_id))
    # What talks to a chain is an extra, and slow to import.
    from hypergpu.cli.ledger.reading import job_fact, ledger_at, second_look

    def held_against(fact: JobFact) -> Verification:
        domain = file.signers.domain
        told = audited(found, fact, ordered, signed_for=domain, newer_from=newer_from)
        return replace(told, file_block=None if newer_from is None else newer_from - 1)

    with ledger_at(chain_url) as chain:
        fact = job_fact(chain, ledger, job)
        newer_from = _after(chain, file.as_of)
        whole = held_against(fact)
        if len(whole.faults) == len(found.faults):
            return whole
        again = held_against(second_look(chain, fact))
        is_whole = newer_from is not None or len(again.faults) == len(found.faults)
        return again if is_whole else not_audited(again, _NO_BLOCK)


def file_content(path: Path, most: int) -> bytes:
    """A file's bytes; one that is too large is not read.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read or is too large.
    """
    try:
        size = path.stat().st_size
        if size > most:
            detail = f"{path} has {size} bytes, at most {most} are read"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail)
        with path.open("rb") as file:
            # It may grow meanwhile, or be no file that has a size.
            return file.read(most + 1)
    except OSError as broken:
        detail = f"{path} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


def _refuse_others(path: Path) -> None:
    """Refuse to write over what no export left there."""
    begins = f'{{"format":"{FORMAT}"'.encode()
    if path.exists() and (not path.is_file() or _beginning(path, len(begins)) != begins):
        raise HyperGPUError(Reason.FILE_PRESENT, f"{path} is there already and holds no receipts")


def _beginning(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _chain_of(terms: Terms, opened_by: list[str], url: str) -> tuple[Domain | None, AsOf | None]:
    """The ledger that pays for what was signed for none, and the newest block that is final."""
    from hypergpu.cli.ledger.reading import final_block, ledger_at, settled_on

    try:
        with ledger_at(url) as chain:
            final = final_block(chain)
            as_of = AsOf(final.number, final.hash.hex())
            if not terms.domain.chain_id:
                return settled_on(chain, terms, opened_by), as_of
            if terms.domain.chain_id == chain.chain_id():
                return None, as_of
            why = f"the RPC is of chain {chain.chain_id()}"
    except HyperGPUError as unreachable:
        if not terms.domain.chain_id:
            raise
        why = unreachable.detail
    note(
        "the file does not say of which block it is, and what is recorded after it will count as"
        f" missing: {why}"
    )
    return None, None


def _after(chain: "EvmChain", as_of: AsOf | None) -> int | None:
    """The first block that may hold what a file does not; None: its own is not on the chain."""
    if as_of is None:
        return None
    (block,) = chain.blocks([as_of.block])
    return as_of.block + 1 if block is not None and block.hash.hex() == as_of.hash else None
