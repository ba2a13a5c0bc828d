"""What a node on this machine holds: its key, its receipts and its vouchers. Nobody is asked."""

from pathlib import Path

import msgspec

from hypergpu.cli.ledger.account import shown
from hypergpu.cli.ledger.stored import Stored, stored_receipts, stored_voucher
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId, JobKey
from hypergpu.keys.keyfile import is_encrypted, stored_address
from hypergpu.ledger import pay
from hypergpu.ledger.receipt import ReceiptCheck, Signers
from hypergpu.ledger.terms import Terms, kept_terms
from hypergpu.terminal.output import Column
from hypergpu.units import are, several

COLUMNS = (
    Column("job"),
    Column("signed for by"),
    Column("chain"),
    Column("receipts", is_number=True),
    Column("unsound", is_number=True),
    Column("score", is_number=True),
    Column("voucher", is_number=True),
)
KEY_FILE = "identity.key"
"""The daemon's names for its files; see docs/node.md."""
LEDGER_FOLDER, TERMS_FILE = "ledger", "terms.json"
CONFLICT_FILE = "conflict.json"
OWNER_MARK = "@"
"""A job's folder is named by its id, this, and who signs for it; older ones by the id alone."""
MENDED_BY = (
    "A node that starts asks its coordinator for what is missing: hypergpu join; if that is gone,"
    " put back a copy of the folder"
)
TERMS_MENDED_BY = (
    "A node that starts is told them again by its coordinator, and takes them where it signed its"
    " work for them: hypergpu join; if that is gone, put back a copy of the file"
)
_UNSOUND_MENDED_BY = (
    "Stop the node, delete their lines and start it: it asks its coordinator for them again"
)
_SHOWN = 5
_UNKNOWN = JobKey("")


class WalletJob(msgspec.Struct, frozen=True):
    """What is held of one job. Amounts are whole units, as text: they may be long."""

    job: str
    key: str
    coordinator: str
    chain_id: int
    contract: str
    receipts: int
    unsound: int
    """Receipts with a signature that is not what it should be."""
    samples: int
    score: str
    vouched: str
    damaged: str = ""
    """Which file cannot be used, why, and what mends it; its figures are 0. Empty: all can.

    Without terms nothing is checked: `key` is empty, and receipts count as they lie there.
    """
    missing: int = 0
    """Receipts that the others and the newest voucher show to be missing."""
    unreadable: int = 0
    """Lines of its receipts that are none."""
    incomplete: str = ""
    """The same in words, with the numbers that are missing; empty: all are there."""
    unsound_numbers: tuple[int, ...] = ()
    """Of the receipts that are unsound."""
    folder: str = ""
    """Where its files lie."""


