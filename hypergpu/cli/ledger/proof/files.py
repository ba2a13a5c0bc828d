"""Receipts published as a file: whoever has it audits the job without its coordinator."""

from pathlib import Path

import msgspec

from hypergpu.cli.ledger.account import ledger_view
from hypergpu.cli.ledger.showing import openings
from hypergpu.cli.ledger.verifying import (
    Verification,
    audited,
    not_audited,
    receipt_faults,
    received,
)
from hypergpu.cli.remote.calls import Coordinator
from hypergpu.files.durable import SHARED, write_durably
from hypergpu.ledger.receipt import (
    FILE_BYTES_MAX,
    FORMAT,
    ReceiptFile,
    Signers,
    decoded,
    encoded,
)
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import Domain
from hypergpu.refusal import Reason, RefusalError
from hypergpu.wire.ledger import terms_value

_NO_CHAIN = (
    "no chain was asked: roots, sums, scores, pools and payments are not checked, nor whether the"
    " file holds every receipt; name an RPC of chain {chain_id}: --chain-url URL"
)
_NO_LEDGER = (
    "the receipts are signed for no chain, and the file names no ledger that pays for them: what"
    " was recorded and paid is not checked, nor whether the file holds every receipt"
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


def exported(
    coordinator: Coordinator, job_id: str, path: Path, chain_url: str = ""
) -> ReceiptsExported:
    """Write all receipts of a job into a file.

    Args:
        coordinator: Has them.
        job_id: Of the job.
        path: The file; another export's is replaced.
        chain_url: RPC of the chain, for a job that was signed for none; empty: the one that the
            coordinator names.

    Raises:
        RefusalError: FILE_PRESENT, something else is there; FILE_UNUSABLE, it cannot be written;
            ARGUMENT_INVALID, there is no receipt, or there are too many for a file;
            CHAIN_UNREACHABLE, the chain that pays for the job does not answer.
    """
    _refuse_others(path)
    answer = coordinator.ledger(job_id)
    view, terms = ledger_view(job_id, answer), terms_value(answer.terms)
    receipts = tuple(received(coordinator.receipts(job_id)))
    if not receipts:
        raise RefusalError(Reason.ARGUMENT_INVALID, f"{job_id} has no receipts yet")
    url = chain_url or (view.chain.url if view.chain is not None else "")
    settled_on = None
    if not terms.domain.chain_id and url:
        settled_on = _ledger(terms, openings(view), url)
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    content = encoded(ReceiptFile(signers, receipts, settled_on))
    if len(content) > FILE_BYTES_MAX:
        detail = f"{len(content)} bytes of receipts are more than the {FILE_BYTES_MAX} of a file"
        raise RefusalError(Reason.ARGUMENT_INVALID, detail)
    try:
        write_durably(path, content, mode=SHARED)
    except OSError as broken:
        detail = f"{path} cannot be written: {broken.strerror}"
        raise RefusalError(Reason.FILE_UNUSABLE, detail) from broken
    ledger = settled_on or terms.domain
    return ReceiptsExported(job_id, str(path), len(receipts), ledger.chain_id, ledger.contract)


def verified_file(path: Path, chain_url: str = "") -> Verification:
    """What a file of receipts proves, by itself and beside a chain. No coordinator is asked.

    Args:
        path: Of the file.
        chain_url: RPC of the chain; empty: none is asked, and what so stays open is said.

    Raises:
        RefusalError: FILE_UNUSABLE, it cannot be read, is too large, or no file of one job's
            receipts; or the chain refuses.
    """
    file = decoded(file_content(path, FILE_BYTES_MAX), source=str(path))
    jobs = {signed.receipt.job for signed in file.receipts}
    if len(jobs) != 1:
        detail = f"{path} holds receipts of {len(jobs)} jobs, not of one"
        raise RefusalError(Reason.FILE_UNUSABLE, detail)
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
    from hypergpu.cli.ledger.reading import job_fact, ledger_at

    with ledger_at(chain_url) as chain:
        fact = job_fact(chain, ledger, job)
    return audited(found, fact, ordered, signed_for=file.signers.domain)


def file_content(path: Path, most: int) -> bytes:
    """A file's bytes; one that is too large is not read.

    Raises:
        RefusalError: FILE_UNUSABLE, it cannot be read or is too large.
    """
    try:
        size = path.stat().st_size
        if size > most:
            detail = f"{path} has {size} bytes, at most {most} are read"
            raise RefusalError(Reason.FILE_UNUSABLE, detail)
        with path.open("rb") as file:
            # It may grow meanwhile, or be no file that has a size.
            return file.read(most + 1)
    except OSError as broken:
        detail = f"{path} cannot be read: {broken.strerror}"
        raise RefusalError(Reason.FILE_UNUSABLE, detail) from broken


def _refuse_others(path: Path) -> None:
    """Refuse to write over what no export left there."""
    begins = f'{{"format":"{FORMAT}"'.encode()
    if path.exists() and (not path.is_file() or _beginning(path, len(begins)) != begins):
        raise RefusalError(Reason.FILE_PRESENT, f"{path} is there already and holds no receipts")


def _beginning(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _ledger(terms: Terms, opened_by: list[str], url: str) -> Domain | None:
    from hypergpu.cli.ledger.reading import ledger_at, settled_on

    with ledger_at(url) as chain:
        return settled_on(chain, terms, opened_by)