class WalletView(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/wallet/1"):
    """A node's wallet."""

    node: str
    key_file: str
    is_encrypted: bool
    jobs: list[WalletJob]


def wallet_view(state_dir: Path) -> WalletView:
    """Read a node's state folder; the daemon may be running. Checks each receipt: 0.2 ms.

    A job whose files are damaged says so, and the others are told all the same.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the key is missing or damaged.
    """
    key = state_dir / KEY_FILE
    if not key.exists():
        detail = f"there is no node's key in {state_dir}"
        fix = "name its folder: --state-dir FOLDER; or become a node: hypergpu join TOKEN"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    return WalletView(
        node=stored_address(key),
        key_file=str(key),
        is_encrypted=is_encrypted(key),
        jobs=[_job(folder) for folder in job_folders(state_dir)],
    )


def wallet_lines(view: WalletView) -> list[str]:
    """Whose key it is and where it lies, and what cannot be told."""
    how = "encrypted" if view.is_encrypted else "plain: encrypted when the daemon starts again"
    damaged = [f"damaged: {job.job}: {job.damaged}" for job in view.jobs if job.damaged]
    lacking = [_lacking(job) for job in view.jobs if job.incomplete]
    unsound = [_unsound(job) for job in view.jobs if job.unsound and not _is_foreign(job)]
    whose = [f"node  {view.node}", f"key   {view.key_file} ({how})"]
    return [*whose, *damaged, *unsound, *lacking, *_tiers(view)]


def _lacking(job: WalletJob) -> str:
    """What is not there of a job's receipts, and how it comes back."""
    sound = job.receipts - job.unsound
    told = f"{several(sound, 'receipt')} {are(sound)} sound"
    return f"incomplete: {job.job}: {told}; {job.incomplete}. {MENDED_BY}"


def _unsound(job: WalletJob) -> str:
    """Which receipts count for nothing, and how they are mended."""
    numbers = ", ".join(map(str, job.unsound_numbers[:_SHOWN]))
    more = f" and {len(job.unsound_numbers) - _SHOWN} more" * (len(job.unsound_numbers) > _SHOWN)
    told = f"{several(job.unsound, 'receipt')} {are(job.unsound)} not what was signed"
    return (
        f"unsound: {job.job}: {told}: sequence {numbers}{more} in {job.folder}/receipts*.jsonl."
        f" {_UNSOUND_MENDED_BY}"
    )


def _is_foreign(job: WalletJob) -> bool:
    """Whether the terms must be damaged, since none of several receipts was made for them."""
    return job.unsound == job.receipts > 1


def _tiers(view: WalletView) -> list[str]:
    """What a voucher is worth, and who knows the rest."""
    if not any(job.vouched != "0" for job in view.jobs):
        return []
    return [
        "pay   a voucher is T0 vouched; what is recorded, paid and final, the chain knows:",
        "      hypergpu ledger show says that, and when the rest is due",
    ]


def wallet_rows(view: WalletView, decimals: int | None) -> list[list[str]]:
    """The table of `COLUMNS`; ``decimals`` of the token, which a wallet does not know."""
    return [
        [
            job.job,
            job.coordinator[:10],
            _chain(job),
            str(job.receipts),
            str(job.unsound),
            job.score,
            shown(job.vouched, decimals),
        ]
        for job in view.jobs
    ]


def _chain(job: WalletJob) -> str:
    if not job.key:
        return "unknown"
    return str(job.chain_id) if job.chain_id else "none"


def job_of(folder: Path) -> str:
    """Whose folder it is."""
    return folder.name.partition(OWNER_MARK)[0]


def job_folders(state_dir: Path) -> list[Path]:
    """Where a node keeps what it holds, by job; of some, terms may be missing."""
    ledger = state_dir / LEDGER_FOLDER
    found = [path for path in ledger.glob("*") if path.is_dir() and any(path.iterdir())]
    return sorted(found, key=lambda folder: (job_of(folder), folder.name))


def terms_in(folder: Path) -> Terms:
    """What a job's folder says of whom and where its work counts.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is missing or damaged.
    """
    path = folder / TERMS_FILE
    try:
        return kept_terms(path.read_bytes(), JobId(job_of(folder)))
    except (OSError, ValueError) as broken:
        why = broken.strerror if isinstance(broken, OSError) else broken
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {why}", fix=TERMS_MENDED_BY) from broken


def _job(folder: Path) -> WalletJob:
    signed, damage = None, ""
    try:
        terms = terms_in(folder)
        signed, damage = stored_voucher(folder, terms)
    except HyperGPUError as unusable:
        terms = Terms(job=_UNKNOWN, coordinator=Address(folder.name.partition(OWNER_MARK)[2]))
        damage = f"{unusable.detail}. {unusable.fix}"
    try:
        stored = stored_receipts(folder, signed.voucher.sequence if signed else 0)
    except OSError as broken:
        damage = f"{broken.filename}: {broken.strerror}"
        stored = Stored([], 0, ())
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    check = ReceiptCheck(signers)
    receipts = stored.receipts
    plain = [each.receipt for each in receipts]
    unsound = [each.receipt.sequence for each in receipts if terms.job and check.fault(each)]
    if len(unsound) == len(receipts) > 1:
        damage = f"{folder / TERMS_FILE}: no receipt was signed for these terms. {TERMS_MENDED_BY}"
    return WalletJob(
        job=job_of(folder),
        key=terms.job,
        coordinator=terms.coordinator,
        chain_id=terms.domain.chain_id,
        contract=terms.domain.contract if terms.job else "",
        receipts=len(receipts),
        unsound=len(unsound),
        samples=sum(one.samples for one in plain),
        score=str(sum(pay.score(one.samples, one.quality_bps) for one in plain)),
        vouched=str(signed.voucher.amount if signed else 0),
        damaged=damage,
        missing=stored.missing_count,
        unreadable=stored.unreadable,
        incomplete=stored.damage,
        unsound_numbers=tuple(unsound),
        folder=str(folder),
    )
